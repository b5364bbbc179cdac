"""What was measured, for `benchmarks.plan`: on one H200 by this project, and published by others.

All rows of code that is still there fit the profile; rows of code that has been replaced are only
shown. Runs made after the profile was fixed judge it (`benchmarks.plan --judge`) and are not here.
Sources are `benchmarks/README.md` up to 2026-11-17 unless they say otherwise; git has the readings
that later ones replaced.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ludic.memory.shape import Adapter, ModelShape
from ludic.plan.profile import shape_named

LORA = Adapter(16)
SMOL = shape_named("SmolLM2-135M")
HALF = shape_named("Qwen2.5-0.5B")
ONE = shape_named("Qwen2.5-1.5B")
SEVEN = shape_named("Qwen2.5-7B")


class Decode(NamedTuple):
    """A decode step in milliseconds, 320 tokens in every row."""

    name: str
    shape: ModelShape
    adapter: Adapter | None
    rows: int
    ms: float


_STEPS: list[tuple[str, ModelShape, Adapter | None, dict[int, float]]] = [
    ("135M", SMOL, None, {16: 0.723, 32: 0.785, 64: 0.811, 128: 0.980, 192: 1.155, 256: 1.323}),
    ("0.5B", HALF, None, {16: 0.787, 64: 0.855, 128: 0.970, 256: 1.432}),
    ("1.5B", ONE, None, {16: 1.539, 64: 1.652, 128: 1.982, 256: 3.220}),
    ("7B", SEVEN, None, {16: 4.312, 64: 4.638, 128: 5.365, 256: 9.051}),
    # Other rows with LoRA are of code that has been replaced.
    ("1.5B, LoRA", ONE, LORA, {128: 2.414}),
    ("7B, LoRA", SEVEN, LORA, {128: 6.359}),
]
DECODE = [
    Decode(name, shape, adapter, rows, ms)
    for name, shape, adapter, times in _STEPS
    for rows, ms in times.items()
]
CACHE = {512: 1.89, 1024: 2.26, 2432: 3.22}
"""Milliseconds of 256 rows of the 0.5B by their tokens, of earlier kernels: only their differences
are of use."""


class Pass(NamedTuple):
    """Forward and backward over so many tokens."""

    name: str
    shape: ModelShape
    adapter: Adapter | None
    tokens: int
    passes: int
    context: int
    seconds: float
    use: str = "fitted"


GSM8K_TOKENS = 128 * 309 + 16 * 150
"""Rows that are only shown are of code that has been replaced."""
PASSES = [
    Pass("1.5B, 16,384 tokens", ONE, None, 16_384, 1, 512, 0.338),
    Pass("1.5B, LoRA, 16,384 tokens", ONE, LORA, 16_384, 1, 512, 0.469, "shown"),
    Pass("0.5B, 8 sequences of 4,096", HALF, None, 32_768, 1, 4096, 32_768 / 127_736, "shown"),
    Pass("7B, LoRA, 8,192 tokens", SEVEN, LORA, 8_192, 1, 512, 0.474),
    Pass("1.5B, 4 sequences of 4,096", ONE, None, 16_384, 1, 4096, 16_384 / 48_717, "shown"),
    Pass("1.5B, GSM8K", ONE, None, GSM8K_TOKENS, 3, 459, 0.87),
    Pass("1.5B, LoRA, GSM8K", ONE, LORA, GSM8K_TOKENS, 3, 459, 1.09, "shown"),
    Pass("7B, LoRA, GSM8K", SEVEN, LORA, 128 * 256 + 16 * 150, 3, 406, 2.19),
    Pass("135M, 131,072 tokens", SMOL, None, 131_072, 1, 256, 0.405),
    Pass("135M, LoRA, 131,072 tokens", SMOL, LORA, 131_072, 1, 256, 0.609),
    Pass("0.5B, 60,928 tokens", HALF, None, 60_928, 1, 256, 0.464),
    Pass("0.5B, LoRA, 60,928 tokens", HALF, LORA, 60_928, 1, 256, 0.662),
    Pass("1.5B, 19,456 tokens", ONE, None, 19_456, 1, 256, 0.373),
    Pass("1.5B, LoRA, 19,456 tokens", ONE, LORA, 19_456, 1, 256, 0.398),
]
REPLAYED = Pass("135M, sums, graphs", SMOL, None, 8_064, 1, 72, 0.074)
LAUNCHED = Pass("135M, sums, launched", SMOL, None, 8_064, 1, 72, 0.18)
LAUNCHED_LORA = Pass("7B, LoRA, 2,147 tokens a pass", SEVEN, LORA, 34_357, 16, 355, 3.81)
"""Passes that take as long as the starts of their kernels. With at most 4,096 tokens in a
pass, each of the 16 groups of 8 answers has one of its own."""


class Whole(NamedTuple):
    """A whole update, its wait for samples and its passes, in seconds. `how` are changes to the
    usual; `kind` says which figure of the host it tells."""

    name: str
    shape: ModelShape
    adapter: Adapter | None
    how: dict[str, Any]
    update: float
    wait: float | None
    passes: float | None
    use: str = "fitted"
    kind: str = ""
    publish: float | None = None


USUAL: dict[str, Any] = {
    **{"episodes": 128, "group": 8, "mean": 309, "most": 512, "spread": 0.5, "seen": ()},
    **{"prompt": 150, "slots": 128, "hosts": 1, "mode": "sync", "turns": 1, "context": None},
    **{"threaded": True, "writes": True, "trained": 1.0, "budget": None, "on_host": False},
    "keeps_logits": False,
}
"""One process on one GPU, 128 episodes of GSM8K in groups of 8, before runs kept logits."""
SUMS: dict[str, Any] = {
    **{"episodes": 512, "group": 16, "mean": 12, "most": 24, "prompt": 60, "slots": 512},
    "threaded": False,
}
RANDOM: dict[str, Any] = {
    **{"mean": 256, "most": 256, "spread": 0.0, "prompt": 99, "context": 1024, "writes": False}
}
"""Random weights: no answer ends by itself, and none is checked."""
WHOLE = [
    Whole("1.5B, GSM8K", ONE, None, {}, 2.21, 1.28, 0.87, kind="threaded"),
    Whole("1.5B, GSM8K, blocks that grow", ONE, None, {"mean": 307, "prompt": 102, "context": 1024},
          2.175, 1.221, 0.831, kind="threaded"),
    Whole("1.5B, LoRA, GSM8K, code that has been replaced", ONE, LORA, {},
          2.78, 1.65, 1.09, "shown"),
    Whole("7B, LoRA, 256 tokens, code that has been replaced", SEVEN, LORA,
          {"mean": 256, "most": 256, "spread": 0.0}, 4.42, 2.20, 2.19, "shown"),
    Whole("1.5B, random weights", ONE, None, RANDOM, 1.379, 0.673, 0.698, "shown"),
    Whole("7B, LoRA, random weights, passes of 4,096 tokens", SEVEN, LORA,
          RANDOM | {"budget": 4096}, 5.708, 1.875, 3.82, "shown"),
    Whole("1.5B, optimizer on the host, code that has been replaced", ONE, None,
          RANDOM | {"on_host": True}, 2.203, 0.693, 1.496, "shown"),
    Whole("7B, optimizer on the host, code that has been replaced", SEVEN, None,
          RANDOM | {"on_host": True}, 8.337, 1.753, 6.574, "shown"),
    Whole("135M, sums", SMOL, None, SUMS, 0.365, 0.267, 0.075, kind="sums"),
    Whole("135M, sums, alone", SMOL, None, SUMS, 0.336, 0.218, 0.074, kind="sums"),
    Whole("135M, sums, another machine", SMOL, None, SUMS, 0.387, None, None),
    Whole("135M, sums, rollouts not written", SMOL, None, SUMS | {"writes": False},
          0.25, 0.18, None, kind="unwritten"),
    Whole("135M, sums, 8 processes", SMOL, None, SUMS | {"hosts": 8}, 0.288, 0.169, 0.074),
    Whole("135M, sums, one ahead, another machine", SMOL, None, SUMS | {"mode": "ahead"},
          0.354, None, None),
    Whole("135M, sums, 8 processes, one ahead", SMOL, None,
          SUMS | {"hosts": 8, "mode": "ahead"}, 0.237, None, None),
    Whole("135M, sums, 8 processes, one ahead, another machine", SMOL, None,
          SUMS | {"hosts": 8, "mode": "ahead"}, 0.316, None, None),
    Whole("135M, sums, over Redis, code that has been replaced", SMOL, None,
          SUMS | {"mode": "async", "writes": False}, 0.82, 0.22, None, "shown", publish=0.46),
    Whole("135M, sums, vLLM on the trainer's GPU", SMOL, None,
          SUMS | {"slots": 256, "server": True}, 1.24, 0.99, None, kind="server",
          publish=0.14),
    Whole("135M, four turns of 64, lengths not recorded", SMOL, None,
          SUMS | {"turns": 4, "mean": 48, "most": 64}, 1.56, 1.27, None, "shown"),
]  # fmt: skip

ENGINE = [(128, 128 * 128 / 75_885), (256, 256 * 128 / 92_700)]
"""The in-process engine, 0.5B: requests of 256 + 128 tokens, seconds."""
VLLM = [(128, 128 * 128 / 13_796), (256, 256 * 128 / 14_997)]
"""The same by a vLLM server over HTTP."""
PUBLISH = [(988e6, 0.176, 0.083), (988e6, 0.145, 0.073), (270e6, 0.14, None)]
"""Bytes to a vLLM server on the GPU, seconds in all and with sampling paused."""

MEMORY = {
    "1.5B, GSM8K, blocks that grow": (65.2, 69.0),
    "1.5B, random weights": (63.2, 67.5),
    "1.5B, optimizer on the host, code that has been replaced": (44.6, 49.0),
    "7B, optimizer on the host, code that has been replaced": (72.4, 79.8),
    "7B, LoRA, random weights, passes of 4,096 tokens": (36.5, 41.7),
}
"""The peaks of whole runs in GB, by the names of `WHOLE`: by torch, and of the device."""


class Verl(NamedTuple):
    """Qwen2.5-Math-7B, DAPO, 512 prompts of 16 answers of at most 28k tokens, on H20s: verl's
    documentation, docs/advance/fully_async.md, seconds of a step and its phases."""

    gpus: int
    sync: float
    gen: float
    old_log_prob: float
    update_actor: float
    asynchronous: float
    async_update: float


VERL = [
    Verl(32, 790.10, 357.41, 107.71, 313.81, 294.77, 269.80),
    Verl(64, 365.28, 150.72, 70.26, 133.41, 189.26, 156.98),
    Verl(128, 356.30, 177.85, 53.92, 113.81, 150.63, 113.16),
]


class AReaL(NamedTuple):
    """AReaL's paper, nodes of 8 H800s, 512 prompts of 16 answers of at most 27k tokens."""

    shape: ModelShape
    nodes: int
    sync: float
    asynchronous: float


AREAL = [AReaL(ONE, 16, 148.0, 53.0), AReaL(SEVEN, 24, 208.0, 91.0)]


class NeMo(NamedTuple):
    """NeMo-RL 0.4's documentation, docs/about/performance-summary.md: H100, Megatron, 2,048 samples
    a step. GPUs, mean tokens of a sequence, seconds of a step: on policy, and one step off."""

    name: str
    sync: tuple[int, int, float]
    ahead: tuple[int, int, float]


NEMO = [
    NeMo("Llama-3.1-8B", (16, 1060, 97.7), (16, 1129, 74.6)),
    NeMo("Qwen3-32B", (32, 3206, 393.0), (64, 3207, 215.0)),
]
