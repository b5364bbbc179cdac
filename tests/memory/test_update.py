"""What the formulas foretell of an update is what is alive in one, within a tenth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ludic.inference.tiny import tiny_model
from ludic.memory.update import Training, pass_bytes, state_bytes
from ludic.plumbing.precision import Precision, weights_dtype
from ludic.sharding.world import World
from ludic.training import TrainerConfig, make_algorithm
from ludic.training.metrics.stats import StatBuffer
from ludic.training.update import fused_layers
from ludic.training.update.budget import plan_update
from ludic.training.update.calibrate import synthetic_batch
from ludic.training.update.optimizer import MasterAdamW
from ludic.training.update.packing import lay_out
from ludic.training.update.passes import Passes
from ludic.training.update.planning import Cost
from ludic.training.update.policy import Policy
from tests.forked import Forked
from tests.memory.live_tensors import LiveTensors
from tests.training.update import plain_kernels

TOKENS = 512
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "layers": 4,
    "heads": 8,
    "kv_heads": 2,
    "vocab_size": 512,
}


def made(precision: Precision, targets: str | list[str] | None, sizes: dict[str, Any]) -> Any:
    model: Any = tiny_model(**sizes).to(weights_dtype(precision))
    if targets is None:
        return model
    from peft import LoraConfig, get_peft_model

    adapter = LoraConfig(r=8, target_modules=targets, task_type="CAUSAL_LM")
    return get_peft_model(model, adapter, autocast_adapter_dtype=False)


def state_of(model: Any, optimizer: MasterAdamW) -> list[torch.Tensor]:
    own = [m for name, m in optimizer.masters.items() if m is not optimizer.parameters[name]]
    moments = [t for state in optimizer._adam.state.values() for t in state.values()]
    return [*model.parameters(), *own, *moments]


@pytest.mark.parametrize(
    ("precision", "targets", "checkpointing"),
    [
        ("float32", None, False),
        ("float32", None, True),
        ("float32", ["q_proj", "v_proj"], False),
        ("bfloat16", None, False),
        ("bfloat16", "all-linear", False),
        ("mixed", None, False),
        ("mixed", "all-linear", True),
    ],
)
def test_the_peak_of_an_update_is_foretold(
    precision: Precision, targets: Any, checkpointing: bool
) -> None:
    assert_foretold(precision, targets, checkpointing, SIZES)


@pytest.mark.parametrize("targets", [None, "all-linear", ["q_proj", "v_proj"]])
def test_the_peak_is_foretold_of_fused_layers(
    monkeypatch: pytest.MonkeyPatch, targets: Any
) -> None:
    monkeypatch.setattr(fused_layers, "_suits", lambda x: True)
    monkeypatch.setattr(fused_layers, "_kernels", lambda: plain_kernels)
    monkeypatch.setattr(Training, "fuses", lambda self, shape: True)
    assert_foretold("bfloat16", targets, False, SIZES)


def test_the_peak_is_foretold_where_the_head_is_most_of_it(tmp_path: Path) -> None:
    # In a process of its own: what checks shapes in the tests holds on to a chunk of logits.
    sizes = {"hidden_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, "vocab_size": 4096}
    code = (
        "from ludic.memory.update import CHUNK_LOGITS\n"
        "from tests.memory.test_update import assert_foretold\n"
        f"assert_foretold('float32', None, False, {sizes})\n"
        "CHUNK_LOGITS['cpu'] = 2**18  # several chunks\n"
        f"assert_foretold('float32', None, False, {sizes}, keep_logits={TOKENS})\n"
    )
    (tmp_path / "foretold.py").write_text(code)
    process = Forked(tmp_path / "foretold.py", where=tmp_path)
    text, _ = process.communicate(timeout=100)
    assert process.returncode == 0, text


def assert_foretold(
    precision: Precision,
    targets: Any,
    checkpointing: bool,
    sizes: dict[str, Any],
    keep_logits: int | None = None,
) -> None:
    model = made(precision, targets, sizes)
    cfg = TrainerConfig(
        precision=precision,
        gradient_checkpointing=checkpointing,
        micro_token_budget=TOKENS,
        max_seq_len=128,
        keep_logits=keep_logits,
    )
    world = World()
    plan = plan_update(model, cfg, world)
    assert plan is not None
    optimizer = MasterAdamW(model.named_parameters(), cfg)
    passes = Passes(Policy(model, cfg), make_algorithm("grpo").loss, cfg, world, Cost())
    batch = lay_out(synthetic_batch(2 * TOKENS, 128, 1.0, sizes["vocab_size"]))
    passes.accumulate(batch, optimizer, StatBuffer(), version=0, proximal=None)
    optimizer.step(0.0)  # from now on there are moments
    with LiveTensors(state_of(model, optimizer)) as live:
        passes.accumulate(batch, optimizer, StatBuffer(), version=0, proximal=None)
        left = live.now
        optimizer.step(0.0)
    state = sum(state_bytes(plan.shape, plan.training).values())
    passing = sum(pass_bytes(plan.shape, plan.training).values())
    assert state == pytest.approx(left, rel=0.01)
    assert state + passing == pytest.approx(live.peak, rel=0.1)
