"""An algorithm is a credit assigner plus a loss. No torch here: an actor may hold one."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ludic.errors import CheckpointError, ConfigError
from ludic.training.batching.preprocess import chain

if TYPE_CHECKING:
    from ludic.training.types import CreditAssigner, Loss, PreprocessFn


@dataclass(frozen=True)
class RLAlgorithm:
    """What the trainer optimises, and what turns rollouts into weights.

    `preprocess` is applied to each macro-batch before it is split. A loss that brings a
    `preprocess` of its own (a baseline over the batch, say) has it added behind that one.
    """

    name: str
    credit_assigner: CreditAssigner
    loss: Loss
    preprocess: PreprocessFn | None = None

    def __post_init__(self) -> None:
        steps = chain(self.preprocess, getattr(self.loss, "preprocess", None))
        object.__setattr__(self, "preprocess", steps)

    @property
    def group_size(self) -> int | None:
        """How many rollouts are compared with each other; None where rollouts stand alone."""
        size = getattr(self.credit_assigner, "group_size", None)
        return None if size is None else int(size)

    def with_partial_groups(self) -> RLAlgorithm:
        """Returns this algorithm with credit that compares what is left of a group which lost a
        member, as `lost_member="keep_partial"` needs it. Raises `ConfigError` if it has no such
        credit."""
        if self.group_size is None:
            return self
        credit: Any = self.credit_assigner
        if not hasattr(credit, "allow_partial"):
            raise ConfigError(
                f"algorithm {self.name!r} compares only whole groups: its credit assigner has no "
                "allow_partial; choose another lost_member than 'keep_partial'"
            )
        changed = copy.copy(self)  # `replace` would add the loss's preprocess a second time
        object.__setattr__(changed, "credit_assigner", replace(credit, allow_partial=True))
        return changed

    def check_rollouts_per_update(self, rollouts_per_update: int) -> None:
        """Raises `ConfigError` when that many rollouts are not a whole number of groups."""
        size = self.group_size or 1
        if rollouts_per_update < 1 or rollouts_per_update % size:
            raise ConfigError(
                f"rollouts_per_update={rollouts_per_update} is not a positive multiple of "
                f"group_size={size}, which {self.name!r} compares: choose e.g. "
                f"{max(round(rollouts_per_update / size), 1) * size}"
            )

    @property
    def watches_drift(self) -> bool:
        """Whether its credit wants to hear how far each update moved the policy."""
        return bool(getattr(self.credit_assigner, "watches_drift", False))

    def observe_drift(self, kl: float) -> None:
        """Tells the credit, where it watches, the KL per token of an update."""
        if self.watches_drift:
            self.credit_assigner.observe_drift(kl)  # type: ignore[attr-defined]

    def state_dict(self) -> Mapping[str, Any]:
        """What must be saved with a checkpoint: the credit assigner's memory, if it has one."""
        own = getattr(self.credit_assigner, "state_dict", None)
        return {"name": self.name, "credit_assigner": own() if own else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` gave; raises `CheckpointError` for another algorithm's."""
        saved = state.get("credit_assigner")
        load = getattr(self.credit_assigner, "load_state_dict", None)
        if state.get("name") != self.name or (saved is None) != (load is None):
            raise CheckpointError(
                f"the checkpoint holds the state of {state.get('name')!r}, this is {self.name!r}: "
                "resume with the algorithm that the run began with"
            )
        if load is not None:
            load(saved)
