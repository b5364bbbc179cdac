"""One update, from SAW batch to stepped weights: Ludic beside TRL and a plain padded loop.

    python -m benchmarks.update                  # CPU, tiny model, ratios only
    python -m benchmarks.update --device cuda    # one GPU, 0.5B and 1.5B Qwen2 shapes in bfloat16

The batch is ragged and agentic: 64 episodes of 4 to 8 turns, each turn with a prompt of 200 to
1,500 tokens and a completion of 20 to 200, in groups of 8 that share their first prompt. All four
optimise the same loss, which is checked, with its gradient, before anything is timed. Peers get
the number of rows, and recomputation or not, with which they are fastest. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from msgspec import structs
from torch import nn
from transformers import Qwen2ForCausalLM

from benchmarks import random_models
from benchmarks.agentic_batch import Shape, dense, episodes, one_row_per_turn, with_behavior
from benchmarks.peer_updates import TRLUpdate, padded_gradients
from benchmarks.random_models import SHAPES, qwen2
from ludic.saw.batch import make_batch
from ludic.saw.items import SAWBatch
from ludic.sharding.world import World
from ludic.training.algorithms.grpo import TokenClippedSurrogateLoss
from ludic.training.config import TrainerConfig
from ludic.training.losses.aggregation import token_mean
from ludic.training.metrics.stats import ModelFlops, StatBuffer
from ludic.training.update.optimizer import MasterAdamW
from ludic.training.update.packing import lay_out
from ludic.training.update.passes import Passes
from ludic.training.update.planning import attention_cost
from ludic.training.update.policy import Policy

H200_FLOPS = 989e12
TINY = random_models.Shape(128, 512, 3, 4, 2)


@dataclass(frozen=True)
class Measure:
    """One contestant's figures."""

    name: str
    seconds: float
    peak_gb: float | None
    tokens: int
    note: str = ""


class Bench:
    """Builds models and times updates on one device."""

    def __init__(self, device: str, args: argparse.Namespace) -> None:
        self.device = torch.device(device)
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.args = args
        self.shape = Shape() if device == "cuda" else _small_shape()
        self.size = "0.5b" if device == "cuda" else "tiny"
        self.repeats = 1 if device == "cuda" else 2  # a shared CPU is noisy

    def model(self, size: str | None = None) -> Qwen2ForCausalLM:
        """A fresh model with the same random weights every time."""
        torch.manual_seed(0)
        config = qwen2(
            {**SHAPES, "tiny": TINY}[size or self.size],
            vocab_size=self.shape.vocab,
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
            attn_implementation="sdpa",
        )
        with torch.device(self.device):
            model = Qwen2ForCausalLM(config).to(self.dtype)
        return model.eval()

    def passes(self, model: nn.Module, cfg: TrainerConfig) -> Passes:
        policy = Policy(model, cfg)
        loss = TokenClippedSurrogateLoss(aggregation=token_mean)
        return Passes(policy, loss, cfg, World(device=self.device), attention_cost(model))

    def config(self, budget: int, *, recompute: bool = False) -> TrainerConfig:
        return TrainerConfig(
            learning_rate=1e-6,
            max_seq_len=budget,
            micro_token_budget=budget,
            attention=self.args.attention,
            compile=self.args.compile and self.device.type == "cuda",
            gradient_checkpointing=recompute,
        )

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def fresh(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def time(self, work: Callable[[], Any], *, warm: bool, repeats: int) -> tuple[float, Any]:
        """The best of `repeats` runs, and the peak memory over them in GB."""
        if warm:
            work()
        self.fresh()
        best = float("inf")
        for _ in range(repeats):
            self.sync()
            start = time.perf_counter()
            work()
            self.sync()
            best = min(best, time.perf_counter() - start)
        peak = torch.cuda.max_memory_allocated() / 1e9 if self.device.type == "cuda" else None
        return best, peak

    def update(self, passes: Passes, optimizer: MasterAdamW, batch: SAWBatch) -> int:
        """What a trainer's step does with a batch, less waiting and publishing. Returns how many
        tokens it computed."""
        stats = StatBuffer()
        layout = lay_out(batch, max_seq_len=passes.cfg.max_seq_len)
        work = passes.accumulate(layout, optimizer, stats, version=0, proximal=None)
        metrics = stats.reduce(None, optimizer.gradient_norm())
        norm = metrics["train/grad_norm"]
        optimizer.step(passes.cfg.learning_rate, min(1.0, 1.0 / norm) if norm else 1.0)
        return work.tokens


def _small_shape() -> Shape:
    """The same batch at a tenth of the lengths, for a CPU."""
    return Shape(episodes=8, group_size=4, prompt=(20, 150), completion=(2, 20), vocab=2048)


def check(bench: Bench) -> None:
    """All four compute the same loss and gradient on a small part of the batch."""
    shape = replace(bench.shape, episodes=2, group_size=2)
    items = episodes(shape)
    budget = max(len(i.input_ids) for i in items)
    results: dict[str, tuple[float, torch.Tensor]] = {}

    def gradient(model: nn.Module) -> torch.Tensor:
        return torch.cat([p.grad.flatten().float() for p in model.parameters()])  # type: ignore[union-attr]

    model = bench.model()
    passes = bench.passes(model, bench.config(budget))
    items = with_behavior(items, passes.score(make_batch(items)))
    merged, unmerged = make_batch(items), one_row_per_turn(items)
    for name, batch in (("ludic", merged), ("ludic unmerged", unmerged)):
        optimizer = MasterAdamW(model.named_parameters(), passes.cfg)
        stats = StatBuffer()
        passes.accumulate(lay_out(batch), optimizer, stats, version=0, proximal=None)
        grads = [gradient.flatten().float() for gradient in optimizer.gradients()]
        results[name] = (stats.reduce()["train/loss"], torch.cat(grads))
        optimizer.zero_grad()
        del optimizer
    del model, passes
    bench.fresh()
    model = bench.model()
    results["padded"] = (padded_gradients(model, unmerged, 1, bench.device), gradient(model))
    del model
    bench.fresh()
    if bench.args.trl:
        model = bench.model()
        loss = TRLUpdate(model).gradients(merged, 2, bench.device)
        results["trl"] = (loss, gradient(model))
        del model
    bench.fresh()
    expected, direction = results["padded"]
    narrow = bench.dtype == torch.bfloat16
    for name, (loss, grad) in results.items():
        cosine = torch.nn.functional.cosine_similarity(
            grad.double(), direction.double(), dim=0
        ).item()
        ratio = (grad.norm() / direction.norm()).item()
        print(f"  {name:16s} loss {loss:+.6f}  gradient: cosine {cosine:.6f}, norm x {ratio:.5f}")
        bound = 0.02 if narrow else 1e-4
        if abs(loss - expected) > bound or cosine < 1 - bound or abs(ratio - 1) > 2 * bound:
            raise SystemExit(f"{name} does not compute the padded loop's loss and gradient")


def ragged(bench: Bench) -> dict[str, Measure]:
    """The four updates over the agentic batch."""
    items = episodes(bench.shape)
    merged, unmerged = make_batch(items), one_row_per_turn(items)
    longest = max(len(i.input_ids) for i in items)
    budget = max(bench.args.budget or 0, longest)
    found: dict[str, Measure] = {}

    def ludic(name: str, batch: SAWBatch, *, recompute: bool = False, share: bool = True) -> None:
        model = bench.model()
        passes = bench.passes(model, bench.config(budget, recompute=recompute))
        passes.policy.sharing = share
        optimizer = MasterAdamW(model.named_parameters(), passes.cfg)
        tokens = bench.update(passes, optimizer, batch)  # and warm
        seconds, peak = bench.time(
            lambda: bench.update(passes, optimizer, batch), warm=False, repeats=bench.repeats
        )
        note = f"micro_token_budget {budget}" + (", recomputing" if recompute else "")
        found[name] = Measure(name, seconds, peak, tokens, note)
        report(found[name])

    ludic("ludic", merged)
    bench.fresh()
    ludic("ludic, not sharing", merged, share=False)
    bench.fresh()
    if bench.device.type == "cuda":
        ludic("ludic, recomputing", merged, recompute=True)
        bench.fresh()
    ludic("ludic unmerged", unmerged)
    bench.fresh()
    if bench.args.trl:
        found["trl"] = fastest_trl(bench, merged)
        bench.fresh()
    found["padded"] = padded(bench, unmerged)
    bench.fresh()
    return found


def fastest_trl(bench: Bench, batch: SAWBatch) -> Measure:
    """TRL with the rows per chunk, and recomputation or not, that serve it best."""
    cuda = bench.device.type == "cuda"
    best: Measure | None = None
    for recompute in (False, True):
        for rows in (1, 2, 4) if cuda else (4, 8):
            try:
                candidate = time_trl(bench, batch, rows, recompute)
            except torch.OutOfMemoryError:
                print(f"  trl, {rows} rows: out of memory")
                bench.fresh()
                break
            bench.fresh()
            report(candidate)
            if best is None or candidate.seconds < best.seconds:
                best = candidate
    assert best is not None
    return best


def time_trl(bench: Bench, batch: SAWBatch, rows: int, recompute: bool) -> Measure:
    model = bench.model()
    if recompute:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    update = TRLUpdate(model)
    # bfloat16 weights and moments: less precise than what the others keep, and lighter.
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-6, fused=bench.device.type == "cuda" or None
    )

    def step(part: SAWBatch) -> None:
        update.gradients(part, rows, bench.device)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step(structs.replace(batch, items=batch.items[: 2 * rows]))
    seconds, peak = bench.time(lambda: step(batch), warm=False, repeats=bench.repeats)
    width = sum(max(p) for p in zip(*map(_split_lengths, batch.items), strict=True))
    note = f"{rows} rows of {width} tokens" + (", recomputing" if recompute else "")
    return Measure("trl", seconds, peak, width * len(batch.items), note)


def _split_lengths(item: Any) -> tuple[int, int]:
    first = int(item.action_mask.argmax())
    return first, len(item.input_ids) - first


def padded(bench: Bench, batch: SAWBatch) -> Measure:
    """The plain loop, in the order of the batch, padded within each micro-batch."""
    rows = bench.args.padded_rows or (2 if bench.device.type == "cuda" else 8)
    model = bench.model()
    optimizer = MasterAdamW(model.named_parameters(), bench.config(2))

    def step(part: SAWBatch) -> None:
        total = 0.0
        for start in range(0, len(part.items), rows):
            chunk = structs.replace(part, items=part.items[start : start + rows])
            total += padded_gradients(model, chunk, rows, bench.device)
            optimizer.accumulate()
        optimizer.step(1e-6, float(1.0 / max(optimizer.gradient_norm().item(), 1.0)))

    step(structs.replace(batch, items=batch.items[: 2 * rows]))
    seconds, peak = bench.time(lambda: step(batch), warm=False, repeats=bench.repeats)
    tokens = sum(
        max(len(i.input_ids) for i in batch.items[s : s + rows]) * len(batch.items[s : s + rows])
        for s in range(0, len(batch.items), rows)
    )
    found = Measure("padded", seconds, peak, tokens, f"{rows} rows, one per turn, whole logits")
    report(found)
    return found


def report(measure: Measure) -> None:
    memory = "" if measure.peak_gb is None else f"  {measure.peak_gb:7.1f} GB"
    print(
        f"  {measure.name:20s} {measure.seconds:8.3f} s{memory}  {measure.tokens:9d} tokens "
        f"computed  ({measure.note})",
        flush=True,
    )


def dense_mfu(bench: Bench, size: str, sequences: int, per_pass: int) -> float:
    """The share of the card's arithmetic that a dense update of 4,096-token sequences uses."""
    length = 4096
    torch._dynamo.reset()  # compiled for one fixed shape, and far from the limit of recompilations
    model = bench.model(size)
    cfg = bench.config(length * per_pass)
    passes = bench.passes(model, cfg)
    optimizer = MasterAdamW(model.named_parameters(), cfg)
    batch = dense(sequences, length, bench.shape.vocab)
    seconds, peak = bench.time(lambda: bench.update(passes, optimizer, batch), warm=True, repeats=3)
    flops = ModelFlops(model)
    work = flops.of(sequences * length, sequences * length**2, batch.counts.tokens)
    mfu = work / seconds / H200_FLOPS
    tokens = sequences * length
    shares = {
        "backbone": flops.backbone * tokens,
        "head": flops.head * batch.counts.tokens,
        "attention": flops.attention * sequences * length**2,
    }
    print(
        f"  {size}: {tokens / seconds:,.0f} tokens/s, MFU {100 * mfu:.1f} %, peak {peak:.1f} GB, "
        f"{per_pass} sequences per pass; operations: "
        + ", ".join(f"{k} {100 * v / work:.0f} %" for k, v in shares.items())
    )
    step_bytes = sum(p.numel() for p in model.parameters()) * (4 * 7 + 2 * 2)
    print(
        f"  {size}: the optimizer moves {step_bytes / 1e9:.1f} GB, at 4.8 TB/s "
        f"{step_bytes / 4.8e12 * 1e3:.1f} ms of {seconds * 1e3:.0f} ms"
    )
    if bench.args.profile:
        profile(lambda: bench.update(passes, optimizer, batch))
    return mfu


def profile(work: Callable[[], Any]) -> None:
    """Where the time of one update goes, by kernel."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    events = seen.key_averages()
    print(events.table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=70))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--budget", type=int, help="micro_token_budget (default: the longest row)")
    parser.add_argument("--attention", default="auto", choices=("auto", "varlen", "sdpa"))
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--no-trl", dest="trl", action="store_false")
    parser.add_argument("--padded-rows", type=int)
    parser.add_argument("--per-pass", type=int, nargs=2, default=(8, 4), metavar=("0.5B", "1.5B"))
    parser.add_argument("--only", choices=("ragged", "dense"))
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)
    if args.trl and importlib.util.find_spec("trl") is None:
        print("trl is not installed: its figures are null")
        args.trl = False
    bench = Bench(args.device, args)
    name = torch.cuda.get_device_name() if args.device == "cuda" else platform.machine()
    print(f"device {name}, torch {torch.__version__}, compile {args.compile}")
    figures: dict[str, float | None] = dict.fromkeys(
        ("speedup_vs_trl", "speedup_vs_padded", "speedup_unmerged_vs_padded", "memory_vs_trl")
    )
    measures: dict[str, Measure] = {}
    if args.only != "dense":
        print("the same loss and gradient:")
        check(bench)
        print("one update:")
        measures = ragged(bench)
        figures |= ratios(measures)
    mfu: dict[str, float | None] = {"mfu": None, "mfu_1.5b": None}
    if args.device == "cuda" and args.only != "ragged":
        print("dense sequences of 4,096 tokens, a quarter of them actions:")
        mfu["mfu"] = dense_mfu(bench, "0.5b", 32, args.per_pass[0])
        bench.fresh()
        mfu["mfu_1.5b"] = dense_mfu(bench, "1.5b", 16, args.per_pass[1])
    print(json.dumps({**figures, **mfu, "runs": [asdict(m) for m in measures.values()]}))


def ratios(measures: dict[str, Measure]) -> dict[str, float | None]:
    """The figures of the table. With recomputation where only that halves TRL's memory."""
    own, trl, loop = measures["ludic"], measures.get("trl"), measures["padded"]
    lean = measures.get("ludic, recomputing")
    if trl and lean and own.peak_gb and trl.peak_gb and own.peak_gb > trl.peak_gb / 2:
        own = lean
    memory = own.peak_gb / trl.peak_gb if trl and own.peak_gb and trl.peak_gb else None
    return {
        "speedup_vs_trl": trl.seconds / own.seconds if trl else None,
        "speedup_vs_padded": loop.seconds / own.seconds,
        "speedup_unmerged_vs_padded": loop.seconds / measures["ludic unmerged"].seconds,
        "memory_vs_trl": memory,
        "speedup_shared": measures["ludic, not sharing"].seconds / measures["ludic"].seconds,
    }


if __name__ == "__main__":
    main()
