"""One whole update, from requests to published weights: `python -m benchmarks.loop`.

The run is the one that `ludic train` makes of a run file, with everything that is on by default:
rollouts are written, statistics kept, credit assigned, batches packed, weights published, metrics
logged. The task are sums of one and two digits, in groups that share their sum. With `--task gsm8k
--data FOLDER` it is the run of the README's `gsm8k.toml`, on the folder's `train.jsonl`:

    python -m benchmarks.loop --task gsm8k --data GSM8K --device cuda --model QWEN --lora 16 --peer
    python -m benchmarks.loop --task gsm8k --data GSM8K --device cuda --model QWEN --shape 7b \\
        --lora 16 --peer --trl-rows 32 16

TRL runs before, in a process of its own. `--no-trl` leaves it out, `--only-trl` leaves Ludic out.

Figures are medians; the first `--warmup` updates are left out. `step_s` is the time from one log
line to the next, `wait_s` the part of it that waits for episodes, `train_s` the passes and the
optimizer. `decode_step_ms` is the time from one step of the engine to the next. `peak_gb` is the
most memory of the GPU that was taken at any time, as the driver says, and `torch_peak_gb` torch's
share of it. `mfu` counts 6 operations per trained parameter and token and 4 per frozen one.

The host's own cost is measured in the same loop with an engine that answers at once: requests go
through the real client and the real engine thread, whose scheduler then makes up the answers. Of
the process's time between two log lines (of all threads together), what the model's passes and the
optimizer take is not counted; the rest, divided by the episodes, is `host_us_per_episode`. The
difference between episodes of four turns and of one, by three, is `host_us_per_step`. Here the
model is a small one, with the tokenizer of `--model`.

`device_busy` is the share of a further update's time in which the GPU ran anything, by torch's
profiler; it is left out where one update alone is measured.
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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, get_args
from unittest import mock

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

from benchmarks import gsm8k
from benchmarks.loop_meters import BusyMeter, DecodeClock, MemoryPeak, Stamps
from benchmarks.random_models import SHAPES, random_folder
from benchmarks.sums import BlockingSums, Sums
from benchmarks.trl_loop import trl_figures
from ludic.inference import load_tokenizer
from ludic.inference.local.build import build_scheduler
from ludic.inference.local.scheduler import Scheduler
from ludic.inference.local.sequence import Sequence
from ludic.inference.tiny import tiny_model, tiny_tokenizer
from ludic.plumbing.precision import Precision
from ludic.runs.run import Run
from ludic.runs.settings import RunConfig, check_run
from ludic.runs.stages import Stages
from ludic.runs.storage import RunFolder
from ludic.training.checkpoint import Checkpointer
from ludic.training.update.optimizer import MasterAdamW
from ludic.training.update.passes import Passes

FOLDER = Path(__file__).resolve().parent
FURTHER_TURNS = 4
SUMS = {"episodes": 512, "group": 16, "max_tokens": 24, "slots": 512, "host_updates": 7}
"""What sums are measured with unless it is given."""


def run_of(
    args: argparse.Namespace, *, turns: int, updates: int, device: str, host: bool
) -> RunConfig:
    """The run file's tables."""
    tiny = args.model == "tiny"
    env = BlockingSums if args.blocking else Sums
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
        "env": {"kind": f"benchmarks.sums:{env.__name__}", "kwargs": {"turns": turns}},
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
            "optimizer_device": None if host else args.optimizer_device,
        },
        "logging": {"loggers": ["console"], "keep_rollouts": not args.no_rollouts},
    }
    return check_run(run)


async def reinforce(config: RunConfig, stamps: Stamps) -> None:
    """The reinforcement stage of a run, as `ludic train` runs it, but for its checkpoint."""
    with tempfile.TemporaryDirectory() as where:
        run = Run.of_config(config, RunFolder.planned(config, Path(where) / "run"), FOLDER.parent)
        run.loggers = [stamps]
        stages = Stages(run)
        run.folder.make(config, modules=FOLDER.parent)
        with mock.patch.object(Checkpointer, "save"):  # of a full 7B it would be 106 GB
            async with stages.opened():
                await stages.reinforce(0)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The figures of Ludic's own updates."""
    on_gpu, sums = args.device == "cuda", args.task == "sums"
    busy = BusyMeter(args.warmup + args.updates) if on_gpu and args.updates > 1 else None
    updates = args.warmup + args.updates + (busy is not None)
    if sums:
        config = run_of(args, turns=args.turns, updates=updates, device=args.device, host=False)
    else:
        config = gsm8k.run_of(args, updates=updates)
    stamps, decoding = Stamps(busy=busy), DecodeClock()
    with MemoryPeak(args.device) as peak, decoding.running():
        asyncio.run(reinforce(config, stamps))
    steps = stamps.between(0, args.warmup - 1)[: args.updates]
    print("seconds of each update: " + ", ".join(f"{s:.3f}" for s in steps))
    counted = stamps.metrics[args.warmup : args.warmup + args.updates]
    for name in counted[-1]:
        if name.endswith("_s") or name.startswith("perf/tokens"):
            values = [metrics[name] for metrics in counted if name in metrics]
            print(f"  {name}: median {statistics.median(values):.4f}, last {values[-1]:.4f}")

    def median(*names: str) -> float:
        return statistics.median(sum(line.get(name, 0.0) for name in names) for line in counted)

    marks = [mark for mark, _ in stamps.marks]
    step_ms = decoding.median_ms(marks[args.warmup - 1], marks[args.warmup + args.updates - 1])
    torch_peaks = [line.get("perf/gpu_mem_peak_mb", 0.0) for line in stamps.metrics]
    return {
        "step_s": round(statistics.median(steps), 4),
        "wait_s": round(median("perf/wait_for_batch_s", "perf/wait_for_next_batch_s"), 4),
        "train_s": round(median("perf/forward_backward_s", "perf/optimizer_s"), 4),
        "publish_s": round(median("perf/publish_s"), 4),
        "decode_step_ms": None if step_ms is None else round(step_ms, 3),
        "peak_gb": None if peak.gb is None else round(peak.gb, 2),
        "torch_peak_gb": round(max(torch_peaks) * 2**20 / 1e9, 2) if on_gpu else None,
        "mfu": round(median("perf/mfu"), 4) if on_gpu else None,
        "mean_tokens": round(median("train/completion_tokens_mean"), 1),
        "row_tokens": round(median("train/item_tokens_mean"), 1),
        "tokens_computed": median("perf/tokens_computed"),
        "mean_reward": round(statistics.fmean(line["train/reward_mean"] for line in counted), 4),
        "trained_rows": median("train/samples"),
        "device_busy": round(busy.share, 3) if busy else None,
    }


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
                (Passes, "_forward"),
                (torch.Tensor, "backward"),
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
        mock.patch("ludic.runs.parts.build_model", small_model),
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


def arguments() -> argparse.Namespace:
    """The command line. What a task has its own defaults for is None unless it is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=("sums", "gsm8k"), default="sums")
    parser.add_argument("--data", type=Path, help="a folder with GSM8K's train.jsonl")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", default="tiny", help="tiny, or a folder")
    parser.add_argument("--shape", choices=SHAPES, help="random weights, and --model's tokenizer")
    parser.add_argument("--lora", type=int, help="train an adapter of this rank (gsm8k)")
    parser.add_argument("--turns", type=int, choices=(1, 4), default=1)
    parser.add_argument("--blocking", action="store_true", help="environments in threads (sums)")
    parser.add_argument("--episodes", type=int, help="per update")
    parser.add_argument("--group", type=int)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--host-updates", type=int, help="0: leave the host out")
    parser.add_argument("--warmup", type=int, default=2, help="updates that are not counted")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--context", type=int, help="prompt plus completion (gsm8k)")
    parser.add_argument("--learning-rate", type=float, help="(gsm8k)")
    parser.add_argument("--slots", type=int, help="sequences that are sampled together")
    parser.add_argument("--workers", type=int, default=0, help="processes that play the episodes")
    parser.add_argument("--overlap", action="store_true", help="sample ahead")
    parser.add_argument("--precision", choices=get_args(Precision), help="as in a run file")
    parser.add_argument("--optimizer-device", choices=("cpu",), help="as in a run file")
    parser.add_argument("--micro-tokens", type=int, help="micro_token_budget (gsm8k)")
    parser.add_argument("--recompute", action="store_true", help="gradient checkpointing (gsm8k)")
    parser.add_argument("--no-rollouts", action="store_true", help="rollouts are not written")
    parser.add_argument("--profile", type=int, choices=(1, 4), help="of the host, with such turns")
    parser.add_argument("--peer", action="store_true", help="TRL too, as sums have it anyway")
    parser.add_argument("--no-trl", action="store_true", help="leave TRL out")
    parser.add_argument("--only-trl", action="store_true", help="leave Ludic out")
    parser.add_argument("--trl-updates", type=int, default=6, help="0: leave TRL out")
    parser.add_argument(
        "--trl-rows", type=int, nargs="+", help="rows a pass; those after it if it does not fit"
    )
    parser.add_argument("--trl-vllm-memory", type=float, default=0.3, help="vLLM's share")
    parser.add_argument("--trl-checkpointing", action="store_true", help="TRL recomputes")
    parser.add_argument("--trl-limit-s", type=float, help="for each of TRL's processes")
    args = parser.parse_args()
    if args.warmup < 1 or (args.only_trl and args.no_trl):
        parser.error("--warmup must be at least 1, and --only-trl contradicts --no-trl")
    if args.task == "gsm8k":
        if args.data is None or args.model == "tiny" or args.turns != 1:
            parser.error("gsm8k needs --data FOLDER and --model FOLDER, and has one turn")
        gsm8k.settle(args)
    for name, value in SUMS.items():
        if args.task == "sums" and getattr(args, name) is None:
            setattr(args, name, value)
    return args


def main() -> None:
    args = arguments()
    if args.shape:
        args.model = random_folder(args.shape, args.model)
    names = ("task", "device", "model", "shape", "lora", "turns", "episodes", "group", "max_tokens")
    how = (
        *("blocking", "slots", "workers", "overlap", "context", "optimizer_device"),
        *("micro_tokens", "no_rollouts"),
    )
    figures: dict[str, Any] = {"benchmark": "loop"}
    figures |= {name: getattr(args, name) for name in names + how}
    beside = args.peer or (args.task == "sums" and args.updates > 0)
    trl: dict[str, Any] = {"trl_step_s": None, "trl_peak_gb": None}
    if args.only_trl or (beside and args.trl_updates and not args.no_trl):
        trl |= trl_figures(args)
    if args.updates and not args.only_trl:
        figures |= measure(args)
    figures |= trl
    ratios = {
        "speedup_vs_trl": ("trl_step_s", "step_s"),
        "memory_vs_trl": ("peak_gb", "trl_peak_gb"),
    }
    for name, (above, below) in ratios.items():
        both = figures.get(above) and figures.get(below)
        figures[name] = round(figures[above] / figures[below], 2) if both else None
    if args.host_updates and not args.only_trl:
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
