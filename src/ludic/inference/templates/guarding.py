"""Messages as a chat template may see them: checked, and unable to spell control tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ludic.errors import TemplateError
from ludic.inference.templates.probes import TemplateProbes
from ludic.inference.templates.token_codec import NOTHING, TokenCodec, literal_pattern
from ludic.types import Message

ROLES = ("system", "user", "assistant", "tool")


class MessageGuard:
    """Marks special tokens in the content of messages as ordinary text, which the codec encodes by
    its characters. `named` are the tokenizer's special tokens; with `trust_content` nothing is
    marked."""

    def __init__(
        self,
        codec: TokenCodec,
        probes: TemplateProbes,
        named: Mapping[str, Any],
        *,
        trust_content: bool,
    ) -> None:
        self._codec, self._probes, self._trust_content = codec, probes, trust_content
        ends = {named[k] for k in ("bos_token", "eos_token", "pad_token") if named.get(k)}
        self._control_pattern = literal_pattern(probes.control_tokens() | ends)

    def messages(
        self, messages: Sequence[Message], first: int = 0
    ) -> tuple[Mapping[str, Any], ...]:
        """The messages as the template may see them; `first` is the place of the first of them in
        the conversation, for errors."""
        if not messages:
            raise TemplateError("no messages: a prompt needs at least one")
        return tuple(self._message(m, first + i) for i, m in enumerate(messages))

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
