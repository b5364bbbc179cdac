"""Policies by HTTP as what changed since the one before, for hosts that have that still."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ludic.distributed.weights_http import PolicyServer
from ludic.errors import PublishError
from ludic.pipeline.policies import StoredPolicy
from ludic.plumbing.files import file_checksum, replacing

_log = logging.getLogger("ludic.pipeline")
_WORTH_IT = 0.5


class DifferenceServer(PolicyServer):
    """Serves each policy also as its difference from the one before, once somebody fetches at all
    and if that is at most half as long. Comparing takes a moment, in the thread that offers."""

    def __init__(self, key: str, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__(key, host, port, keep=4)  # two policies, and their differences
        self._before: tuple[Path, str] | None = None

    def offer(self, path: Path, checksum: str = "") -> dict[str, Any]:
        facts: dict[str, Any] = super().offer(path, checksum)
        before, self._before = self._before, (path, facts["checksum"])
        if before is None or not self.sent:
            return facts
        target = path.with_suffix(".difference")
        try:
            write_difference(before[0], path, target)
            if target.stat().st_size <= _WORTH_IT * path.stat().st_size:
                changed = super().offer(target)["checksum"]
                facts["difference"] = [changed, before[1]]
        except (OSError, ValueError) as exc:  # the file before has gone, or has other tensors
            _log.debug("no difference for %s: %s", path, exc)
        finally:
            target.unlink(missing_ok=True)  # it is served from its open handle
        return facts


def write_difference(before: Path, after: Path, target: Path) -> None:
    """Writes what makes the policy `after` of the policy `before`; all are safetensors files."""
    from safetensors.torch import load_file, save_file

    from ludic.distributed.differences import encode_all

    save_file(encode_all(load_file(before), load_file(after)), target)


def apply_difference(before: Path, difference: Path, target: Path, checksum: str) -> None:
    """Makes the policy `target`. Raises `PublishError`, and leaves no file, if it is not the one of
    that checksum."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save_file

    from ludic.distributed.differences import apply_all

    try:
        tensors = {name: tensor.clone() for name, tensor in load_file(before).items()}
        apply_all(load_file(difference), tensors)
        with replacing(target) as temporary:
            save_file(tensors, temporary)
            if file_checksum(temporary) != checksum:
                raise PublishError("it gives another policy")
    except (OSError, ValueError, SafetensorError) as exc:
        raise PublishError(f"it cannot be applied: {exc}") from exc


def make_from_difference(
    policy: StoredPolicy, target: Path, fetch: Callable[[StoredPolicy], StoredPolicy]
) -> bool:
    """Makes the policy of the one before it, if that is beside `target`, and of a difference that
    it fetches. Returns whether it did: if not, all of the policy has to come."""
    if not policy.difference:
        return False
    checksum, of = policy.difference
    before = target.with_name(f"{of}.safetensors")
    if not before.is_file():
        return False
    try:
        fetched = fetch(replace(policy, path="", checksum=checksum, difference=()))
        if not fetched.path:
            return False
        arrived = Path(fetched.path)
        try:
            apply_difference(before, arrived, target, policy.checksum)
        finally:  # of no use to anybody else
            arrived.unlink(missing_ok=True)
            arrived.with_suffix(".lock").unlink(missing_ok=True)
    except PublishError as exc:
        _log.warning("policy %d is fetched whole; its difference: %s", policy.version, exc)
        return False
    return True
