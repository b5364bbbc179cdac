"""Too little memory on a real device, and an optimizer that leaves most of it to others."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ludic.inference.tiny import tiny_model
from ludic.plumbing.precision import Precision
from ludic.sharding.world import World
from ludic.training.algorithms.grpo import make_grpo
from ludic.training.config import CheckpointConfig, TrainerConfig
from ludic.training.metrics.stats import StatBuffer
from ludic.training.trainer import Trainer
from ludic.training.update import host_optimizer
from ludic.training.update.calibrate import synthetic_batch
from ludic.training.update.host_optimizer import HostAdamW, make_optimizer
from ludic.training.update.optimizer import MasterAdamW, clipped
from ludic.training.update.packing import lay_out
from ludic.training.update.passes import Passes
from ludic.training.update.planning import Cost
from ludic.training.update.policy import Policy
from tests.training.synthetic import SyntheticSource, reinforce

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _all_memory() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.empty_cache()


class Update:
    """An update of a small model over a batch that takes a few hundred MB of activations."""

    def __init__(self, dtype: torch.dtype, device: Any = None, *, passes: int = 1) -> None:
        self.model = tiny_model(hidden_size=256, layers=4).to("cuda", dtype)
        tokens = 16384
        cfg = TrainerConfig(
            micro_token_budget=tokens // passes,
            max_seq_len=1024,
            max_grad_norm=0.1,
            learning_rate=1e-3,
            optimizer_device=device,
            graphs=False,
        )
        world = World(device=torch.device("cuda"))
        self.passes = Passes(Policy(self.model, cfg), make_grpo().loss, cfg, world, Cost())
        self.optimizer = make_optimizer(self.model.named_parameters(), cfg)
        self.batch = lay_out(synthetic_batch(tokens, 1024, 0.5, 256))

    def accumulate(self) -> float:
        args = self.batch, self.optimizer, StatBuffer()
        self.passes.accumulate(*args, version=0, proximal=None)
        return float(self.optimizer.gradient_norm())

    def step(self) -> None:
        self.optimizer.step(1e-3, clipped(self.accumulate(), 0.1))


def test_a_pass_over_the_limit_of_the_device_gives_the_same_gradient(
    caplog: pytest.LogCaptureFixture,
) -> None:
    update = Update(torch.float32)
    update.accumulate()
    update.optimizer.zero_grad()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    norm = update.accumulate()
    whole = [g.clone() for g in update.optimizer.gradients()]
    peak = torch.cuda.max_memory_allocated()
    update.optimizer.zero_grad()
    gc.collect()
    torch.cuda.empty_cache()
    limit = (held + 0.6 * (peak - held) + 64e6) / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(limit)
    assert update.accumulate() == pytest.approx(norm, rel=1e-3)
    largest = max(float(g.abs().max()) for g in whole)
    for ours, other in zip(update.optimizer.gradients(), whole, strict=True):
        assert float((ours - other).abs().max()) < 1e-3 * largest
    assert update.passes.budget < 16384
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1
    before = update.passes.budget
    update.optimizer.zero_grad()
    update.accumulate()
    assert update.passes.budget == before  # and no pass fails any more


@pytest.mark.parametrize("passes", [1, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_hosts_steps_are_those_of_the_device(dtype: torch.dtype, passes: int) -> None:
    device, again, host = (Update(dtype, w, passes=passes) for w in (None, None, "cpu"))
    assert isinstance(host.optimizer, HostAdamW)
    for _ in range(5):
        for update in (device, again, host):
            update.step()
    torch.cuda.synchronize()
    for name, master in device.optimizer.masters.items():
        ours = host.optimizer.masters[name]
        assert not ours.is_cuda
        # Each computes its own gradients, and where one is near zero Adam steps by the whole rate
        # whichever way it is rounded: so two runs on the device differ, too.
        usual = (again.optimizer.masters[name] - master).abs().mean().item()
        gap = (ours - master.cpu()).abs().mean().item()
        assert gap < 2 * usual + 1e-5, name
        assert torch.equal(dict(host.model.named_parameters())[name].cpu(), ours.to(dtype))


Twin = tuple[dict[str, nn.Parameter], MasterAdamW]


def twin(where: Any, dtype: torch.dtype, rows: int = 300) -> Twin:
    """An optimizer of a few parameters, its state on the device or on the host."""
    shapes = {"matrix": (rows, 1000), "vector": (77,), "other": (501, 33), "bias": (1001,)}
    gen = torch.Generator("cuda").manual_seed(0)
    own = {
        name: nn.Parameter(torch.randn(shape, generator=gen, device="cuda").to(dtype))
        for name, shape in shapes.items()
    }
    cfg = TrainerConfig(weight_decay=0.1, optimizer_device=where)
    return own, make_optimizer(own.items(), cfg)


def stepped(twin: Twin, step: int, passes: int) -> None:
    own, optimizer = twin
    gen = torch.Generator("cuda").manual_seed(step)
    for _ in range(passes):
        noise = {n: torch.randn(p.shape, generator=gen, device="cuda") for n, p in own.items()}
        sum((p * noise[n].to(p.dtype)).sum() for n, p in own.items()).backward()  # type: ignore[union-attr]
        optimizer.accumulate()
    optimizer.step(1e-3, clipped(float(optimizer.gradient_norm()), 1.0))


def assert_same_bits(ours: Twin, others: Twin) -> None:
    """At once, while the last pieces are on their way back."""
    state = {name: value.clone() for name, value in ours[1].state_dict().items()}
    for name, master in others[1].masters.items():
        assert torch.equal(ours[0][name], others[0][name]), name
        assert torch.equal(ours[1].masters[name].cpu(), master.cpu()), name
    for name, value in others[1].state_dict().items():
        assert torch.equal(state[name].cuda(), value.cuda()), name


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fifty_steps_with_clipping_are_the_devices_to_the_bit(
    dtype: torch.dtype, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_optimizer, "_PIECE", 6400)
    monkeypatch.setattr(host_optimizer, "_SLOTS", 3)
    device, host = twin(None, dtype), twin("cpu", dtype)
    for step in range(50):
        for one in (device, host):
            stepped(one, step, passes)
        if step % 10 == 0:
            assert_same_bits(host, device)
    assert_same_bits(host, device)


def test_a_state_is_read_and_stepped_again_while_its_last_pieces_return() -> None:
    """120 million numbers: pieces of the usual size, more of them than the ring has slots."""
    device, host = (twin(where, torch.bfloat16, rows=120_000) for where in (None, "cpu"))
    for step in range(4):
        for one in (device, host):
            stepped(one, step, 1)
        if step != 1:
            assert_same_bits(host, device)


def test_a_saved_state_goes_on_to_the_bit(tmp_path: Path) -> None:
    straight, first, resumed = (twin("cpu", torch.bfloat16) for _ in range(3))
    for step in range(6):
        stepped(straight, step, 1)
        stepped(first if step < 3 else resumed, step, 1)
        if step == 2:
            save_file(first[1].state_dict(), tmp_path / "state.safetensors")
            resumed[1].load_state_dict(load_file(tmp_path / "state.safetensors"))
            with torch.no_grad():
                for name, parameter in resumed[0].items():
                    parameter.copy_(first[0][name])
            first[1].close()
    assert_same_bits(resumed, straight)


def test_memory_that_cannot_be_pinned_is_said_and_blames_no_kernel(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gpu = torch.device("cuda")
    array = host_optimizer._host_array(1 << 20, torch.float32, True)
    assert host_optimizer._pin(array, gpu)
    assert not host_optimizer._pin(array, gpu)  # it is already
    assert caplog.text.count("cannot be pinned") == 1
    assert torch.ones(3, device="cuda").mul_(2).sum().item() == 6
    host_optimizer._unpin(host_optimizer.Lane(None), [array], gpu)
    assert host_optimizer._pin(array, gpu)
    host_optimizer._unpin(host_optimizer.Lane(None), [array], gpu)


def test_the_hosts_state_takes_no_memory_of_the_device() -> None:
    taken = []
    for where in (None, "cpu"):
        gc.collect()
        before = torch.cuda.memory_allocated()
        update = Update(torch.bfloat16, where)
        update.step()
        taken.append(torch.cuda.memory_allocated() - before)
        count = sum(p.numel() for p in update.model.parameters())
        del update
    assert taken[0] - taken[1] > 11 * count


@pytest.mark.parametrize("precision", ["bfloat16", "mixed"])
def test_a_run_is_resumed_with_its_state_on_either_side(
    tmp_path: Path, precision: Precision
) -> None:
    def train(folder: Path, steps: int, where: Any) -> dict[str, Tensor]:
        dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
        trainer = Trainer(
            model=tiny_model().to("cuda", dtype),
            algo=reinforce(),
            batch_source=SyntheticSource(),
            cfg=TrainerConfig(
                max_seq_len=64,
                precision=precision,
                optimizer_device=where,
                run_dir=folder,
                checkpoint=CheckpointConfig(folder / "ck", every=1),
            ),
        )
        trainer.train_sync(steps)
        trainer.close()
        return {name: m.detach().cpu() for name, m in trainer.optimizer.masters.items()}

    straight = train(tmp_path / "a", 4, None)
    train(tmp_path / "b", 2, "cpu")
    train(tmp_path / "b", 3, None)
    mixed = train(tmp_path / "b", 4, "cpu")
    for name, master in straight.items():
        assert float((mixed[name] - master).abs().mean()) < 2e-6, name
