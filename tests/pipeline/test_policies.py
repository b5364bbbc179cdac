"""Policies by file, for actors that sample in-process."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ludic.errors import PublishError
from ludic.pipeline.messages import Unit, read_unit, unit_message
from ludic.pipeline.policies import PolicyFolder, StoredPolicy, load_policy
from ludic.rollouts import EnvSpec, ProtocolSpec, RolloutRequest

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


def stored(folder: PolicyFolder, version: int) -> StoredPolicy:
    facts = folder.write(WEIGHTS.items(), attempt=1, version=version)
    return StoredPolicy(serial=version, attempt=1, version=version, **facts)


def test_a_policy_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = load_policy(stored(PolicyFolder(tmp_path), 3))
    assert found is not None
    assert found.keys() == WEIGHTS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in WEIGHTS.items())


def test_what_this_kernel_has_is_mapped_and_not_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = stored(PolicyFolder(tmp_path), 3)
    assert policy.checksum  # for readers on other hosts
    monkeypatch.setattr("ludic.pipeline.policies.file_checksum", lambda _: "not asked for")
    assert load_policy(policy) is not None
    elsewhere = replace(policy, file="another boot/1/2/3/4")
    with pytest.raises(PublishError, match="is not the policy 3"):
        load_policy(elsewhere)
    monkeypatch.undo()
    assert load_policy(elsewhere) is not None


def test_a_folder_in_shared_memory_is_hashed_only_where_it_is_asked_for(tmp_path: Path) -> None:
    assert not PolicyFolder("/dev/shm/of-a-run").hashed
    assert PolicyFolder("/dev/shm/of-a-run", hashed=True).hashed
    policy = stored(PolicyFolder(tmp_path, hashed=False), 3)
    assert policy.checksum == ""
    assert load_policy(policy) is not None
    shutil.copy(policy.path, tmp_path / "other")
    (tmp_path / "other").replace(policy.path)  # the same bytes in another file
    with pytest.raises(PublishError, match="is not the policy 3"):
        load_policy(policy)


def test_weights_that_are_mapped_stay_when_their_file_is_replaced(tmp_path: Path) -> None:
    folder = PolicyFolder(tmp_path, keep=1)
    mapped = load_policy(stored(folder, 0))
    policy = stored(folder, 1)
    assert [path.name for path in tmp_path.iterdir()] == [Path(policy.path).name]
    assert mapped is not None
    assert all(torch.equal(mapped[name], tensor) for name, tensor in WEIGHTS.items())


@pytest.mark.parametrize(
    ("needs", "enough"),
    [
        ({}, True),
        ({"policy": 100}, True),
        ({"policy": 101}, False),
        ({"attempt": 2, "version": 7}, True),
        ({"attempt": 2, "version": 8}, False),  # still on its way
        ({"attempt": 1, "version": 9}, True),  # of a trainer that is gone
    ],
)
def test_a_unit_begins_with_the_policy_that_it_needs_or_a_newer_one(
    needs: dict[str, int], enough: bool
) -> None:
    policy = StoredPolicy(serial=100, attempt=2, version=7)
    unit = Unit(1, (RolloutRequest(EnvSpec("a"), ProtocolSpec("b")),), "unit-1", 4, **needs)
    assert read_unit(unit_message(unit)) == unit
    assert policy.is_enough_for(unit) is enough


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
