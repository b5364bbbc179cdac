"""Weights' gradients that products add up in float32: those that autograd would have added, without
the rounding of each."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ludic.sharding.world import World
from ludic.training.algorithms.grpo import make_grpo
from ludic.training.config import TrainerConfig
from ludic.training.metrics.stats import StatBuffer
from ludic.training.update.host_optimizer import make_optimizer
from ludic.training.update.optimizer import MasterAdamW
from ludic.training.update.packing import lay_out
from ludic.training.update.passes import Passes
from ludic.training.update.planning import Cost
from ludic.training.update.policy import Policy
from tests.training.synthetic import synthetic_batch
from tests.training.update.test_fused_layers import fused as fused
from tests.training.update.test_fused_layers import tiny, with_adapter
from tests.training.update.test_graphed import graphed
from tests.training.update.test_recovery import failing


def narrow_model(*, adapter: bool = False, device: str = "cpu") -> nn.Module:
    model = tiny("qwen2").to(torch.bfloat16)
    return (with_adapter(model) if adapter else model).to(device)


class Update:
    """The gradients of a batch in some passes, and what products added to them by themselves."""

    def __init__(
        self,
        model: nn.Module,
        *,
        budget: int = 64,
        by_products: bool = True,
        graphs: bool = False,
        fails_at: int | None = None,
        **settings: Any,
    ) -> None:
        cfg = TrainerConfig(micro_token_budget=budget, max_seq_len=64, **settings)
        world = World(device=next(model.parameters()).device)
        policy = Policy(model, cfg)
        if graphs:
            graphed(policy)
        passes = Passes(policy, make_grpo(group_size=2).loss, cfg, world, Cost())
        self.optimizer = make_optimizer(model.named_parameters(), cfg)
        self.added: dict[str, list[tuple[Tensor, Tensor, float]]] = defaultdict(list)
        layout = lay_out(synthetic_batch(4, 9))
        self.passes = len(passes.plan(layout)[0])
        own = self.optimizer._add_product

        def add(name: str, a: Tensor, b: Tensor, scale: float) -> bool:
            self.added[name].append((a.double(), b.double(), scale))
            return own(name, a, b, scale)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.optimizer, "_add_product", add)
            if not by_products:
                patch.setattr(self.optimizer, "product_sums", lambda: lambda parameter: None)
            work = (layout, self.optimizer, StatBuffer())
            if fails_at is None:
                passes.accumulate(*work, version=0, proximal=None)
            else:
                with failing("backward", model, fails_at) as fail:
                    passes.accumulate(*work, version=0, proximal=None)
                assert fail.count > fails_at
        assert all(p.grad is None for p in self.optimizer.parameters.values())
        self.gradients = {n: g.clone() for n, g in self.optimizer._gradients().items()}


def check_close(ours: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    """As close as sums of gradients that are each rounded to bfloat16."""
    assert ours.keys() == others.keys()
    for name, gradient in ours.items():
        assert gradient.dtype == torch.float32
        difference = float((gradient - others[name]).norm())
        assert difference <= 2**-7 * float(others[name].norm()), name


@pytest.mark.parametrize(
    ("budget", "checkpointing", "adapter", "where"),
    [
        (1024, False, False, None),
        (64, False, False, None),
        (64, True, False, "cpu"),
        (64, True, True, None),
    ],
)
def test_products_add_up_what_autograd_would(
    fused: list[int], budget: int, checkpointing: bool, adapter: bool, where: Any
) -> None:
    model = narrow_model(adapter=adapter)
    settings: dict[str, Any] = {
        "budget": budget,
        "optimizer_device": where,
        "gradient_checkpointing": checkpointing,
    }
    rounded = Update(copy.deepcopy(model), by_products=False, **settings)
    ours = Update(model, **settings)
    assert (ours.passes > 1) == (budget == 64)
    assert not rounded.added
    matrices = {n for n, p in model.named_parameters() if p.requires_grad and "_proj" in n}
    assert set(ours.added) == {name for name in matrices if "bias" not in name}
    check_sums(ours, rounded)


def check_sums(ours: Update, rounded: Update) -> None:
    """Ours are the sums of the products, and the others' are, too, but rounded."""
    check_close(ours.gradients, rounded.gradients)
    for name, products in ours.added.items():
        assert len(products) == ours.passes
        exact = sum(
            (scale * (a @ b) for a, b, scale in products),
            torch.zeros((), device=products[0][0].device),
        )
        torch.testing.assert_close(
            ours.gradients[name].double(), exact, rtol=1e-4, atol=1e-6 * float(exact.abs().max())
        )
        error, other = ((u.gradients[name] - exact).norm() for u in (ours, rounded))
        assert error < other / 10


@pytest.mark.parametrize(  # the first finds no gradients
    ("where", "fails_at"), [(None, 1), (None, 2), ("cpu", 2)]
)
def test_a_pass_that_failed_halfway_is_added_once(
    fused: list[int], where: Any, fails_at: int
) -> None:
    model = narrow_model()
    whole = Update(copy.deepcopy(model), optimizer_device=where)
    again = Update(model, optimizer_device=where, fails_at=fails_at)
    assert whole.passes > 1
    check_close(again.gradients, whole.gradients)
    assert all(p.requires_grad for p in model.parameters())


def test_the_step_is_that_of_the_sums(fused: list[int]) -> None:
    model = narrow_model()
    update, before = Update(model), copy.deepcopy(model)
    other = MasterAdamW(before.named_parameters(), TrainerConfig())
    for name, parameter in before.named_parameters():
        other._sums[name] = update.gradients[name]
        assert parameter.grad is None
    for optimizer in (update.optimizer, other):
        optimizer.step(1e-2, 0.5)
    for ours, others in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(ours, others)
    assert update.optimizer.gradients() == []


def test_frozen_weights_get_nothing(fused: list[int]) -> None:
    model: Any = narrow_model()
    frozen = model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    update = Update(model)
    assert "model.layers.0.mlp.up_proj.weight" not in update.gradients
    assert "model.layers.0.mlp.gate_proj.weight" in update.added
    assert frozen.grad is None


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_weight_that_somebody_watches_is_left_to_autograd(fused: list[int], kind: str) -> None:
    model: Any = narrow_model()
    expected, called = Update(copy.deepcopy(model)), list[Tensor]()
    weight = model.model.layers[0].self_attn.o_proj.weight
    getattr(weight, kind)(lambda tensor: called.append(tensor))
    update = Update(model)
    assert len(called) == update.passes
    assert "model.layers.0.self_attn.o_proj.weight" not in update.added
    check_close(update.gradients, expected.gradients)


@pytest.mark.parametrize("other_is_fused", [True, False])
def test_a_weight_that_is_used_twice_is_left_to_autograd(
    fused: list[int], other_is_fused: bool
) -> None:
    model: Any = narrow_model()
    model.model.layers[1].mlp = model.model.layers[0].mlp
    if not other_is_fused:
        model.model.layers[0].self_attn.register_forward_hook(lambda *_: None)
    rounded = Update(copy.deepcopy(model), by_products=False)
    update = Update(model, fails_at=2)
    assert not [name for name in update.added if "layers.0.mlp" in name]
    assert "model.layers.1.self_attn.q_proj.weight" in update.added
    check_close(update.gradients, rounded.gradients)


def test_graphs_have_gradients_of_their_own(fused: list[int]) -> None:
    model = narrow_model()
    expected = Update(copy.deepcopy(model), by_products=False)
    update = Update(model, graphs=True)
    assert not update.added
    check_close(update.gradients, expected.gradients)


def test_weights_of_others_and_float32_ones_are_left_to_autograd() -> None:
    own, wide = nn.Linear(2, 2, dtype=torch.bfloat16), nn.Linear(2, 2)
    other = nn.Linear(2, 2, dtype=torch.bfloat16)  # as FSDP's gathered weights are
    named: list[tuple[str, Any]] = [("own", own.weight), ("wide", wide.weight)]
    sums = MasterAdamW(named, TrainerConfig()).product_sums()
    assert sums(own.weight) is not None
    assert sums(wide.weight) is None
    assert sums(other.weight) is None


def test_a_use_without_gradients_is_none() -> None:
    weight = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    optimizer = MasterAdamW([("w", weight)], TrainerConfig())
    sums = optimizer.product_sums()
    with torch.no_grad():  # as a loss may score another policy
        assert sums(weight) is None
    add = sums(weight)
    assert add is not None
    assert add(weight, weight, 0.5)
    assert torch.equal(optimizer.gradients()[0], torch.ones(2, 2))


@pytest.mark.parametrize("where", [None, "cpu"])
@pytest.mark.parametrize(
    ("first", "then"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_a_weight_whose_type_is_changed_later_keeps_its_gradient(
    first: torch.dtype, then: torch.dtype, where: Any
) -> None:
    layer = nn.Linear(2, 2, bias=False, dtype=first)
    optimizer = make_optimizer(layer.named_parameters(), TrainerConfig(optimizer_device=where))
    layer.to(then)
    for _ in range(2):
        layer(torch.ones(1, 2, dtype=then)).sum().backward()
        optimizer.accumulate()
    assert optimizer.gradient_norm().item() == 4.0  # of four numbers that are 2 each
    before = layer.weight.detach().clone()
    optimizer.step(0.1)
    assert (layer.weight < before).all()
    assert optimizer.gradients() == []
