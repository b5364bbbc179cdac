"""What the servers of a publisher have confirmed: the next difference is made against it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from torch import Tensor

from ludic.distributed.differences import apply_all, encode_all


class Confirmed:
    """A copy, in this process's memory, of the weights that all servers confirmed last.

    One per publisher, used by one publish at a time. A publish that fails confirms nothing: where
    servers have staged it all the same, their copies have another name than `name`, and the next
    publish sends all weights.
    """

    def __init__(self) -> None:
        self.key = secrets.token_hex(16)
        """Names the publisher's copy on each host."""
        self.name: str | None = None
        self._tensors: dict[str, Tensor] = {}

    def name_for(self, version: int) -> str:
        """A name that no other publish has, not even another try of the same version."""
        return f"version {version}, {secrets.token_hex(4)}"

    def difference(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """What changed since; None: nothing was confirmed, or these are other tensors."""
        if self.name is None:
            return None
        try:
            return encode_all(self._tensors, tensors)
        except ValueError:  # the publisher was given another model
            return None

    def confirm(
        self, name: str, tensors: Mapping[str, Tensor], difference: Mapping[str, Tensor] | None
    ) -> None:
        """All servers have `tensors` now; `difference` is what they were sent, if not all."""
        self.name = None
        if difference is not None:
            apply_all(difference, self._tensors)
        else:
            self._tensors = {n: t.detach().to("cpu", copy=True) for n, t in tensors.items()}
        self.name = name
