"""Text to action: what the agent's answer must look like, and the reward for keeping to it.

A parser is any function `str -> ParseResult`. On success the result has the action; on failure
its action is None, and `obs` tells the model what was wrong. A failed parse is not a move:
protocols do not step the environment then.

    >>> parse = compose_parsers(think_prefix_parser(), xml_parser("move"))
    >>> parse("<think>The middle is free.</think><move>B2</move>").action
    'B2'

Every parser here accepts any text, of any length, in linear time, and never guesses: where an
answer is unclear (an unclosed tag, an empty box), it fails and says so.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from msgspec.structs import force_setattr

from ludic.errors import AgentError, ConfigError
from ludic.plumbing.given import remembered
from ludic.plumbing.records import Record
from ludic.plumbing.text import clean_text
from ludic.registry import PARSERS


class ParseResult(Record, frozen=True):
    """The action, or None with feedback in `obs`; `reward` is for the format alone."""

    action: str | None
    reward: float = 0.0
    obs: str | None = None

    def __post_init__(self) -> None:
        for name, text in (("action", self.action), ("obs", self.obs)):
            if text is not None and not isinstance(text, str):
                raise AgentError(f"a parser's {name} is text or None, not as in {self}")
            if text and not text.isascii():  # it can be stored, as the model's text could
                force_setattr(self, name, clean_text(text))
        try:
            adds_up = abs(self.reward) <= 1e300
        except TypeError:  # no number, such as None or text
            adds_up = False
        if not adds_up:
            raise AgentError(f"a parser's reward is finite, far from the largest, not as in {self}")


Parser: TypeAlias = Callable[[str], ParseResult]


class _Unreadable(Exception):
    """Raised by a reader below; its message is the feedback that the model gets."""


def _parser(read: Callable[[str], str], success_reward: float, error_reward: float) -> Parser:
    """Turns a reader (text to action, or `_Unreadable`) into a parser with its two rewards."""
    for name, value in (("success_reward", success_reward), ("error_reward", error_reward)):
        if not math.isfinite(value):
            raise ConfigError(f"a parser's {name} is {value!r}: it must be a finite number")

    def parse(text: str) -> ParseResult:
        if not isinstance(text, str):
            raise TypeError(f"a parser reads str, not {type(text).__name__}: decode it first")
        try:
            action = read(text)
        except _Unreadable as failure:
            return ParseResult(None, error_reward, str(failure))
        return ParseResult(action, success_reward)

    return parse


@remembered("text")
def text_parser(*, success_reward: float = 0.0, error_reward: float = -0.1) -> Parser:
    """The whole answer is the action, without the white space around it. Fails on nothing but
    white space."""

    def read(text: str) -> str:
        return _filled(text, "The answer was empty: write your action.")

    return _parser(read, success_reward, error_reward)


@remembered("xml")
def xml_parser(
    tag: str,
    exact: bool = False,
    success_reward: float = 0.0,
    error_reward: float = -0.1,
) -> Parser:
    """The action stands in `<tag>…</tag>`.

    With `exact` the answer is that one block and nothing else. Without, text may surround it and
    the last block outside of `<think>…</think>` counts; an opening tag after it that is never
    closed is a failure, since the model had not finished changing its mind.
    """
    if not re.fullmatch(r"[A-Za-z_][\w.-]*", tag):
        raise ConfigError(
            f"xml_parser: {tag!r} is not a tag name; use letters, digits, '_', '-', '.'"
        )
    opening, closing = f"<{tag}>", f"</{tag}>"

    def read(text: str) -> str:
        if not exact and tag != "think":
            text = _answer(text)
        head, closed, after = text.rpartition(closing)
        before, opened, inner = head.rpartition(opening)
        if not closed:
            raise _Unreadable(f"No {opening}...{closing} found. Write your action in these tags.")
        if not opened:
            raise _Unreadable(f"{closing} has no {opening} before it.")
        if opening in after:
            raise _Unreadable(f"The last {opening} is not closed with {closing}.")
        if closing in inner:
            raise _Unreadable(f"The last {closing} has no {opening} before it.")
        if exact and (before.strip() or after.strip()):
            raise _Unreadable(f"Write only {opening}...{closing}, and nothing around it.")
        return _filled(inner, f"{opening}{closing} was empty: put your action between the tags.")

    return _parser(read, success_reward, error_reward)


xml_tag_parser = xml_parser


@remembered("think_prefix")
def think_prefix_parser(
    *, prefilled: bool = False, success_reward: float = 0.0, error_reward: float = -0.1
) -> Parser:
    """The answer begins with one `<think>…</think>`; what follows is the action.

    `prefilled` is for chat templates that open the block themselves, so that the completion
    begins inside it.
    """

    def read(text: str) -> str:
        body = text.lstrip()
        if body.startswith("<think>"):
            body = body[len("<think>") :]
        elif not prefilled:
            raise _Unreadable("Begin your answer with <think>...</think>.")
        thought, closed, answer = body.partition("</think>")
        if not closed:
            raise _Unreadable("<think> is not closed: write </think> before your answer.")
        if "<think>" in thought or "<think>" in answer or "</think>" in answer:
            raise _Unreadable("Think in one <think>...</think> block only.")
        return _filled(answer, "Nothing follows </think>: write your answer after it.")

    return _parser(read, success_reward, error_reward)


_BOX = re.compile(r"\\boxed\s*(?={)")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)


def last_boxed(text: str) -> str | None:
    """What stands in the last `\\boxed{…}` of a text, nested braces included; None if there is
    no box, or if the last one is not closed."""
    box = _BOX.match(text, text.rfind("\\boxed"))
    if box is None or text.find("}", box.end()) < 0:
        return None
    start, depth = box.end(), 0
    for match in _BRACES.finditer(text, start):
        brace = match.group()
        if brace == "{":
            depth += 1
        elif brace == "}":
            depth -= 1
            if depth == 0:
                return text[start + 1 : match.start()]
    return None


@remembered("boxed")
def boxed_parser(*, success_reward: float = 0.0, error_reward: float = -0.1) -> Parser:
    """The action is what stands in the last `\\boxed{…}` outside of `<think>…</think>`, nested
    braces included."""

    def read(text: str) -> str:
        inner = last_boxed(_answer(text))
        if inner is None:
            raise _Unreadable("No closed \\boxed{...} at the end: put your answer in one.")
        return _filled(inner, "\\boxed{} was empty: put your answer in it.")

    return _parser(read, success_reward, error_reward)


@remembered("json")
def json_parser(
    key: str | None = None,
    *,
    required: Sequence[str] = (),
    success_reward: float = 0.0,
    error_reward: float = -0.1,
) -> Parser:
    """The answer is one JSON object, alone or in a ``` fence.

    The action is the value of `key` (a string as it is, anything else as JSON), or the whole
    object as compact JSON. Missing `required` keys, keys given twice and NaN are failures.
    """

    def read(text: str) -> str:
        try:
            value = strict_json(_unfenced(text))
        except ValueError as error:
            raise _Unreadable(f"Write one JSON object and nothing else: {error}.") from None
        if not isinstance(value, dict):
            raise _Unreadable("Write one JSON object, not a list or a bare value.")
        for name in (*required, *([key] if key is not None else [])):
            if name not in value:
                raise _Unreadable(f"The JSON object lacks the key {name!r}.")
        chosen = value if key is None else value[key]
        if isinstance(chosen, str):
            return _filled(chosen, f"The value of {key!r} was empty.")
        try:
            return json.dumps(chosen, ensure_ascii=False, separators=(",", ":"))
        except RecursionError:  # what could just be read may be just too deep to write
            raise _Unreadable("The JSON is nested too deeply.") from None

    return _parser(read, success_reward, error_reward)


@remembered("regex")
def regex_parser(
    pattern: str,
    *,
    group: int | str | None = None,
    full: bool = False,
    timeout_s: float = 1.0,
    success_reward: float = 0.0,
    error_reward: float = -0.1,
    feedback: str | None = None,
) -> Parser:
    """The action is what `pattern` matches first, or all of the answer if `full`.

    `group` says which group is the action (by default the first, or the whole match if there is
    none). A pattern that backtracks for longer than `timeout_s` is a failed parse.
    """
    import regex  # type: ignore[import-untyped]  # unlike `re`, it can be given a time limit

    try:
        compiled = regex.compile(pattern)
    except regex.error as error:
        raise ConfigError(
            f"regex_parser: {pattern!r} is not a regular expression: {error}"
        ) from error
    chosen = group if group is not None else min(1, compiled.groups)
    exists = chosen in compiled.groupindex if isinstance(chosen, str) else chosen <= compiled.groups
    if not exists:
        raise ConfigError(f"regex_parser: {pattern!r} has no group {chosen!r}")
    complaint = feedback or f"The answer does not have the form {pattern}"
    find = compiled.fullmatch if full else compiled.search

    def read(text: str) -> str:
        try:
            match = find(text.strip() if full else text, timeout=timeout_s)
        except TimeoutError:
            raise _Unreadable("The answer could not be read in time: keep it short.") from None
        if match is None or match.group(chosen) is None:
            raise _Unreadable(complaint)
        return _filled(match.group(chosen), complaint)

    return _parser(read, success_reward, error_reward)


@remembered("compose")
def compose_parsers(*parsers: Parser) -> Parser:
    """Each parser reads the action of the one before. Rewards add up; the first failure stops,
    with the rewards so far and its own."""
    if not parsers:
        raise ConfigError("compose_parsers needs at least one parser")

    def parse(text: str) -> ParseResult:
        total = 0.0
        for parser in parsers:
            result = parser(text)
            total += result.reward
            if result.action is None:
                return ParseResult(None, total, result.obs)
            text = result.action
        return ParseResult(text, total)

    return parse


def make_parser(spec: str | Mapping[str, Any] | Sequence[Any] | Parser) -> Parser:
    """A parser from JSON, for run files.

    `"boxed"`, `{"kind": "xml", "tag": "move"}`, or a list of those, which is composed. A parser
    is returned as it is.
    """
    return parser_maker(spec)()


def parser_maker(
    spec: str | Mapping[str, Any] | Sequence[Any] | Parser,
) -> Callable[[], Parser]:
    """Returns what does `make_parser(spec)` as often as it is called, and looks names up once."""
    if callable(spec):
        return lambda: spec
    if isinstance(spec, str | Mapping):
        return PARSERS.maker(spec)
    makers = [parser_maker(part) for part in spec]
    return lambda: compose_parsers(*(make() for make in makers))


def _filled(text: str, otherwise: str) -> str:
    stripped = text.strip()
    if not stripped:
        raise _Unreadable(otherwise)
    return stripped


def _answer(text: str) -> str:
    """The text without `<think>…</think>`: what a model only considers is no answer."""
    start, closed, rest = text.partition("</think>")
    prefilled = closed and "<think>" not in start
    return re.sub("(?s)<think>.*?(?:</think>|\\Z)", "", rest if prefilled else text)


def _unfenced(text: str) -> str:
    body = text.strip()
    if body.startswith("```") and body.endswith("```") and len(body) > 6:
        first, newline, rest = body[3:-3].partition("\n")
        if newline and first.strip() in ("", "json"):
            return rest
    return body


def strict_json(text: str) -> Any:
    """Strict JSON: no NaN or infinity, no repeated keys, no lone surrogates. Raises `ValueError`
    with what is wrong."""
    try:
        value = json.loads(
            text, object_pairs_hook=_distinct, parse_constant=_finite, parse_float=_finite
        )
        if "\\u" in text:  # an escaped lone surrogate can never be encoded
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("it holds a lone surrogate, which is not text") from None
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("it repeats a key, so its meaning is ambiguous")
    return value


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"it holds {digits}, which is not a JSON number")
    return value
