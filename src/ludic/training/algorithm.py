"""An algorithm is a credit assigner plus a loss. Imports no torch, so that an actor can use one."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ludic.errors import CheckpointError, ConfigError
from ludic.plumbing.given import remembered as remembered
from ludic.saw.building import AllowsPartialGroups, ComparesGroups, CreditAssigner, WatchesDrift
from ludic.saw.items import SAWBatch
from ludic.training.preprocess import PreprocessFn, chain, preprocess_of

if TYPE_CHECKING:
    from ludic.training.types import Loss


@runtime_checkable
class Stateful(Protocol):
    """Something whose state is saved with a checkpoint; the state is JSON."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class RLAlgorithm:
    """What the trainer optimises, and what turns rollouts into weights.

    The trainer applies `preprocess` to each macro-batch before it is split, followed by that of the
    loss (a baseline over the batch, say), if it has one.
    """

    name: str
    credit_assigner: CreditAssigner
    loss: Loss
    preprocess: PreprocessFn | None = None

    def __post_init__(self) -> None:
        steps = chain(self.preprocess, preprocess_of(self.loss))
        object.__setattr__(self, "preprocess", steps)

    def prepare(self, batch: SAWBatch) -> SAWBatch:
        """The batch after the preprocess. The trainer calls this once for every batch."""
        return batch if self.preprocess is None or not batch.items else self.preprocess(batch)

    @property
    def group_size(self) -> int | None:
        """How many rollouts are compared with each other; None where rollouts stand alone."""
        credit = self.credit_assigner
        return credit.group_size if isinstance(credit, ComparesGroups) else None

    def with_partial_groups(self) -> RLAlgorithm:
        """Returns this algorithm with credit that compares what is left of a group which lost a
        member, as `lost_member="keep_partial"` needs it. Raises `ConfigError` if it has no such
        credit."""
        if self.group_size is None:
            return self
        credit = self.credit_assigner
        if not isinstance(credit, AllowsPartialGroups):
            raise ConfigError(
                f"algorithm {self.name!r} compares only whole groups: its credit assigner has no "
                "with_partial_groups(); choose another lost_member than 'keep_partial'"
            )
        return replace(self, credit_assigner=credit.with_partial_groups())

    def check_rollouts_per_update(self, rollouts_per_update: int) -> None:
        """Raises `ConfigError` if that many rollouts are not a whole number of groups."""
        size = self.group_size or 1
        if rollouts_per_update < 1 or rollouts_per_update % size:
            raise ConfigError(
                f"rollouts_per_update={rollouts_per_update} is not a positive multiple of "
                f"group_size={size}, which {self.name!r} compares: choose e.g. "
                f"{max(round(rollouts_per_update / size), 1) * size}"
            )

    @property
    def watches_drift(self) -> bool:
        """Whether its credit assigner must be told how far each update moved the policy."""
        credit = self.credit_assigner
        return isinstance(credit, WatchesDrift) and credit.watches_drift

    def observe_drift(self, kl: float) -> None:
        """Tells the credit assigner the KL per token of an update, if it watches."""
        credit = self.credit_assigner
        if isinstance(credit, WatchesDrift) and credit.watches_drift:
            credit.observe_drift(kl)

    def drifted(self, state: Mapping[str, Any], kl: float) -> Mapping[str, Any]:
        """What `state` becomes by `observe_drift(kl)`; the algorithm itself stays as it is."""
        present = deepcopy(self.state_dict())
        self.load_state_dict(state)
        try:
            self.observe_drift(kl)
            return deepcopy(self.state_dict())
        finally:
            self.load_state_dict(present)

    def state_dict(self) -> Mapping[str, Any]:
        """What must be saved with a checkpoint: the credit assigner's state, if it has one."""
        credit = self.credit_assigner
        own = credit.state_dict() if isinstance(credit, Stateful) else None
        return {"name": self.name, "credit_assigner": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned; refuses another algorithm's."""
        credit, saved = self.credit_assigner, state.get("credit_assigner")
        if state.get("name") != self.name or (saved is None) == isinstance(credit, Stateful):
            raise CheckpointError(
                f"the checkpoint holds the state of {state.get('name')!r}, this is {self.name!r}: "
                "resume with the algorithm that the run began with"
            )
        if isinstance(credit, Stateful) and saved is not None:
            credit.load_state_dict(saved)


def one_algorithm(algo: RLAlgorithm | None, own: RLAlgorithm | None) -> RLAlgorithm:
    """The algorithm of a trainer that was given `algo`, with a batch source that has its `own`.

    Raises `ConfigError` if there is none, or if credit would come from one and the loss from
    another.
    """
    chosen = algo or own
    if chosen is None:
        raise ConfigError("there is no algorithm: pass algo=, or a batch source that has one")
    if algo is None or own is None or algo is own:
        return chosen
    if algo != own or isinstance(own.credit_assigner, Stateful):
        raise ConfigError(
            f"the trainer was given {algo.name!r} and its batch source assigns credit by another "
            f"{own.name!r}: pass the same object to both, or leave algo= out"
        )
    return chosen
