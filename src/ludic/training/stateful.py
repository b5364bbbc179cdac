"""The contract of what a checkpoint saves besides tensors. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Stateful(Protocol):
    """Something whose state is saved with a checkpoint; the state is JSON."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@runtime_checkable
class KeepsRecord(Protocol):
    """Something that writes down what it made. The trainer awaits `flush_record` before it saves a
    checkpoint, so that no checkpoint has steps that the record lacks."""

    async def flush_record(self) -> None:
        """Returns when the record so far is on disk."""
        ...


@runtime_checkable
class Commits(Protocol):
    """A batch source that is told when a checkpoint with one of its states is complete."""

    def committed(self, state: Mapping[str, Any]) -> None:
        """Hears that what `state` has consumed can never come again: a complete checkpoint has the
        state. Called in the thread that wrote the checkpoint, in the order of the checkpoints."""
        ...
