"""One whole update, from requests to published weights: `python -m benchmarks.loop`.

The run is the one that `ludic train` makes of a run file, with everything that is on by default:
rollouts are written, statistics kept, credit assigned, batches packed, weights published, metrics
logged. The task are sums of one and two digits, in groups that share their sum. `step_s` is the
median time from one log line to the next, the first `--warmup` updates left out.

The host's own cost is measured in the same loop with an engine that answers at once: requests go
through the real client and the real engine thread, whose scheduler then makes up the answers. Of
the process's time between two log lines (of all threads together), what the model's passes and the
optimizer take is not counted; the rest, divided by the episodes, is `host_us_per_episode`. The
difference between episodes of four turns and of one, by three, is `host_us_per_step`. Here the
model is a small one, with the tokenizer of `--model`.

`device_busy` is the share of an update's time in which the GPU ran anything, by torch's profiler.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args
from unittest import mock

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from transformers import Qwen2ForCausalLM

from benchmarks.local_engine import half_billion_config
from benchmarks.trl_loop import trl_step_s
from ludic.inference import load_tokenizer
from ludic.inference.local.build import build_scheduler
from ludic.inference.local.scheduler import Scheduler
from ludic.inference.local.sequence import Sequence
from ludic.inference.tiny import tiny_model, tiny_tokenizer
from ludic.plumbing.precision import Precision
from ludic.runs.run import Run
from ludic.runs.settings import RunConfig, check_run
from ludic.runs.stages import Stages
from ludic.runs.storage.folder import RunFolder
from ludic.training.update.optimizer import MasterAdamW
from ludic.training.update.passes import Passes

FOLDER = Path(__file__).resolve().parent
FURTHER_TURNS = 4


def run_of(
    args: argparse.Namespace, *, turns: int, updates: int, device: str, host: bool
) -> RunConfig:
    """The run file's tables."""
    tiny = args.model == "tiny"
    context = 256 * turns if tiny else 128 + turns * (args.max_tokens + 64)
    model: dict[str, Any] = {"name": args.model, "device": device}
    if tiny:
        model["kwargs"] = {"max_position_embeddings": max(1024, context)}
    elif not host and args.precision:
        model["precision"] = args.precision
    run = {
        "run": {"name": "loop", "threads": 1 if host else None},
        "model": model,
        "inference": {
            "slots": min(args.episodes, args.slots),
            "max_context_tokens": context,
            "deterministic": False if host else None,
            "sampling": {"max_tokens": args.max_tokens},
        },
        "env": {"kind": "benchmarks.sums:Sums", "kwargs": {"turns": turns}},
        "protocol": {
            "kind": "single_agent",
            "kwargs": {"parser": {"kind": "text", "error_reward": 0.0}},
        },
        "algorithm": {"name": "grpo", "kwargs": {"group_size": args.group}},
        "training": {
            "steps": updates,
            "rollouts_per_update": args.episodes,
            "concurrency": args.episodes,
            "workers": args.workers,
            "max_steps": turns,
            "learning_rate": 1e-5,
            "max_seq_len": context,
            "overlap": args.overlap and not host,
        },
        "logging": {"loggers": ["console"], "keep_rollouts": not args.no_rollouts},
    }
    return check_run(run)


def random_half_billion(folder: str) -> str:
    """Returns a folder with random weights of Qwen2.5-0.5B's shape and `folder`'s tokenizer."""
    tokenizer = load_tokenizer(folder)
    model = Qwen2ForCausalLM(half_billion_config(vocab_size=len(tokenizer))).to(torch.bfloat16)
    made = tempfile.mkdtemp()
    model.save_pretrained(made)
    tokenizer.save_pretrained(made)
    return made


class Stamps:
    """A logger that notes the time of every log line."""

    def __init__(self, work: WorkClock | None = None, busy: BusyMeter | None = None) -> None:
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


async def reinforce(config: RunConfig, stamps: Stamps) -> None:
    """The reinforcement stage of a run, as `ludic train` runs it."""
    with tempfile.TemporaryDirectory() as where:
        run = Run.of_config(config, RunFolder.planned(config, Path(where) / "run"), FOLDER.parent)
        run.loggers = [stamps]
        stages = Stages(run)
        run.folder.make(config, modules=FOLDER.parent)
        async with stages.opened():
            await stages.reinforce(0)


# The device


class BusyMeter:
    """Records what the GPU does between the log lines `first` and `first + 1`."""

    def __init__(self, first: int) -> None:
        self.first, self.share = first, 0.0
        self._profiler: Any = None
        self._began = 0.0

    def turn(self, step: int) -> None:
        import torch
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
                self.share = busy_seconds(json.loads(path.read_text())) / seconds


def busy_seconds(trace: Mapping[str, Any]) -> float:
    """How long at least one kernel or copy ran, of a trace in Chrome's format."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    spans = sorted(
        (float(e["ts"]), float(e["ts"]) + float(e["dur"]))
        for e in trace["traceEvents"]
        if e.get("cat") in kinds and "dur" in e
    )
    total, until = 0.0, float("-inf")
    for begin, end in spans:
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total / 1e6


# The host


class InstantScheduler(Scheduler):
    """Ends every request with a made-up answer as soon as it sees it."""

    def __init__(self, real: Scheduler, answers: list[list[int]]) -> None:
        super().__init__(real.memory, real.store, real.tokenizer, version=real.version)
        self.answers = answers

    def advance(self) -> None:
        self.gather()
        self.drop_cancelled_waiting()
        while self.waiting:
            sequence = self.waiting.popleft()
            self.on_admit()
            sequence.admitted_at = time.monotonic()
            for token in self.answers[sequence.seed % len(self.answers)]:
                sequence.accept(token, -0.5, self.version, ())
            sequence.check_end(self.spell)
            self.answer(sequence)

    def answer(self, sequence: Sequence) -> None:
        info = {"seed": sequence.seed, "reused_tokens": 0, "queue_seconds": 0.0}
        text = self.decode(sequence.completion) if sequence.returns.text else None
        sequence.deliver(sequence.response(text, info))


class WorkClock:
    """The processor time of the model's passes and the optimizer."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def clocked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - begin

        return timed

    @contextmanager
    def running(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name in (
                (Passes, "_one"),
                (MasterAdamW, "step"),
                (MasterAdamW, "gradient_norm"),
            ):
                clocked = self.clocked(getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, clocked))
            yield


def host_us(args: argparse.Namespace, turns: int) -> tuple[float, float]:
    """Microseconds of an episode that are the library's own: the mean of all updates, which holds
    what garbage collection takes, and the lowest."""
    updates, work = args.host_updates + args.warmup, WorkClock()
    config = run_of(args, turns=turns, updates=updates, device="cpu", host=True)

    def instant(model: Any, tokenizer: Any, **options: Any) -> Scheduler:
        ends = [tokenizer.eos_token_id]
        answers = [tokenizer.encode(str(n), add_special_tokens=False) + ends for n in range(5, 20)]
        return InstantScheduler(build_scheduler(model, tokenizer, **options), answers)

    def small_model(config: RunConfig, weights: Path | None = None) -> tuple[Any, Any]:
        name = config.model.name
        tokenizer = tiny_tokenizer() if name == "tiny" else load_tokenizer(name)
        size = {"hidden_size": 16, "layers": 1, "heads": 2, "kv_heads": 1}
        size["max_position_embeddings"] = config.training.max_seq_len
        return tiny_model(0, vocab_size=len(tokenizer), **size), tokenizer

    stamps = Stamps(work)
    if args.profile == turns:
        stamps.profiler = cProfile.Profile(time.thread_time)
    with (
        mock.patch("ludic.inference.local.client.build_scheduler", instant),
        mock.patch("ludic.runs.run.build_model", small_model),
        work.running(),
    ):
        asyncio.run(reinforce(config, stamps))
    if stamps.profiler is not None:
        stamps.profiler.disable()
        for order in ("tottime", "cumtime"):
            pstats.Stats(stamps.profiler).sort_stats(order).print_stats(80)
    each = [s / args.episodes * 1e6 for s in stamps.between(1, args.warmup - 1)]
    shown = ", ".join(f"{us:.0f}" for us in each)
    print(f"host, {turns} turns: {shown} us of processor time an episode, one figure an update")
    return statistics.fmean(each), min(each)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", default="tiny", help="tiny, or a folder")
    parser.add_argument("--shape", choices=("0.5b",), help="random weights of Qwen2.5-0.5B's shape")
    parser.add_argument("--turns", type=int, choices=(1, 4), default=1)
    parser.add_argument("--episodes", type=int, default=512, help="per update")
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--host-updates", type=int, default=7, help="0: leave the host out")
    parser.add_argument("--warmup", type=int, default=2, help="updates that are not counted")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--trl-updates", type=int, default=6, help="0: leave TRL out")
    parser.add_argument("--slots", type=int, default=512)
    parser.add_argument("--workers", type=int, default=0, help="processes that play the episodes")
    parser.add_argument("--overlap", action="store_true", help="sample ahead")
    parser.add_argument("--precision", choices=get_args(Precision), help="as in a run file")
    parser.add_argument("--no-rollouts", action="store_true", help="rollouts are not written")
    parser.add_argument("--profile", type=int, choices=(1, 4), help="of the host, with such turns")
    args = parser.parse_args()
    if args.shape:
        args.model = random_half_billion(args.model)
    figures: dict[str, Any] = {"benchmark": "loop"} | {
        name: getattr(args, name) for name in ("device", "model", "turns", "episodes", "group")
    }
    cuda = args.device == "cuda"
    if args.updates:
        busy = BusyMeter(args.warmup + args.updates) if cuda else None
        stamps = Stamps(busy=busy)
        updates = args.warmup + args.updates + cuda
        config = run_of(args, turns=args.turns, updates=updates, device=args.device, host=False)
        asyncio.run(reinforce(config, stamps))
        steps = stamps.between(0, args.warmup - 1)[: args.updates]
        print("seconds of each update: " + ", ".join(f"{s:.3f}" for s in steps))
        counted = stamps.metrics[args.warmup : args.warmup + args.updates]
        for name in counted[-1]:
            if name.endswith("_s") or name.startswith("perf/tokens"):
                values = [metrics[name] for metrics in counted if name in metrics]
                print(f"  {name}: median {statistics.median(values):.4f}, last {values[-1]:.4f}")
        figures["step_s"] = round(statistics.median(steps), 4)
        figures["device_busy"] = round(busy.share, 3) if busy else None
        trl = trl_step_s(args) if args.trl_updates else None
        figures["trl_step_s"] = trl
        figures["speedup_vs_trl"] = round(trl / figures["step_s"], 2) if trl else None
    if args.host_updates:
        mean, best = host_us(args, 1)
        further, best_further = host_us(args, FURTHER_TURNS)
        between = FURTHER_TURNS - 1
        figures["host_us_per_episode"] = round(mean, 1)
        figures["host_us_per_episode_best"] = round(best, 1)
        figures["host_us_per_step"] = round((further - mean) / between, 1)
        figures["host_us_per_step_best"] = round((best_further - best) / between, 1)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
