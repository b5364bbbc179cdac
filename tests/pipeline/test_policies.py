"""Policies by file, for actors that sample in-process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ludic.errors import PublishError
from ludic.pipeline.policies import PolicyFolder, StoredPolicy, load_policy

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


def stored(folder: PolicyFolder, version: int) -> StoredPolicy:
    facts = folder.write(WEIGHTS.items(), attempt=1, version=version)
    return StoredPolicy(serial=version, attempt=1, version=version, **facts)


def test_a_policy_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = load_policy(stored(PolicyFolder(tmp_path), 3))
    assert found is not None
    assert found.keys() == WEIGHTS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in WEIGHTS.items())


def test_a_file_that_is_not_what_was_announced_is_refused(tmp_path: Path) -> None:
    policy = stored(PolicyFolder(tmp_path), 3)
    data = bytearray(Path(policy.path).read_bytes())
    data[-1] ^= 1
    Path(policy.path).write_bytes(data)
    with pytest.raises(PublishError, match="is not the policy 3"):
        load_policy(policy)


def test_only_the_newest_files_stay(tmp_path: Path) -> None:
    folder = PolicyFolder(tmp_path, keep=2)
    policies = [stored(folder, version) for version in range(3)]
    assert load_policy(policies[0]) is None
    assert load_policy(policies[1]) is not None
    assert load_policy(policies[2]) is not None
