"""What the loop's benchmark measures with: the times of log lines and decode steps, what the GPU
does, and how much of its memory is taken."""

from __future__ import annotations

import cProfile
import ctypes
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, Self
from unittest import mock

import torch

from ludic.inference.local.scheduler import Scheduler


class Work(Protocol):
    """Processor time that is not the library's own."""

    seconds: float


class Stamps:
    """A logger that notes the time of every log line."""

    def __init__(self, work: Work | None = None, busy: BusyMeter | None = None) -> None:
        self.marks: list[tuple[float, float]] = []
        self.metrics: list[Mapping[str, float]] = []
        self.work, self.busy = work, busy
        self.profiler: cProfile.Profile | None = None
        """Of the event loop's thread, from the first line on."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if self.busy is not None:
            self.busy.turn(step)
        spent = time.process_time() - (self.work.seconds if self.work else 0.0)
        self.marks.append((time.perf_counter(), spent))
        self.metrics.append(metrics)
        if self.profiler is not None:
            self.profiler.enable()

    def close(self) -> None: ...

    def between(self, clock: int, first: int) -> list[float]:
        """The seconds from each line to the next, from the line `first` on."""
        marks = [mark[clock] for mark in self.marks[first:]]
        return [b - a for a, b in pairwise(marks)]


class DecodeClock:
    """Notes when the engine counted each of its steps, in the engine's thread."""

    def __init__(self) -> None:
        self.times: list[float] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        count, times = Scheduler._count_step, self.times

        def counted(scheduler: Scheduler) -> None:
            times.append(time.perf_counter())
            count(scheduler)

        with mock.patch.object(Scheduler, "_count_step", counted):
            yield

    def median_ms(self, begin: float, end: float) -> float | None:
        """The median time from one step to the next, of those between two times. The few that
        prompts or an update came between do not move it."""
        steps = [b - a for a, b in pairwise(self.times) if begin <= a and b <= end]
        return 1000 * statistics.median(steps) if steps else None


class _NVMLMemory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def memory_meter() -> Callable[[], int]:
    """Returns what tells how many bytes of GPU 0 are taken, by all processes together. It asks the
    driver and not CUDA, which may be capturing a graph, unless the driver's library is missing."""
    try:
        driver = ctypes.CDLL("libnvidia-ml.so.1")
        handle, memory = ctypes.c_void_p(), _NVMLMemory()
        failed = driver.nvmlInit_v2() or driver.nvmlDeviceGetHandleByIndex_v2(
            0, ctypes.byref(handle)
        )
    except OSError:
        failed = True

    def taken() -> int:
        if failed or driver.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
            free, total = torch.cuda.mem_get_info()
            return total - free
        return int(memory.used)

    return taken


class MemoryPeak:
    """The most memory of the GPU that was taken while this was open, asked ten times a second."""

    def __init__(self, device: str) -> None:
        self.gb: float | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._on_gpu = device == "cuda"

    def __enter__(self) -> Self:
        if self._on_gpu:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._on_gpu:
            self._thread.join()

    def _watch(self) -> None:
        taken, over = memory_meter(), False
        while not over:
            over = self._over.wait(0.1)
            self.gb = max(self.gb or 0.0, taken() / 1e9)


class BusyMeter:
    """Records what the GPU does between the log lines `first` and `first + 1`, and prints when it
    stood still for longest."""

    def __init__(self, first: int) -> None:
        self.first, self.share = first, 0.0
        self._profiler: Any = None
        self._began = 0.0

    def turn(self, step: int) -> None:
        from torch.profiler import ProfilerActivity, profile

        if step == self.first:
            self._profiler = profile(activities=[ProfilerActivity.CUDA])
            self._profiler.start()
            torch.cuda.synchronize()
            self._began = time.perf_counter()
        elif self._profiler is not None and step == self.first + 1:
            torch.cuda.synchronize()
            seconds = time.perf_counter() - self._began
            self._profiler.stop()
            with tempfile.TemporaryDirectory() as where:
                path = Path(where) / "trace.json"
                self._profiler.export_chrome_trace(str(path))
                busy = busy_spans(json.loads(path.read_text()))
            self.share = sum(end - begin for begin, end in busy) / seconds
            idle = sorted(((b[0] - a[1], a[1]) for a, b in pairwise(busy)), reverse=True)[:12]
            for length, begin in sorted(idle, key=lambda gap: gap[1]):
                print(
                    f"  idle for {1e3 * length:.1f} ms, {begin - busy[0][0]:.3f} s after its start"
                )


def busy_spans(trace: Mapping[str, Any]) -> list[tuple[float, float]]:
    """From when to when, in seconds, at least one kernel or copy ran, of a trace in Chrome's
    format."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    spans = sorted(
        (float(e["ts"]) / 1e6, (float(e["ts"]) + float(e["dur"])) / 1e6)
        for e in trace["traceEvents"]
        if e.get("cat") in kinds and "dur" in e
    )
    joined: list[tuple[float, float]] = []
    for begin, end in spans:
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined
