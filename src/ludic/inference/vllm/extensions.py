"""Settings that only a vLLM server understands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ludic.errors import ConfigError


@dataclass(frozen=True, slots=True)
class VLLMExtensions(Mapping[str, Any]):
    """What to send a vLLM server besides the sampling settings.

    `extra_body_overrides` goes into the request's body last and wins over everything else;
    `max_think_tokens` bounds the thinking of models that have a thinking section. It is a mapping
    of what differs from the defaults: `InferenceSpec(extensions=VLLMExtensions(...))`.
    """

    extra_body_overrides: Mapping[str, Any] = field(default_factory=dict)
    max_think_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.max_think_tokens is not None and self.max_think_tokens < 0:
            raise ConfigError(
                f"VLLMExtensions.max_think_tokens={self.max_think_tokens}: must be >= 0 or None"
            )

    def __getitem__(self, name: str) -> Any:
        return self.to_mapping()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_mapping())

    def __len__(self) -> int:
        return len(self.to_mapping())

    def to_mapping(self) -> dict[str, Any]:
        """Plain JSON data, without what is at its default."""
        found: dict[str, Any] = {}
        if self.extra_body_overrides:
            found["extra_body_overrides"] = dict(self.extra_body_overrides)
        if self.max_think_tokens is not None:
            found["max_think_tokens"] = self.max_think_tokens
        return found

    @classmethod
    def from_mapping(cls, extensions: Mapping[str, Any]) -> VLLMExtensions:
        """Reads what `to_mapping` wrote; an unknown key is an error."""
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(extensions) - set(known))
        if unknown:
            raise ConfigError(f"unknown vLLM extensions {unknown}; known are {known}")
        return cls(**extensions)
