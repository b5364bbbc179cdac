"""Blocks that promise little and hold much."""

from __future__ import annotations

import gzip
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from ludic.errors import SerializationError
from ludic.rollouts import RolloutWriter, lines, read_rollouts
from ludic.rollouts.lines import Block, Damage, as_stored, mend_last_line, read_block, whole_blocks
from ludic.types import Rollout

LIMIT = 1 << 24


def zstd_bomb(megabytes: int) -> bytes:
    """A frame of blocks that each repeat one letter: 4 bytes for 128 KB."""
    header = b"\x28\xb5\x2f\xfd" + b"\x00" + bytes([7 << 3])
    size = 128 << 10
    blocks = [(size << 3 | 1 << 1).to_bytes(3, "little") + b"x"] * (8 * megabytes)
    return header + b"".join(blocks) + (1).to_bytes(3, "little")


BOMBS = {".zst": zstd_bomb(512), ".gz": gzip.compress(b"x" * (128 << 20))}


@pytest.fixture(autouse=True)
def limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LARGEST_BLOCK", LIMIT)


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Fails if more is taken than the limit, what one step may add to it, and as much again."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 2 * (LIMIT + (32 << 20))
    finally:
        tracemalloc.stop()


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("suffix", list(BOMBS))
def test_rollouts_are_not_read_from_a_bomb(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"r.jsonl{suffix}"
    path.write_bytes(BOMBS[suffix])
    with pytest.raises(SerializationError, match="a block of over 16 MB"):
        next(read_rollouts(path))
    with pytest.raises(SerializationError, match="a block of over 16 MB"):
        mend_last_line(path)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("suffix", list(BOMBS))
def test_the_viewer_passes_a_bomb_over(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"r.jsonl{suffix}"
    sound = as_stored(path, b"{}\n")
    path.write_bytes(BOMBS[suffix] + sound)
    damage, block = whole_blocks(path)
    assert isinstance(damage, Damage)
    assert "over 16 MB" in damage.why
    assert block == Block(len(BOMBS[suffix]), len(sound), b"{}\n")
    with pytest.raises(ValueError, match="over 16 MB"):
        read_block(path, 0, len(BOMBS[suffix]))


@pytest.mark.parametrize("suffix", [".zst", ".gz"])
def test_a_block_of_many_steps_is_read_whole(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"r.jsonl{suffix}"
    rollouts = [Rollout(f"r{n}", (), meta={"n": [n**7] * 50}) for n in range(300)]
    with RolloutWriter(path) as writer:
        for rollout in rollouts:
            writer.write(rollout)
    assert path.stat().st_size > 3 * lines._STEP
    assert list(read_rollouts(path)) == rollouts
