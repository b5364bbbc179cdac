"""Policies for actors that sample in-process: safetensors files, by address, version, checksum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ludic.errors import PipelineError, PublishError
from ludic.plumbing.files import file_checksum, replacing

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class StoredPolicy:
    """A policy as the trainer announced it. `serial` is its name among all policies of the run;
    `path` is empty where the actors' servers get the weights in another way."""

    serial: int
    attempt: int
    version: int
    path: str = ""
    checksum: str = ""
    at: str = ""

    @staticmethod
    def read(facts: Mapping[str, Any]) -> StoredPolicy:
        """Raises `PipelineError` for what is no policy."""
        try:
            return StoredPolicy(**facts)
        except TypeError as exc:
            raise PipelineError(f"not an announced policy: {exc}") from exc


class PolicyFolder:
    """Where the trainer puts its weights for the actors: a folder that they share, or shared
    memory. A file appears whole or not at all; the newest `keep` stay."""

    def __init__(self, path: str | Path, *, keep: int = 2) -> None:
        self.path, self.keep = Path(path), keep

    def write(
        self, weights: Iterable[tuple[str, Tensor]], *, attempt: int, version: int
    ) -> dict[str, Any]:
        """Writes a policy; returns what to announce of it."""
        from safetensors.torch import save_file

        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights}
        self.path.mkdir(parents=True, exist_ok=True)
        target = self.path / f"policy-{attempt:06d}-{version:08d}.safetensors"
        try:
            with replacing(target) as temporary:
                save_file(tensors, temporary)
                checksum = file_checksum(temporary)
        except OSError as exc:
            raise PublishError(f"cannot write policy {version} to {self.path}: {exc}") from exc
        for old in sorted(self.path.glob("policy-*.safetensors"))[: -self.keep]:
            old.unlink(missing_ok=True)
        return {"path": str(target.resolve()), "checksum": checksum}


def load_policy(policy: StoredPolicy) -> dict[str, Tensor] | None:
    """Returns the weights of an announced policy; None if a newer one took its file's place.

    Raises `PublishError` when the file is not what was announced.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if file_checksum(Path(policy.path)) != policy.checksum:
            raise PublishError(f"{policy.path} is not the policy {policy.version} it should be")
        return load_file(policy.path)
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError) as exc:
        raise PublishError(f"cannot read policy {policy.version}: {exc}") from exc
