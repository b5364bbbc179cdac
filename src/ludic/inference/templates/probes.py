"""Finds out what a chat template can do by rendering small conversations with it.

Unmistakable content stands in for the messages, so that the template's own text shows around it.
`MessageGuard` uses the results to check messages, and to keep them from spelling control tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ludic.errors import TemplateError
from ludic.inference.templates.jinja import JinjaTemplate
from ludic.inference.templates.token_codec import NOTHING, TokenCodec, literal_pattern
from ludic.inference.templates.tool_parsers import ToolParser
from ludic.types import Message

Conversation = Sequence[Mapping[str, Any]]

_ASKED, _REPLIED, _NEXT = "PROBEasked7", "PROBEreplied7", "PROBEnext7"
_USER: Mapping[str, Any] = {"role": "user", "content": _ASKED}
_REPLY: Mapping[str, Any] = {"role": "assistant", "content": _REPLIED}
_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {"name": _NEXT, "description": "", "parameters": {}},
}
_ARGUMENTS: Mapping[str, Any] = {"x": 1}
_CALL: Mapping[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "probecall",
            "type": "function",
            "function": {"name": _REPLIED, "arguments": _ARGUMENTS},
        }
    ],
}


@dataclass(frozen=True, slots=True)
class Closing:
    """How an assistant message is closed: `lead` (usually empty), then `text`. `token_id` is None
    where the template uses no special token for it."""

    lead: str
    text: str
    token_id: int | None


class TemplateProbes:
    """The answers, each found once. Recomputing one in two threads at a time does no harm."""

    def __init__(self, plain: JinjaTemplate, with_tools: JinjaTemplate, codec: TokenCodec) -> None:
        self._plain, self._with_tools, self.codec = plain, with_tools, codec
        self._closings: dict[str | None, Closing | None] = {}
        self._roles: dict[str, bool] = {}
        self.supports_tools = _NEXT in (self._render([_USER], [_TOOL]) or "")
        self.spells_tool_calls = _REPLIED in (self._render([_USER, _CALL]) or "")

    def renders_role(self, role: str) -> bool:
        """Whether messages of the role show at all. A template that objects to the probe may
        still take the real conversation, or say what is wrong with it: then True."""
        if role not in self._roles:
            probe = {"role": role, "content": _NEXT}
            if role == "tool":
                probe |= {"tool_call_id": "probecall", "name": _NEXT}
            tried: dict[str, Conversation] = {
                "system": [probe, _USER],
                "tool": [_USER, _CALL, probe],
                "assistant": [_USER, probe],
            }
            text = self._render(tried.get(role, [probe]))
            self._roles[role] = text is None or _NEXT in text
        return self._roles[role]

    def control_tokens(self) -> set[str]:
        """The special tokens with which the template structures a conversation."""
        system: Mapping[str, Any] = {"role": "system", "content": _NEXT}
        texts = (self._render([_USER, _REPLY, _USER]), self._render([system, _USER, _REPLY, _USER]))
        return {t for text in texts if text for t in self.codec.special_pattern.findall(text)}

    def reads_call(self, parser: ToolParser) -> bool:
        """Whether the parser reads a call back from the way in which the template spells it."""
        reply, call = (self._message([_USER, m]) for m in (_REPLY, _CALL))
        header = reply.partition(_REPLIED)[0].strip()
        parsed = parser.parse(call.strip().removeprefix(header))
        read = [(c["function"]["name"], c["function"]["arguments"]) for c in parsed.tool_calls]
        return not parsed.errors and read == [(_REPLIED, _ARGUMENTS)]

    def _message(self, messages: Conversation) -> str:
        """The part between control tokens that has the assistant's words in it."""
        text = (self._render(messages, [_TOOL]) or "").rpartition(_ASKED)[2]
        parts = literal_pattern(self.control_tokens()).split(text)
        return next((part for part in parts if _REPLIED in part), "")

    def closing(self, next_role: str | None) -> Closing | None:
        """What ends an assistant message that a message of `next_role` follows (None: nothing
        follows); None where that does not show."""
        if next_role not in self._closings:
            self._closings[next_role] = self._find_closing(next_role)
        return self._closings[next_role]

    def _find_closing(self, next_role: str | None) -> Closing | None:
        messages = [_USER, _REPLY]
        if next_role is not None:
            messages.append({"role": next_role, "content": _NEXT, "tool_call_id": "probecall"})
        text = self._render(messages)
        if text is None and next_role == "tool":  # it wants to see a call before the answer
            return self.closing("user")
        if text is None or text.count(_REPLIED) != 1:
            return None
        between = text.partition(_REPLIED)[2].partition(_NEXT)[0]
        special = self.codec.special_pattern.search(between)
        if special is None:
            return Closing("", between, None) if between else None
        return Closing(between[: special.start()], special[0], self.codec.special_id[special[0]])

    def _render(
        self, messages: Conversation, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str | None:
        try:
            return (self._with_tools if tools else self._plain).render(messages, tools)
        except TemplateError:
            return None


ROLES = ("system", "user", "assistant", "tool")


class MessageGuard:
    """Marks special tokens in the content of messages as ordinary text, which the codec encodes by
    its characters. `named` are the tokenizer's special tokens; with `trust_content` nothing is
    marked."""

    def __init__(
        self, probes: TemplateProbes, named: Mapping[str, Any], *, trust_content: bool
    ) -> None:
        self._codec, self._probes, self._trust_content = probes.codec, probes, trust_content
        ends = {named[k] for k in ("bos_token", "eos_token", "pad_token") if named.get(k)}
        self._control_pattern = literal_pattern(probes.control_tokens() | ends)

    def messages(
        self, messages: Sequence[Message], first: int = 0
    ) -> tuple[Mapping[str, Any], ...]:
        """The messages as the template may see them; `first` is the place of the first of them in
        the conversation, for errors."""
        if not messages:
            raise TemplateError("no messages: a prompt needs at least one")
        return tuple([self._message(m, first + i) for i, m in enumerate(messages)])

    def _message(self, message: Message, index: int) -> Mapping[str, Any]:
        if not isinstance(message, dict):
            raise TemplateError(f"message {index} is {type(message).__name__}: a message is a dict")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise TemplateError(f"message {index} has the role {role!r}; the roles are {ROLES}")
        if not isinstance(content, str):
            raise TemplateError(
                f"message {index} ({role}) has content of type {type(content).__name__}: "
                "content is one string"
            )
        if not self._probes.renders_role(role):
            raise TemplateError(
                f"message {index}: this chat template leaves out messages of the role {role!r}"
            )
        safe = self.content(content, role)
        if len(message) == 2:  # nothing but role and content, as most messages are
            return message if safe is content else {"role": role, "content": safe}
        return {**{k: self._value(v, role) for k, v in message.items()}, "content": safe}

    def content(self, content: str, role: str) -> str:
        """The text of a message of that role, with special tokens marked as ordinary text."""
        if self._trust_content:
            return self._codec.guard(content, NOTHING)
        # What the model itself wrote may hold special tokens that are not control tokens, such as
        # the mark of a tool call: those are spelled as they were sampled.
        return self._codec.guard(content, self._control_pattern if role == "assistant" else None)

    def _value(self, value: Any, role: str) -> Any:
        if isinstance(value, str):
            return self.content(value, role)
        if isinstance(value, Mapping):
            return {self._value(k, role): self._value(v, role) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._value(v, role) for v in value]
        return value
