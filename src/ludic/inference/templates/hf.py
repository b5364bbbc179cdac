"""Chat templates of Hugging Face tokenizers, extended token by token.

How `extend` works: the conversation is rendered to text (only its new part, if the template leaves
contents alone) and compared with the text of the previous prompt and of the sampled tokens. Only
the new part is tokenised. Where the template closes an assistant message is determined once per
role that follows it. White space makes no difference where a template may trim it or add its own:
at the ends of a message, and next to the tags of thinking and tool calls. Elsewhere it does.
"""

from __future__ import annotations

import datetime as dt
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, cast

from ludic.errors import ConfigError, TemplateError
from ludic.inference.templates.chat_template import ParsedCompletion
from ludic.inference.templates.jinja import JinjaTemplate
from ludic.inference.templates.probes import Closing, MessageGuard, TemplateProbes
from ludic.inference.templates.token_codec import TokenCodec, literal_pattern, unguard
from ludic.inference.templates.tool_parsers import HermesToolParser, JSONToolParser, ToolParser
from ludic.plumbing.records import Record
from ludic.registry import list_tool_parsers
from ludic.types import ChatResponse, Fork, ForkReason, Message, TokenTrace, ToolCall

THINK_CLOSE = "</think>"
# A closed block of thinking, and the white space after it.
# Nothing between the tags may open another block: that keeps it linear in the text's length.
# No `*+` of a group: Python 3.11.4 and older misread it.
_THINKING = re.compile(r"<think>[^<]*+(?:<(?!/?think>)[^<]*+)*</think>\s*")


def fork_of_history(previous: str, now: str) -> Fork:
    """Why the text of the earlier prompt is no longer the beginning of the conversation's."""
    before = _THINKING.sub("", previous).rstrip()
    if THINK_CLOSE in previous and _THINKING.sub("", now).startswith(before):
        return Fork(ForkReason.THINKING_STRIPPED, "the thinking of an earlier message is left out")
    return Fork(
        ForkReason.TEMPLATE_NOT_EXTENSIBLE,
        f"the template spells the earlier messages differently now: {_difference(previous, now)}",
    )


def fork_of_message(sampled: str, spelled: str, message: Message) -> Fork:
    """Why the sampled message is spelled differently."""
    detail = _difference(sampled, spelled)
    if sampled.count(THINK_CLOSE) > spelled.count(THINK_CLOSE):
        return Fork(ForkReason.THINKING_STRIPPED, detail)
    if message.get("tool_calls"):
        return Fork(ForkReason.TOOL_CALL_RERENDERED, detail)
    return Fork(ForkReason.CONTENT_RERENDERED, detail)


def _difference(first: str, second: str, around: int = 24) -> str:
    first, second = unguard(first), unguard(second)
    limit = min(len(first), len(second))
    at = next((i for i in range(limit) if first[i] != second[i]), limit)
    return f"{first[at : at + around]!r} became {second[at : at + around]!r} at character {at}"


Tools = Sequence[Mapping[str, Any]] | None

NO_TOOLS = (
    "this chat template does not show tools to the model: describe them in the system prompt and "
    "render without `tools`, or use a tokenizer whose template takes them"
)
_REMEMBERED_CHARS = 64_000_000


class _Rendered(Record, frozen=True):
    """A prompt that was made before: from which messages and tools, and its text (guarded)."""

    messages: tuple[Message, ...]
    guarded: tuple[Mapping[str, Any], ...]
    tools: Tools
    text: str


class HFChatTemplate:
    """The chat template of a Hugging Face fast tokenizer, given as an object or by name.

    Control tokens come from the template alone: a special token that is spelled in a message's
    content is encoded as the ordinary characters it is made of, so that an observation cannot
    close its own turn (`trust_content=True` turns that off). `variables` are passed to the
    template, such as `{"enable_thinking": False}`; `today` is the date it may print. Without a
    `tool_parser` nothing is read as a tool call; agents with tools ask `for_tools`. Safe to share
    between threads; make one per process.
    """

    def __init__(
        self,
        tokenizer: Any,
        tool_parser: ToolParser | None = None,
        *,
        variables: Mapping[str, Any] | None = None,
        trust_content: bool = False,
        today: dt.date = dt.date(2025, 1, 1),
    ) -> None:
        if isinstance(tokenizer, str):
            tokenizer = load_tokenizer(tokenizer)
        if tool_parser is not None and not isinstance(tool_parser, ToolParser):
            raise ConfigError(
                f"tool_parser={tool_parser!r} is not a ToolParser: give one with `markers` and "
                "`parse`, or get_tool_parser(name)"
            )
        self.tokenizer = tokenizer
        self.tool_parser = tool_parser
        self.codec = TokenCodec(tokenizer)
        self._trust_content = trust_content
        self.options: dict[str, Any] = {
            "variables": variables, "trust_content": trust_content, "today": today
        }  # fmt: skip
        self._for_tools: HFChatTemplate | None = None
        named = tokenizer.special_tokens_map
        values = {**named, **(variables or {})}
        self._plain, self._with_tools = (
            JinjaTemplate(source, values, today) for source in _sources(tokenizer)
        )
        markers = ("<think>", "</think>", *(tool_parser.markers if tool_parser else ()))
        # In parentheses, so that the markers themselves are part of what is compared.
        self._marked = re.compile(f"({literal_pattern(markers).pattern})")
        self._lock, self._choosing = threading.Lock(), threading.Lock()
        self._remembered: OrderedDict[int, _Rendered] = OrderedDict()  # by the hash of the ids
        self._remembered_chars = 0
        self._probes = TemplateProbes(self._plain, self._with_tools, self.codec)
        eos = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
        self._end_ids = self.codec.special_ids.union(eos)
        self._guard = MessageGuard(self._probes, named, trust_content=trust_content)

    @property
    def supports_tools(self) -> bool:
        """Whether the template shows the model the tools that `render` is given."""
        return self._probes.supports_tools

    def for_tools(self) -> HFChatTemplate:
        """This template, able to read tool calls: as it is if it has a tool parser, otherwise
        with the one that reads back a call as this template spells it. Raises `ConfigError`
        where the template shows no tools, or spells calls as no built-in parser reads them."""
        if not self.supports_tools:
            raise ConfigError(NO_TOOLS)
        if self.tool_parser is not None:
            return self
        with self._choosing:  # all agents of a run share the one that is made here
            if self._for_tools is None:
                parsers: tuple[ToolParser, ...] = (HermesToolParser(), JSONToolParser())
                fitting = next((p for p in parsers if self._probes.reads_call(p)), None)
                if fitting is None:
                    raise ConfigError(
                        "no built-in tool parser can read the tool calls that this chat "
                        "template writes: pass one, HFChatTemplate(tokenizer, tool_parser=...), or "
                        "name it as "
                        f"model.tool_parser in the run file (known: {list_tool_parsers()})"
                    )
                self._for_tools = HFChatTemplate(self.tokenizer, fitting, **self.options)
            return self._for_tools

    @property
    def end_token_id(self) -> int:
        """The token with which the model ends its message: the template's own closing token, or
        the tokenizer's end of sequence where the template has none."""
        closing = self._probes.closing("user")
        if closing is not None and closing.token_id is not None:
            return closing.token_id
        if self.tokenizer.eos_token_id is None:
            raise TemplateError("neither the chat template nor the tokenizer has an end token")
        return int(self.tokenizer.eos_token_id)

    def encode_answer(self, content: str) -> tuple[int, ...]:
        """The ids of a message's text, and its end token."""
        return (*self.codec.encode(self.codec.guard(content)), self.end_token_id)

    def render(self, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        """The prompt for the next assistant message. Raises `TemplateError` for messages that the
        template cannot spell, and for tools that it would not show."""
        guarded = self._guard.messages(messages)
        text = self._text(guarded, tools)
        ids = self.codec.encode(text)
        self._remember(tuple(ids), _Rendered(_copies(messages), guarded, tools, text))
        return ids

    def extend(
        self, messages: Sequence[Message], previous: TokenTrace, tools: Tools = None
    ) -> list[int] | Fork:
        """The ids to append to `previous.token_ids`, or a `Fork` that says why there are none."""
        last = _last_assistant(messages)
        before = self._recall(messages[:last], previous, tools)
        if isinstance(before, Fork):
            return before
        closing = self._probes.closing(
            messages[last + 1]["role"] if last + 1 < len(messages) else None
        )
        if closing is None:
            return Fork(
                ForkReason.TEMPLATE_NOT_EXTENSIBLE,
                "the template does not show where a message ends",
            )
        guarded = before.guarded + self._guard.messages(messages[last:], last)
        text = self._text(guarded, tools)
        prompt = before.text
        if not text.startswith(prompt):
            prompt = prompt.rstrip()
            if not text.startswith(prompt):
                return fork_of_history(before.text, text)
        completion = previous.completion_token_ids
        closed = bool(completion) and completion[-1] in self._end_ids
        if closed and completion[-1] != closing.token_id:
            ending = self.codec.decode(completion[-1:])
            return Fork(
                ForkReason.CONTENT_RERENDERED,
                f"the completion ended with {ending!r}; the template closes with {closing.text!r}",
            )
        sampled = self._guard.content(
            self.codec.decode(completion[:-1] if closed else completion), "assistant"
        )
        end = self._end_of_message(text, len(prompt), sampled, closing)
        spelled = text[len(prompt) : max(end, len(prompt))]
        if end < 0 or (sampled != spelled and self._trimmed(sampled) != self._trimmed(spelled)):
            return fork_of_message(sampled, spelled, messages[last])

        if closed:
            ids = self.codec.encode(text[end + len(closing.lead) :])[1:]
        else:
            ids = self.codec.encode(text[end:])
        self._remember(
            (*previous.prompt_token_ids, *completion, *ids),
            _Rendered((*before.messages, *_copies(messages[last:])), guarded, tools, text),
        )
        return ids

    def parse(self, response: ChatResponse) -> ParsedCompletion:
        """The assistant's message. Its content is the sampled text; where the template spells
        tool calls by itself, the text of the calls is left to it."""
        offset = 0
        if response.trace is None:
            text = response.text or ""
        else:
            ids = response.trace.completion_token_ids
            offset = len(response.trace.prompt_token_ids)
            text = self.codec.decode(ids[:-1] if ids and ids[-1] in self._end_ids else ids)
        message: Message = {"role": "assistant", "content": text}
        if self.tool_parser is None:
            return ParsedCompletion(message)
        parsed = self.tool_parser.parse(text)
        calls = tuple(_with_id(c, i, offset, text) for i, c in enumerate(parsed.tool_calls))
        if calls:
            message["tool_calls"] = list(calls)
            if self._probes.spells_tool_calls:
                message["content"] = parsed.content
        return ParsedCompletion(message, calls, parsed.errors)

    def _text(self, guarded: Sequence[Mapping[str, Any]], tools: Tools) -> str:
        if not tools:
            return self._plain.render(guarded, None)
        if not self.supports_tools:
            raise TemplateError(NO_TOOLS)
        return self._with_tools.render(guarded, tools)

    def _trimmed(self, text: str) -> list[str]:
        """The text without the white space at its ends and around the markers."""
        return [part.strip() for part in self._marked.split(text)]

    def _end_of_message(self, text: str, start: int, sampled: str, closing: Closing) -> int:
        """Where the assistant message that begins at `start` ends; -1 if that is unknown."""
        mark = closing.lead + closing.text
        if closing.token_id is None or self._trust_content:
            trimmed = sampled.strip()
            after_space = start + len(text[start:]) - len(text[start:].lstrip())
            for content, at in ((sampled, start), (trimmed, start), (trimmed, after_space)):
                if text.startswith(content + mark, at):
                    return at + len(content)
        # Guarded content cannot spell the closing token: the first one is the template's.
        return text.find(mark, start) if closing.token_id is not None else -1

    def _recall(
        self, messages: Sequence[Message], previous: TokenTrace, tools: Tools
    ) -> _Rendered | Fork:
        """The previous prompt's text: cached, or rendered again and checked against its ids."""
        with self._lock:
            remembered = self._remembered.get(hash(previous.prompt_token_ids))
        if remembered is not None:
            if remembered.tools is not tools and (remembered.tools or None) != (tools or None):
                return Fork(ForkReason.TOOLS_CHANGED, "the tools are not those of the last call")
            if remembered.messages == tuple(messages):
                return remembered
        guarded = self._guard.messages(messages)
        text = self._text(guarded, tools)
        spelled = self.codec.decode(previous.prompt_token_ids)
        # By way of ids, since a tokenizer may not keep every character of a text.
        expected = self.codec.decode(self.codec.encode(text))
        if _without_space(spelled) != _without_space(expected):
            others = remembered is None and self.supports_tools
            if others and self._made_with_other_tools(guarded, spelled, tools):
                return Fork(ForkReason.TOOLS_CHANGED, "the tools are not those of the last call")
            return Fork(
                ForkReason.HISTORY_REWRITTEN,
                "the previous prompt's ids do not spell the messages before the sampled one",
            )
        return _Rendered(_copies(messages), guarded, tools, text)

    def _made_with_other_tools(
        self, guarded: Sequence[Mapping[str, Any]], spelled: str, tools: Tools
    ) -> bool:
        if tools:
            plain = unguard(self._text(guarded, None))
            return _without_space(plain) == _without_space(spelled) or not all(
                str(t.get("function", t).get("name", "")) in spelled for t in tools
            )
        contents = [unguard(m["content"]).strip() for m in guarded]
        return all(content in spelled for content in contents)

    def _remember(self, ids: tuple[int, ...], rendered: _Rendered) -> None:
        key = hash(ids)
        with self._lock:
            old = self._remembered.pop(key, None)
            self._remembered[key] = rendered
            self._remembered_chars += len(rendered.text) - (len(old.text) if old else 0)
            while self._remembered_chars > _REMEMBERED_CHARS and len(self._remembered) > 1:
                _, dropped = self._remembered.popitem(last=False)
                self._remembered_chars -= len(dropped.text)


def load_tokenizer(name_or_path: str) -> Any:
    """The tokenizer of that name or folder, loaded once per process."""
    with _LOADING:
        return _load(str(name_or_path))


_LOADING = threading.Lock()


@lru_cache(maxsize=16)
def _load(name_or_path: str) -> Any:
    from transformers import AutoTokenizer  # heavy: only where a tokenizer is wanted

    try:
        return AutoTokenizer.from_pretrained(name_or_path)
    except (OSError, ValueError) as exc:
        raise TemplateError(f"no tokenizer could be loaded from {name_or_path!r}: {exc}") from exc


def _sources(tokenizer: Any) -> tuple[str, str]:
    """The template's text, and the one for conversations with tools where it is another."""
    source = getattr(tokenizer, "chat_template", None)
    if not source:
        raise TemplateError(
            f"the tokenizer {getattr(tokenizer, 'name_or_path', '') or type(tokenizer).__name__!r} "
            "has no chat template: use an instruction-tuned model's tokenizer, or set "
            "tokenizer.chat_template"
        )
    if isinstance(source, str):
        return source, source
    default = source.get("default") or next(iter(source.values()))
    return default, source.get("tool_use", default)


def _last_assistant(messages: Sequence[Message]) -> int:
    for index in range(len(messages) - 1, 0, -1):
        if messages[index].get("role") == "assistant":
            return index
    raise TemplateError(
        "extend needs the conversation with the sampled assistant message in it, after the "
        "messages that it answered; there is none: render instead"
    )


def _copies(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages as they are now: a context may change its own, and that is another history."""
    return tuple([message.copy() for message in messages])


def _with_id(call: ToolCall, index: int, offset: int, text: str) -> ToolCall:
    """The same call with an id that is the same in every run and unlike those of other turns.
    Nine letters and digits, which is what the strictest templates take."""
    digest = blake2b(f"{offset} {index} {text}".encode("utf-8", "replace"), digest_size=8)
    return cast(ToolCall, {**call, "id": digest.hexdigest()[:9]})


def _without_space(text: str) -> str:
    return "".join(text.split())
