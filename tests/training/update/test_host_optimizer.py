"""Masters and moments on the host: the steps of the optimizer on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ludic.errors import ConfigError
from ludic.inference.tiny import tiny_model
from ludic.plumbing.precision import Precision
from ludic.training.config import CheckpointConfig, TrainerConfig
from ludic.training.trainer import Trainer
from ludic.training.update import host_optimizer
from ludic.training.update.host_optimizer import HostAdamW, make_optimizer
from ludic.training.update.optimizer import MasterAdamW, clipped
from tests.training.synthetic import SyntheticSource, reinforce

SHAPES = {"matrix": (7, 30), "square": (16, 16), "vector": (9,)}


@pytest.fixture(autouse=True)
def _several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_optimizer, "_PIECE", 64)


def parameters(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    gen = torch.Generator().manual_seed(0)
    return {n: nn.Parameter(torch.randn(s, generator=gen).to(dtype)) for n, s in SHAPES.items()}


def gradients(step: int, number: int, dtype: torch.dtype) -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(100 * step + number)
    return {n: (0.3 * torch.randn(s, generator=gen)).to(dtype) for n, s in SHAPES.items()}


def oracle(
    masters: dict[str, Tensor], cfg: TrainerConfig, steps: int, passes: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """AdamW with clipping, in float64 and by the book."""
    weights = {n: m.double() for n, m in masters.items()}
    first = {n: torch.zeros_like(w) for n, w in weights.items()}
    second = {n: torch.zeros_like(w) for n, w in weights.items()}
    (a, b), rate = cfg.betas, cfg.learning_rate
    for step in range(1, steps + 1):
        parts = [gradients(step, number, dtype) for number in range(passes)]
        sums = {n: torch.stack([part[n].double() for part in parts]).sum(0) for n in weights}
        norm = torch.cat([g.flatten() for g in sums.values()]).norm()
        for name, weight in weights.items():
            g = sums[name] * min(1.0, cfg.max_grad_norm / float(norm))  # type: ignore[operator]
            first[name] = a * first[name] + (1 - a) * g
            second[name] = b * second[name] + (1 - b) * g * g
            decay = cfg.weight_decay if weight.ndim > 1 else 0.0
            ratio = (first[name] / (1 - a**step)) / (
                (second[name] / (1 - b**step)).sqrt() + cfg.eps
            )
            weights[name] = weight * (1 - rate * decay) - rate * ratio
    return weights


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fifty_steps_with_clipping_are_those_of_the_device_and_of_an_oracle(
    dtype: torch.dtype, passes: int
) -> None:
    found: list[dict[str, Tensor]] = []
    for device in (None, "cpu"):
        cfg = TrainerConfig(
            learning_rate=1e-2, weight_decay=0.1, max_grad_norm=1.5, optimizer_device=device
        )
        own = parameters(dtype)
        optimizer = make_optimizer(own.items(), cfg)
        assert type(optimizer) is (HostAdamW if device else MasterAdamW)
        start = {n: m.detach().clone() for n, m in optimizer.masters.items()}
        clips = 0
        for step in range(1, 51):
            optimizer.sends_gradients = passes == 1
            for number in range(passes):
                loss = sum((own[n] * g).sum() for n, g in gradients(step, number, dtype).items())
                loss.backward()  # type: ignore[union-attr]
                assert (own["matrix"].grad is None) == (passes == 1 and device == "cpu")
                optimizer.accumulate()
            clip = clipped(float(optimizer.gradient_norm()), cfg.max_grad_norm)
            clips += clip < 1
            optimizer.step(1e-2, clip)
            assert not optimizer.gradients()
        assert clips == 50
        for name, parameter in own.items():
            assert torch.equal(optimizer.masters[name].to(dtype), parameter)
        found.append({n: m.detach() for n, m in optimizer.masters.items()})
        truth = oracle(start, cfg, 50, passes, dtype)
        for name, weight in truth.items():
            torch.testing.assert_close(found[-1][name].double(), weight, rtol=2e-5, atol=2e-6)
    for name, weight in found[0].items():
        torch.testing.assert_close(found[1][name], weight, rtol=1e-5, atol=1e-6)


def trained(
    folder: Path,
    steps: int,
    *,
    device: Any = "cpu",
    precision: Precision | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights, and the optimizer's state."""
    trainer = Trainer(
        model=tiny_model().to(dtype),
        algo=reinforce(),
        batch_source=SyntheticSource(),
        cfg=TrainerConfig(
            learning_rate=1e-3,
            max_seq_len=64,
            micro_token_budget=1000,
            precision=precision,
            optimizer_device=device,
            run_dir=folder,
            checkpoint=CheckpointConfig(folder / "ck", every=1),
        ),
    )
    trainer.train_sync(steps)
    trainer.close()
    assert isinstance(trainer.optimizer, HostAdamW) == (device == "cpu")
    return (
        {name: p.detach() for name, p in trainer.model.named_parameters()},
        trainer.optimizer.state_dict(),
    )


@pytest.mark.parametrize("precision", ["bfloat16", "mixed"])
def test_a_run_trains_as_with_its_state_on_the_device_and_either_resumes_the_other(
    tmp_path: Path, precision: Precision
) -> None:
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    kind = {"precision": precision, "dtype": dtype}
    files: dict[Any, dict[str, torch.Tensor]] = {}
    for device, other in ((None, "cpu"), ("cpu", None)):
        folder = tmp_path / str(device)
        trained(folder, 2, device=device, **kind)  # type: ignore[arg-type]
        files[device] = load_file(folder / "ck/step-00000002/state-00000.safetensors")
        trained(folder, 4, device=other, **kind)  # type: ignore[arg-type]
        files[device, 4] = load_file(folder / "ck/step-00000004/state-00000.safetensors")
    assert files[None].keys() == files["cpu"].keys()
    for pair in ((None, "cpu"), ((None, 4), ("cpu", 4))):
        ours, others = files[pair[0]], files[pair[1]]
        for name, tensor in ours.items():
            if name.startswith("rng/"):
                continue
            assert tensor.dtype == others[name].dtype
            largest = float(tensor.abs().max())
            torch.testing.assert_close(others[name], tensor, rtol=0.05, atol=1e-3 * largest)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_run_resumes_to_the_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    straight, whole = trained(tmp_path / "straight", 4, dtype=dtype)
    trained(tmp_path / "halves", 2, dtype=dtype)
    resumed, state = trained(tmp_path / "halves", 4, dtype=dtype)
    assert all(torch.equal(resumed[name], weight) for name, weight in straight.items())
    assert whole.keys() == state.keys()
    assert all(torch.equal(state[name], value) for name, value in whole.items())


def test_masters_follow_weights_that_somebody_else_trained() -> None:
    own = parameters(torch.bfloat16) | {"wide": nn.Parameter(torch.ones(3, 3))}
    optimizer = make_optimizer(own.items(), TrainerConfig(optimizer_device="cpu"))
    before = optimizer.masters["square"].clone()
    with torch.no_grad():
        own["matrix"].add_(1)
        own["wide"].add_(1)
    optimizer.take_weights()
    assert torch.equal(optimizer.masters["matrix"].bfloat16(), own["matrix"])
    assert torch.equal(optimizer.masters["wide"], own["wide"])
    assert torch.equal(optimizer.masters["square"], before)


def test_no_other_device_can_be_asked_for() -> None:
    with pytest.raises(ConfigError, match="optimizer_device"):
        TrainerConfig(optimizer_device="disk")  # type: ignore[arg-type]


def test_a_closed_optimizer_leaves_gradients_to_the_next() -> None:
    own = parameters(torch.float32)
    cfg = TrainerConfig(optimizer_device="cpu")
    first = make_optimizer(own.items(), cfg)
    first.sends_gradients = True
    first.close()
    second = make_optimizer(own.items(), cfg)
    second.sends_gradients = True
    sum(p.sum() for p in own.values()).backward()  # type: ignore[union-attr]
    assert len(second.gradients()) == len(own)
    assert not first.gradients()
