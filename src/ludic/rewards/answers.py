"""When two answers are the same: as numbers, exactly, and as mathematics, symbolically.

Nothing here guesses: a text that cannot be read as a whole is not a number and equals nothing.
"""

from __future__ import annotations

import atexit
import os
import re
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from queue import Empty, LifoQueue
from typing import Any

from ludic.errors import DeadlineError, EnvError
from ludic.workers.child_process import Answerer, ChildError, ChildProcess

MAX_NUMBER_CHARS = 100
MAX_MATH_CHARS = 1000

_PLAIN = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_NUMBER = re.compile(rf"({_PLAIN})(?:[eE]([+-]?\d{{1,3}}))?(?:\s*/\s*({_PLAIN}))?")
# Behind a number it would be a mixed number: 2\frac{1}{2} is not 21/2.
_LATEX_FRACTION = re.compile(r"(?<![\w.,])\\[dt]?frac\{(\d+)\}\{(\d+)\}(?!\w)")
_CURRENCY = re.compile(r"^\\?[$€£]")
_SEARCHED = re.compile(
    rf"(?<![\w.,/])[-−]? ?(?:\\?[$€£] ?)?(?:{_PLAIN})(?:[eE][+-]?\d{{1,3}})?(?: ?/ ?(?:{_PLAIN}))?"
    r"(?!\w|[.,/]\d)"
)


def read_number(text: str) -> Fraction | None:
    """The number that a whole text is, exactly; None if it is anything else.

    Thousands may be separated by commas; a sign, a currency sign before and a percent sign or a
    full stop after are allowed ("-$1,234.50", "50%", "3/4", "\\frac{3}{4}"). A percent sign is
    read as a unit: 50% is 50.
    """
    return None if len(text) > MAX_NUMBER_CHARS else _number(text)


@lru_cache(maxsize=4096)
def _number(text: str) -> Fraction | None:
    # The targets of a group are the same, and so are many of its answers.
    body = _without_latex(text.strip().rstrip(".").strip("$")).replace("\\,", "").strip()
    body = re.sub(r"\s*\\?%$", "", body)
    sign = 1
    body, currencies = _CURRENCY.subn("", body)
    if body[:1] in ("-", "+", "−"):
        sign = 1 if body[0] == "+" else -1
        body = body[1:].lstrip()
        if not currencies:
            body = _CURRENCY.sub("", body)
    match = _NUMBER.fullmatch(body.strip())
    if match is None:
        return None
    numerator, exponent, denominator = match.groups()
    value = _plain(numerator) * Fraction(10) ** int(exponent or 0)
    if denominator is not None:
        below = _plain(denominator)
        if below == 0:
            return None
        value /= below
    return sign * value


def last_number(text: str) -> Fraction | None:
    """The last number in a text; None if there is none."""
    # An answer stands at the end; the bound keeps this linear.
    tail = _without_latex(text[-10_000:])
    numbers = [match.group() for match in _SEARCHED.finditer(tail)]
    return read_number(numbers[-1]) if numbers else None


def _without_latex(text: str) -> str:
    """The text with LaTeX's numbers, such as 1{,}234 and \\frac{3}{4}, as others write them."""
    body = text.replace("\\!", "").replace("{,}", ",")
    return _LATEX_FRACTION.sub(r"\1/\2", body)


def _plain(text: str) -> Fraction:
    return Fraction(text.replace(",", "").rstrip(".") or "0")


def same_mathematics(answer: str, target: str, *, timeout_s: float = 10.0) -> bool:
    """Whether two LaTeX or plain expressions mean the same, by math-verify.

    Numbers and equal spellings are settled at once; the rest goes to one of a few processes, since
    an expression can take forever to simplify. Expressions that are spelled differently and cannot
    be read, are longer than `MAX_MATH_CHARS`, or are not settled within `timeout_s` count as
    different. Blocks.
    """
    if answer.strip() == target.strip():
        return bool(answer.strip())
    if max(len(answer), len(target)) > MAX_MATH_CHARS:
        return False
    x, y = read_number(answer), read_number(target)
    if x is not None and y is not None:
        return x == y
    plain_answer, plain_target = _spelling(answer), _spelling(target)
    if not plain_answer or not plain_target:
        return False
    if plain_answer == plain_target:
        return True
    # Words would be read as products of letters, equal to any anagram.
    if _WORDS.fullmatch(plain_target) or _WORDS.fullmatch(plain_answer):
        return plain_answer.lower() == plain_target.lower()
    if not (_well_formed(answer) and _well_formed(target)):
        return False
    try:
        return _settled(answer, target, timeout_s)
    except (DeadlineError, ChildError):
        return False


_WORDS = re.compile(r"[A-Za-z]{2,}")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}")
_LOOKS = re.compile(r"\\(?:left|right|!)|\$")
_SPACES = re.compile(r"(?:\\(?:[,;:\s]|quad)|\s)+")
# Between numbers a space tells them apart (2 1/2 is not 21/2), except before thousands.
_NO_GAP = re.compile(r" (?!\d)|(?<!\d) | (?=\d{3}(?!\d))")
_TOKENS = re.compile(r"\\.|[{}$]", re.DOTALL)


def _spelling(text: str) -> str:
    """The text without what only changes how it looks."""
    body = _TEXT.sub(r"\1", text)
    body = _SPACES.sub(" ", _LOOKS.sub("", body))
    body = _NO_GAP.sub("", body).rstrip(".")
    return body.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")


def _well_formed(text: str) -> bool:
    """Whether the text can be put into a box and stays one answer."""
    if "\\boxed" in text:
        return False
    depth = 0
    for match in _TOKENS.finditer(text.strip().strip("$")):
        token = match.group()
        depth += (token == "{") - (token == "}")
        if depth < 0 or token == "$":
            return False
    return depth == 0


@lru_cache(maxsize=4096)
def _settled(answer: str, target: str, timeout_s: float) -> bool:
    # The answers of a group repeat. What was not settled raises, and is not remembered.
    return _verifiers.same(answer, target, timeout_s)


class _Verifiers:
    """At most `most` processes with math-verify, shared by every thread that judges answers.

    A thread takes one out of the queue for as long as it asks, so no two threads ask the same one.
    Waiting for a free one does not count against an expression's own time. The one freed last is
    taken first, so that callers who come one at a time start only one process.
    """

    def __init__(self, most: int) -> None:
        self.idle: LifoQueue[ChildProcess | None] = LifoQueue()
        """Those that nobody asks; None is one that is started when it is needed."""
        self.started: set[ChildProcess] = set()
        for _ in range(most):
            self.idle.put(None)

    def same(self, answer: str, target: str, timeout_s: float) -> bool:
        try:
            # Everyone ahead in the queue is bounded by their own deadline; this bounds the queue.
            process = self.idle.get(timeout=_QUEUE_S)
        except Empty:
            raise EnvError(
                f"waited {_QUEUE_S:.0f} s for the math verifier to be free; lower the number of "
                "concurrent episodes, or the symbolic reward's timeout_s"
            ) from None
        question = {"answer": answer, "target": target}
        try:
            if process is None:
                process = _started_verifier()
                self.started.add(process)
            return bool(process.ask(question, timeout_s=timeout_s, what="a verdict"))
        except (DeadlineError, ChildError):
            assert process is not None
            process.close()
            self.started.discard(process)
            process = None
            raise
        finally:
            self.idle.put(process)

    def stop(self) -> None:
        """Ends the processes."""
        for process in list(self.started):
            process.close()


def _started_verifier() -> ChildProcess:
    process = ChildProcess(f"{__name__}:serve_verdicts", {}, name="the math verifier")
    try:
        # Importing it takes seconds on a busy machine; that is not the expression's time.
        process.ask({"answer": "1", "target": "1"}, timeout_s=_START_S, what="its start")
    except (DeadlineError, ChildError) as error:
        process.close()
        raise EnvError(f"the math verifier failed to start: {error}") from error
    return process


_START_S = 120.0
_QUEUE_S = 600.0
_MEMORY_BYTES = 4 * 1024**3
# No more than there are cores, or they would take each other's time.
_verifiers = _Verifiers(min(4, os.cpu_count() or 1))
atexit.register(_verifiers.stop)


def serve_verdicts(setup: Mapping[str, Any]) -> Answerer:
    """The child's half: reads both expressions and compares them."""
    import logging
    import resource

    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))

    from math_verify import LatexExtractionConfig, parse, verify

    def read(text: str) -> Any:
        # No time-out here: it would need signals, and the parent kills what takes too long.
        boxed = f"\\boxed{{{text.strip().strip('$')}}}"
        return parse(
            boxed,
            extraction_config=[LatexExtractionConfig()],
            fallback_mode="no_fallback",
            parsing_timeout=None,
        )

    def answer(message: Mapping[str, Any]) -> bool:
        try:
            target, given = read(message["target"]), read(message["answer"])
            return bool(target and given and verify(target, given, timeout_seconds=None))
        except Exception:  # whatever it could not read or compare is not equal
            return False

    return answer
