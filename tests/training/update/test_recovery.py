"""A device without memory for a pass: the same gradient comes of smaller ones, with one warning."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ludic.errors import OutOfMemoryError
from ludic.inference.tiny import tiny_model
from ludic.plumbing.model_parts import decoder_layers
from ludic.sharding.world import World
from ludic.training.algorithms.grpo import make_grpo
from ludic.training.batching.scoring import LocalScores
from ludic.training.checkpoint_contents import verify_checkpoint
from ludic.training.config import CheckpointConfig, TrainerConfig
from ludic.training.metrics.stats import StatBuffer
from ludic.training.trainer import Trainer
from ludic.training.update import logprobs
from ludic.training.update.host_optimizer import make_optimizer
from ludic.training.update.optimizer import MasterAdamW
from ludic.training.update.packing import Layout, lay_out, pack
from ludic.training.update.passes import Passes
from ludic.training.update.planning import Cost
from ludic.training.update.policy import Policy
from tests.training.synthetic import SyntheticSource, reinforce, synthetic_batch

BUDGET = 64
FULL = "CUDA out of memory (injected)"


class Failing:
    """Raises at the given calls, counted from 1, or wherever a condition holds."""

    def __init__(self, *calls: int) -> None:
        self.calls, self.count = calls, 0

    def __call__(self, *_: Any) -> None:
        self.count += 1
        if self.count in self.calls:
            raise torch.OutOfMemoryError(FULL)


class _FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, fail: Callable[[], None]) -> Tensor:
        ctx.fail = fail
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.fail()
        return grad, None


@contextmanager
def failing(where: str, model: nn.Module, *calls: int) -> Iterator[Failing]:
    """Has the middle layer's forward or backward pass, or a chunk of the head's, fail."""
    fail, layers = Failing(*calls), decoder_layers(model)
    middle = layers[len(layers) // 2]
    if where in ("head", "head backward"):
        name = "_reduce" if where == "head" else "_logit_gradient"
        original = getattr(logprobs, name)

        def reduce(*args: Any) -> Any:
            fail()
            return original(*args)

        reduce.__name__ = name
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(logprobs, name, reduce)
            yield fail
        return
    if where == "forward":
        handle = middle.register_forward_pre_hook(fail)
    else:
        handle = middle.register_forward_pre_hook(
            lambda _, args: (_FailsBackward.apply(args[0], fail), *args[1:])  # type: ignore[no-untyped-call]
        )
    try:
        yield fail
    finally:
        handle.remove()


def batch(rollouts: int = 9) -> Layout:
    return lay_out(synthetic_batch(4, rollouts))


def accumulated(
    dtype: torch.dtype,
    where: str | None = None,
    *calls: int,
    rollouts: int = 9,
    device: Any = None,
    budget: int = BUDGET,
    keep_logits: int = 0,
) -> tuple[dict[str, Tensor], dict[str, float], Passes]:
    """The gradient of a batch, and what is logged of it, where passes fail at some calls."""
    cfg = TrainerConfig(
        micro_token_budget=budget,
        max_seq_len=64,
        optimizer_device=device,
        keep_logits=keep_logits,
    )
    model = tiny_model().to(dtype)
    passes = Passes(Policy(model, cfg), make_grpo(group_size=2).loss, cfg, World(), Cost())
    optimizer, stats = make_optimizer(model.named_parameters(), cfg), StatBuffer()

    def work() -> None:
        passes.accumulate(batch(rollouts), optimizer, stats, version=0, proximal=None)

    if where is None:
        work()
    else:
        with failing(where, model, *calls) as fail:
            work()
        assert fail.count > max(calls)
    assert all(p.requires_grad for p in model.parameters())
    found = optimizer.gradients()
    gradients = {
        n: g.reshape(p.shape).clone()
        for (n, p), g in zip(model.named_parameters(), found, strict=True)
    }
    return gradients, stats.reduce(None, optimizer.gradient_norm()), passes


def assert_close(ours: dict[str, Tensor], others: dict[str, Tensor], tolerance: float) -> None:
    largest = max(float(g.abs().max()) for g in others.values())
    assert ours.keys() == others.keys()
    for name, gradient in ours.items():
        assert float((gradient - others[name]).abs().max()) <= tolerance * largest, name


@pytest.mark.parametrize(  # `call`: the first micro-batch, and one that finds gradients
    ("where", "call", "device"),
    [
        ("forward", 1, None),
        ("forward", 2, "cpu"),
        ("backward", 1, "cpu"),
        ("backward", 2, None),
        ("head", 1, None),
        ("head", 2, "cpu"),
        ("head backward", 1, "cpu"),
        ("head backward", 2, None),
    ],
)
def test_a_pass_that_does_not_fit_gives_the_same_gradient_in_parts(
    where: str, call: int, device: Any, caplog: pytest.LogCaptureFixture
) -> None:
    whole, metrics, _ = accumulated(torch.float64)
    caplog.clear()
    parts, again, passes = accumulated(torch.float64, where, call, device=device)
    assert_close(parts, whole, 1e-12)
    for name in ("train/loss", "train/grad_norm", "train/entropy"):
        assert again[name] == pytest.approx(metrics[name], rel=1e-6)
    assert passes.budget <= BUDGET // 2
    (line,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert f"none has over {passes.budget} tokens" in line.getMessage()


@pytest.mark.parametrize("where", ["forward", "backward", "head", "head backward"])
def test_kept_logits_go_before_a_pass_is_split(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole, _, passes = accumulated(torch.float64, keep_logits=BUDGET)
    assert passes.policy.keep_logits == BUDGET
    again, _, passes = accumulated(torch.float64, where, 2, keep_logits=BUDGET)
    assert_close(again, whole, 1e-12)
    assert (passes.budget, passes.policy.keep_logits) == (BUDGET, 0)
    (line,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "without keeping logits" in line.getMessage()
    again, _, passes = accumulated(torch.float64, where, 1, 2, keep_logits=BUDGET)
    assert_close(again, whole, 1e-12)
    assert passes.budget <= BUDGET // 2


@pytest.mark.parametrize("where", ["forward", "backward", "head"])
def test_gradients_in_bfloat16_are_added_up_once(where: str) -> None:
    whole, _, _ = accumulated(torch.bfloat16)
    parts, _, _ = accumulated(torch.bfloat16, where, 2)
    assert_close(parts, whole, 0.03)


def test_failures_one_after_another_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    whole, _, _ = accumulated(torch.float64)
    parts, _, passes = accumulated(torch.float64, "backward", 1, 2, 4)
    assert_close(parts, whole, 1e-12)
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1
    plan, _ = passes.plan(batch())
    assert len(plan) > 2  # remembered


@pytest.mark.parametrize("where", ["forward", "backward", "head"])
def test_a_row_that_does_not_fit_alone_is_recomputed(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole, _, _ = accumulated(torch.float64, rollouts=1)
    alone, _, passes = accumulated(torch.float64, where, 1, rollouts=1)
    assert_close(alone, whole, 1e-12)
    assert passes.budget == BUDGET
    assert "with activations dropped" in caplog.text
    assert passes.recovery.recomputed_from == len(batch(1).packed[0].input_ids)


@pytest.mark.parametrize("fused", [True, False])
def test_a_recomputed_row_keeps_only_its_layers_inputs(fused: bool) -> None:
    policy = Policy(tiny_model(), TrainerConfig(fused_layers=fused))
    micro, kept = pack(batch(1), (0,)), []
    for on in (False, True):
        sizes: list[int] = []
        with (
            policy.recomputing(on),
            torch.autograd.graph.saved_tensors_hooks(
                lambda t, sizes=sizes: (sizes.append(t.numel()), t)[1],  # type: ignore[misc]
                lambda t: t,
            ),
        ):
            policy.score(micro)
        kept.append(sum(sizes))
    assert kept[1] < kept[0] / 2


@pytest.mark.parametrize("count", [2, 3])
def test_a_reference_that_does_not_fit_is_scored_in_parts(count: int) -> None:
    items, model = synthetic_batch(4, count).items, tiny_model()
    scores = LocalScores(model)
    whole = scores._score(items)
    with failing("forward", model, 1, 2) as fail:
        parts = scores._score(items)
    assert fail.count > 2
    for ours, others in zip(parts, whole, strict=True):
        np.testing.assert_allclose(ours, others, rtol=1e-4, atol=1e-6)


def test_an_optimizer_without_memory_takes_the_same_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stepped(*calls: int) -> dict[str, Tensor]:
        model, fail, original = tiny_model().bfloat16(), Failing(*calls), torch.zeros_like
        optimizer = MasterAdamW(model.named_parameters(), TrainerConfig())

        def zeros_like(*args: Any, **kwargs: Any) -> Tensor:
            fail()
            return original(*args, **kwargs)

        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.accumulate()
        with monkeypatch.context() as patch:
            patch.setattr(torch, "zeros_like", zeros_like)
            optimizer.step(1e-3)
        assert fail.count > max(calls, default=0)
        return {name: p.detach() for name, p in model.named_parameters()}

    whole = stepped()
    again = stepped(7)
    assert all(torch.equal(again[name], weight) for name, weight in whole.items())
    assert caplog.text.count("out of memory in the optimizer") == 1
    with pytest.raises(OutOfMemoryError, match="optimizer_device"):
        stepped(3, 4)


def test_gradients_that_the_optimizer_has_no_memory_for_are_not_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original, calls = MasterAdamW._move_gradients, list[int]()

    def move(self: MasterAdamW) -> None:
        calls.append(1)
        if len(calls) in (2, 3):  # as a CPU says it
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        original(self)

    monkeypatch.setattr(MasterAdamW, "_move_gradients", move)
    with pytest.raises(OutOfMemoryError, match="out of memory in the optimizer"):
        accumulated(torch.bfloat16)


def trained(folder: Path, where: str | None, steps: int = 3, *calls: int) -> Trainer:
    trainer = Trainer(
        model=(model := tiny_model()),
        algo=reinforce(),
        batch_source=SyntheticSource(),
        cfg=TrainerConfig(
            learning_rate=1e-3,
            max_seq_len=64,
            micro_token_budget=BUDGET,
            run_dir=folder,
            checkpoint=CheckpointConfig(folder / "ck", every=100),
        ),
    )
    try:
        if where is None:
            trainer.train_sync(steps)
        else:
            with failing(where, model, *calls):
                trainer.train_sync(steps)
    finally:
        trainer.close()
    return trainer


def test_a_run_goes_on_and_reaches_the_same_weights(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", None)
    again = trained(tmp_path / "again", "backward", 3, 2)
    assert again.step == 3
    for ours, others in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(ours, others, rtol=1e-3, atol=1e-5)


def test_where_nothing_helps_a_checkpoint_is_written_and_a_sentence_ends_the_run(
    tmp_path: Path,
) -> None:
    one = trained(tmp_path / "one", None, 1)
    with pytest.raises(OutOfMemoryError, match="not even with their activations") as raised:
        trained(tmp_path / "two", "forward", 3, *range(3, 100))
    (note,) = raised.value.__notes__
    assert "checkpoint of step 1" in note
    state = verify_checkpoint(tmp_path / "two/ck/step-00000001")
    assert state["state"]["step"] == 1
    resumed = trained(tmp_path / "two", None, 1)  # its one step is in the checkpoint
    for ours, others in zip(resumed.model.parameters(), one.model.parameters(), strict=True):
        assert torch.equal(ours, others)
