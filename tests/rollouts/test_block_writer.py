"""The thread that writes rollouts: blocks, back-pressure, errors, and a file that stays whole."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import subprocess
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zstandard

from ludic.errors import ConfigError, DeadlineError, SerializationError
from ludic.rollouts import CutFileWarning, RolloutWriter, block_writer, read_rollouts
from ludic.rollouts.block_writer import BLOCK_ITEMS, BlockWriter
from ludic.rollouts.storage import write_rollouts
from ludic.types import EnvironmentStep, Rollout

WAIT_S = 60


def numbered(number: int, **info: Any) -> Rollout:
    return Rollout(f"r{number}", (EnvironmentStep(0, (), "o", "a", "n", 1.0, info=info),))


def ids(path: Path) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return [rollout.id for rollout in read_rollouts(path)]


class Held:
    """An encoder that waits until it is let go."""

    def __init__(self) -> None:
        self.started, self.go = threading.Event(), threading.Event()

    def __call__(self, item: int) -> bytes:
        self.started.set()
        assert self.go.wait(WAIT_S)
        return b"%d\n" % item


def frames(data: bytes) -> Iterator[bytes]:
    while data:
        one = zstandard.ZstdDecompressor().decompressobj()
        yield one.decompress(data)
        assert one.eof
        data = one.unused_data


def test_rollouts_are_written_in_blocks_each_of_which_can_be_read_alone(tmp_path: Path) -> None:
    path, count = tmp_path / "r.jsonl.zst", 3 * BLOCK_ITEMS
    with RolloutWriter(path, max_waiting=count) as writer:
        for number in range(count):
            writer.write(numbered(number))
    blocks = list(frames(path.read_bytes()))
    assert len(blocks) < count / 4
    rows = [json.loads(line) for block in blocks for line in block.splitlines()]
    assert [row["id"] for row in rows] == [f"r{number}" for number in range(count)]
    assert all(block.endswith(b"\n") for block in blocks)


def test_long_rollouts_make_blocks_of_few(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl.zst"
    with RolloutWriter(path) as writer:
        for number in range(8):
            writer.write(numbered(number, text="x" * block_writer.BLOCK_BYTES))
    assert len(list(frames(path.read_bytes()))) == 8
    assert len(ids(path)) == 8


def test_a_file_cut_at_any_byte_of_its_last_block_has_all_the_blocks_before(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl.zst"
    with RolloutWriter(path) as writer:
        for number in range(4):
            writer.write(numbered(number))
        writer.flush()
        end = path.stat().st_size
        for number in range(4, 8):
            writer.write(numbered(number))
    data = path.read_bytes()
    for cut in range(end + 1, len(data)):
        path.write_bytes(data[:cut])
        with pytest.warns(CutFileWarning, match="the 4 rollouts before it are whole"):
            assert [r.id for r in read_rollouts(path)] == ["r0", "r1", "r2", "r3"]
    path.write_bytes(data[:-1])
    with pytest.warns(CutFileWarning, match=f"{len(data) - 1 - end} bytes at its end was cut off"):
        RolloutWriter(path, append=True).close()
    assert path.read_bytes() == data[:end]


def test_a_flush_means_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, synced = tmp_path / "r.jsonl.zst", Counter[str]()
    fsync = os.fsync

    def recorded(handle: int) -> None:
        synced[os.readlink(f"/proc/self/fd/{handle}")] += 1
        fsync(handle)

    monkeypatch.setattr(os, "fsync", recorded)
    with RolloutWriter(path) as writer:
        writer.flush()
        assert not synced  # nothing to write, nothing to wait for
        writer.write(numbered(0))
        writer.flush()
        assert ids(path) == ["r0"]
        assert synced == {str(path): 1, str(tmp_path): 1}  # the new file's name, too


def test_what_waits_is_bounded(tmp_path: Path) -> None:
    held = Held()
    writer = BlockWriter(tmp_path / "r.jsonl", held, max_waiting=3)
    writer.put(0)
    assert held.started.wait(WAIT_S)  # 0 is being written, and waits no more
    for number in range(1, 4):
        writer.put(number)
    blocked = threading.Thread(target=writer.put, args=(4,))
    blocked.start()
    blocked.join(0.05)
    assert blocked.is_alive()
    assert len(writer._waiting) == 3
    held.go.set()
    blocked.join(WAIT_S)
    writer.close()
    assert (tmp_path / "r.jsonl").read_text().split() == ["0", "1", "2", "3", "4"]


def test_no_wait_is_unbounded(tmp_path: Path) -> None:
    held = Held()
    writer = BlockWriter(tmp_path / "r.jsonl", held, max_waiting=1, timeout_s=0.05)
    writer.put(0)
    assert held.started.wait(WAIT_S)
    writer.put(1)
    with pytest.raises(DeadlineError, match=r"room for another rollout .*r.jsonl"):
        writer.put(2)
    with pytest.raises(DeadlineError, match="room for another rollout"):
        asyncio.run(writer.room())
    with pytest.raises(DeadlineError, match="a flush"):
        writer.flush()
    with pytest.raises(DeadlineError, match="a flush"):
        asyncio.run(writer.flush_async())
    with pytest.raises(DeadlineError, match="the end"):
        writer.close()
    held.go.set()
    writer._thread.join(WAIT_S)
    assert (tmp_path / "r.jsonl").read_text().split() == ["0", "1"]


async def test_the_event_loop_runs_while_a_writer_has_no_room_or_flushes(tmp_path: Path) -> None:
    """The encoder is let go by the event loop, so nothing here may hold it up."""
    for call in ("room", "flush", "close"):
        held = Held()
        writer = RolloutWriter(tmp_path / f"{call}.jsonl", max_waiting=1)
        encode = writer._blocks.encode
        writer._blocks.encode = lambda item, e=encode, h=held: h(0) and e(item)  # type: ignore[misc]
        writer.write(numbered(0))
        assert await asyncio.to_thread(held.started.wait, WAIT_S)
        writer.write(numbered(1))
        waits = {
            "room": write_rollouts(writer, [numbered(2)]),
            "flush": writer.flush_async(),
            "close": writer.aclose(),
        }
        waiting = asyncio.ensure_future(waits.pop(call))
        for other in waits.values():
            other.close()
        await asyncio.sleep(0.01)
        assert not waiting.done()
        held.go.set()
        await asyncio.wait_for(waiting, WAIT_S)
        await writer.aclose()
        assert ids(tmp_path / f"{call}.jsonl") == ["r0", "r1", "r2"][: 3 if call == "room" else 2]


class FullDisk(io.RawIOBase):
    """A file on a disk with room for `room` more bytes."""

    def __init__(self, path: Path, room: int) -> None:
        self.file, self.room = open(path, "ab", buffering=0), room  # noqa: SIM115

    def write(self, data: Any) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self.file.write(data[: min(self.room, 10)])
        self.room -= written
        return written

    def truncate(self, size: int | None = None) -> int:
        return self.file.truncate(size)

    def fileno(self) -> int:
        return self.file.fileno()


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_a_full_disk_is_said_by_every_call_and_leaves_whole_blocks(
    tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"r{suffix}"
    writer = RolloutWriter(path)
    writer.write(numbered(0))
    writer.flush()
    writer._blocks._file = FullDisk(path, 25)  # type: ignore[assignment]
    writer.write(numbered(1))
    for call in (
        writer.flush,
        writer.flush,
        lambda: writer.write(numbered(2)),
        lambda: asyncio.run(writer.flush_async()),
        lambda: asyncio.run(write_rollouts(writer, [numbered(2)])),
        writer.close,
    ):
        with pytest.raises(OSError, match="No space left") as found:
            call()
        assert found.value.errno == errno.ENOSPC
        assert found.value.filename == str(path)
    writer.close()  # the second time there is nothing to say
    assert ids(path) == ["r0"]
    with RolloutWriter(path, append=True) as again:
        again.write(numbered(1))
    assert ids(path) == ["r0", "r1"]


def test_a_full_disk_frees_those_that_wait_for_room(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path / "r.jsonl", max_waiting=1)
    writer._blocks._file = FullDisk(tmp_path / "r.jsonl", 0)  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space left"):  # noqa: PT012
        for number in range(10_000):
            writer.write(numbered(number))
    with pytest.raises(OSError, match="No space left"):
        writer.close()


@pytest.mark.parametrize(
    ("bad", "why"), [((1, 2), "use a list"), ("\ud800", "surrogate"), ("x" * 3000, "the limit is")]
)
def test_a_rollout_that_cannot_be_written_is_counted_and_costs_no_other(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    bad: Any,
    why: str,
) -> None:
    monkeypatch.setattr(block_writer, "LONGEST_LINE", 2000)
    path = tmp_path / "r.jsonl.zst"
    with RolloutWriter(path) as writer:
        for rollout in (numbered(0), numbered(1, bad=bad), numbered(2)):
            writer.write(rollout)
        writer.flush()
        assert writer.lost == 1
        writer.write(numbered(3))
    assert ids(path) == ["r0", "r2", "r3"]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "an entry was left out" in line
    assert why in line


def test_leaving_a_block_raises_the_error_of_the_thread(tmp_path: Path) -> None:
    with (  # noqa: PT012
        pytest.raises(OSError, match="No space left"),
        RolloutWriter(tmp_path / "r.jsonl") as writer,
    ):
        writer._blocks._file = FullDisk(tmp_path / "r.jsonl", 0)  # type: ignore[assignment]
        writer.write(numbered(0))


async def test_leaving_a_block_by_an_exception_keeps_that_and_notes_the_other(
    tmp_path: Path,
) -> None:
    with pytest.raises(KeyError) as found, RolloutWriter(tmp_path / "a.jsonl") as writer:  # noqa: PT012
        writer._blocks._file = FullDisk(tmp_path / "a.jsonl", 0)  # type: ignore[assignment]
        writer.write(numbered(0))
        raise KeyError("mine")
    assert "No space left" in found.value.__notes__[0]
    with pytest.raises(KeyError) as found:  # noqa: PT012
        async with RolloutWriter(tmp_path / "b.jsonl") as writer:
            writer._blocks._file = FullDisk(tmp_path / "b.jsonl", 0)  # type: ignore[assignment]
            writer.write(numbered(0))
            raise KeyError("mine")
    assert "No space left" in found.value.__notes__[0]


def test_threads_may_write_at_the_same_time(tmp_path: Path) -> None:
    path, each = tmp_path / "r.jsonl.zst", 200
    with RolloutWriter(path, max_waiting=16) as writer:

        def work(thread: int) -> None:
            for number in range(each):
                writer.write(numbered(thread * each + number))

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    numbers = [int(name[1:]) for name in ids(path)]
    assert sorted(numbers) == list(range(4 * each))
    for number in range(4):
        own = [n for n in numbers if n // each == number]
        assert own == sorted(own)


@contextmanager
def in_another_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: -1)
        yield


def test_a_forked_process_does_not_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RolloutWriter(tmp_path / "r.jsonl") as writer:
        writer.write(numbered(0))
        with in_another_process(monkeypatch):
            with pytest.raises(SerializationError, match="another process"):
                writer.write(numbered(1))
            writer.close()
        writer.write(numbered(1))
    assert ids(tmp_path / "r.jsonl") == ["r0", "r1"]


def test_a_bound_below_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_waiting=0"):
        RolloutWriter(tmp_path / "r.jsonl", max_waiting=0)


UNCLOSED = """
import sys
from ludic.rollouts import RolloutWriter
from ludic.types import Rollout

writer = RolloutWriter(sys.argv[1])
for number in range(20):
    writer.write(Rollout(f"r{number}", ()))
if sys.argv[2] == "forget":
    del writer
elif sys.argv[2] == "raise":
    raise SystemExit(3)
"""


@pytest.mark.integration
@pytest.mark.parametrize("how", ["end", "forget", "raise"])
def test_a_script_that_does_not_close_its_writer_loses_nothing(tmp_path: Path, how: str) -> None:
    path = tmp_path / "r.jsonl.zst"
    done = subprocess.run([sys.executable, "-c", UNCLOSED, str(path), how], timeout=WAIT_S)
    assert done.returncode == (3 if how == "raise" else 0)
    assert len(ids(path)) == 20
