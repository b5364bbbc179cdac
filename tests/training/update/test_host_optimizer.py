"""Masters and moments on the host: the steps of the optimizer on the device."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

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
            for number in range(passes):
                loss = sum((own[n] * g).sum() for n, g in gradients(step, number, dtype).items())
                loss.backward()  # type: ignore[union-attr]
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


class DeferredLane:
    """A lane whose work waits until somebody waits for it: then, of the lanes that their marks let
    go on, the first by `order` does. Of an optimizer's lanes the first is its way in, the second
    its way out, and the others compute."""

    order: ClassVar[tuple[int, ...]]
    lanes: ClassVar[list[DeferredLane]]

    def __init__(self, stream: None) -> None:
        self.rank, self.work = min(len(self.lanes), 2), deque[Any]()
        self.lanes.append(self)

    def do(self, work: Callable[[], object]) -> None:
        self.work.append(work)

    def mark(self) -> list[bool]:
        reached: list[bool] = []
        self.work.append(lambda: reached.append(True))
        return reached

    def wait(self, mark: list[bool] | None) -> None:
        if mark is not None:
            self.work.append(mark)

    def use(self, memory: Tensor) -> None:
        memory.fill_(torch.nan)

    def can_go_on(self) -> bool:
        return bool(self.work) and self.work[0] != []

    def finish(self) -> None:
        while self.work:
            ready = [lane for lane in self.lanes if lane.can_go_on()]
            lane = min(ready, key=lambda own: self.order.index(own.rank))
            work = lane.work.popleft()
            if callable(work):
                work()


def five_steps(
    own: dict[str, nn.Parameter], optimizer: MasterAdamW
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """The weights after each, and the state after the last."""
    weights = []
    for step in range(1, 6):
        for name, gradient in gradients(step, 0, torch.bfloat16).items():
            if (step, name) != (2, "square"):  # a parameter may have none
                own[name].grad = gradient
        optimizer.accumulate()
        optimizer.step(1e-2, 0.5)
        weights.append({name: p.detach().clone() for name, p in own.items()})
    return weights, {name: value.clone() for name, value in optimizer.state_dict().items()}


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_pieces_go_through_the_ring_in_every_order_that_streams_may_take(
    order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = TrainerConfig(weight_decay=0.1, optimizer_device="cpu")
    own = parameters(torch.bfloat16)
    weights, state = five_steps(own, make_optimizer(own.items(), cfg))
    monkeypatch.setattr(host_optimizer, "_SLOTS", 3)
    monkeypatch.setattr(host_optimizer, "Lane", DeferredLane)
    monkeypatch.setattr(DeferredLane, "order", order, raising=False)
    monkeypatch.setattr(DeferredLane, "lanes", [], raising=False)
    own = parameters(torch.bfloat16)
    staged = make_optimizer(own.items(), cfg)
    assert isinstance(staged, HostAdamW)
    assert len(staged._pieces) > 6
    monkeypatch.setattr(staged, "_staged", True)
    ringed, ringed_state = five_steps(own, staged)
    for ours, others in zip(ringed, weights, strict=True):
        assert all(torch.equal(ours[name], weight) for name, weight in others.items())
    assert ringed_state.keys() == state.keys()
    for name, value in state.items():
        assert torch.isfinite(value).all()
        assert torch.equal(ringed_state[name], value), name


def test_a_ring_that_does_not_fit_has_fewer_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer: Any = make_optimizer(
        parameters(torch.bfloat16).items(), TrainerConfig(optimizer_device="cpu")
    )
    empty, asked = torch.empty, list[int]()

    def most(shape: tuple[int, ...], **options: Any) -> Tensor:
        asked.append(shape[0])
        if shape[0] > room:
            raise torch.OutOfMemoryError
        return empty(shape, **options)

    monkeypatch.setattr(host_optimizer, "_SLOTS", 6)
    monkeypatch.setattr(torch, "empty", most)
    room = 2
    optimizer._make_ring()
    assert asked == [6, 3, 1]
    assert len(optimizer._ring) == 1
    room = 0
    with pytest.raises(torch.OutOfMemoryError):
        optimizer._make_ring()


def test_a_state_that_starts_over_has_forgotten_its_moments() -> None:
    own = parameters(torch.bfloat16)
    optimizer = make_optimizer(own.items(), TrainerConfig(optimizer_device="cpu"))
    assert isinstance(optimizer, HostAdamW)
    fresh = optimizer.state_dict().keys()
    for parameter in own.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.accumulate()
    optimizer.step(1e-2)
    assert fresh < optimizer.state_dict().keys()
    optimizer.start_over()
    assert optimizer.state_dict().keys() == fresh
    assert not optimizer._moment("matrix", "exp_avg").any()


def test_memory_for_a_gpu_is_zeros_on_whole_pages_of_its_own() -> None:
    first, second = (host_optimizer._host_array(1000, torch.float32, True) for _ in range(2))
    assert first.data_ptr() % 4096 == second.data_ptr() % 4096 == 0
    first.fill_(1)
    assert not second.any()
