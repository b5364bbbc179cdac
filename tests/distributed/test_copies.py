"""The copies of a model's loader, recorded and made again."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from ludic.distributed.in_vllm.copies import Copies


class Served(nn.Module):
    """As vLLM lays a model out: q and v in one matrix, the embedding padded."""

    def __init__(self) -> None:
        super().__init__()
        self.qv = nn.Parameter(torch.zeros(6, 4))
        self.embed = nn.Parameter(torch.zeros(8, 4))
        self.norm = nn.Parameter(torch.zeros(4))
        self.loads = 0
        self.extra = ""

    @torch.no_grad()
    def load_weights(self, staged: Iterable[tuple[str, Tensor]]) -> set[str]:
        self.loads += 1
        pairs = list(staged)
        for name, tensor in pairs:
            if name == "embed":
                self.embed[: len(tensor)].copy_(tensor)
                self.embed[len(tensor) :].fill_(0)
            elif name in ("unused", "model.lm_head.weight"):
                pass
            elif name in "qv":
                first = 0 if name == "q" else 4
                self.qv[first : first + len(tensor)].copy_(tensor)
            else:
                self.norm.copy_(tensor)
        if self.extra == "adds":
            self.norm.add_(1)
        if self.extra == "reads":  # as vLLM's own loader does with a single number
            self.norm.fill_(pairs[-1][1][0].item())
        if self.extra == "fills with a tensor":
            self.norm.fill_(pairs[-1][1][0])
        if self.extra == "fills what it copied":
            self.norm[:2].fill_(0)
        if self.extra == "copies twice":
            self.norm[:2].copy_(pairs[-1][1][2:])
        if self.extra == "compares":
            self.norm_is_zero = torch.equal(self.norm, torch.zeros(4))
        if self.extra == "casts":
            self.norm.copy_(dict(self.named_parameters())["norm"] * 1.0)
        return {"qv", "embed", "norm"}


def weights(seed: int) -> list[tuple[str, Tensor]]:
    """Parts of one piece of memory, as those that come over CUDA IPC are."""
    memory = torch.randn(64, generator=torch.Generator().manual_seed(seed))
    shapes = {"q": (4, 4), "v": (2, 4), "embed": (7, 4), "norm": (4,)}
    pairs, start = [], 3
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        pairs.append((name, memory[start : start + size].view(shape)))
        start += size
    return pairs


def update(copies: Copies, model: Served, staged: list[tuple[str, Tensor]]) -> bool:
    """Whether the recorded copies did it."""
    if copies.repeat(model, staged):
        return True
    copies.record(model, staged, lambda: model.load_weights(iter(staged)))
    return False


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def test_later_updates_are_those_of_the_loader_without_asking_it() -> None:
    copies, model, other = Copies(), Served(), Served()
    assert not update(copies, model, weights(0))
    for seed in (1, 2):
        assert update(copies, model, weights(seed))
        other.load_weights(weights(seed))
        assert all(map(torch.equal, values(model), values(other)))
    assert model.loads == 1


@pytest.mark.parametrize(
    "extra",
    [
        *("adds", "casts", "reads", "fills with a tensor"),
        *("fills what it copied", "copies twice", "compares"),
    ],
)
def test_a_loader_that_does_more_than_copy_once_is_asked_every_time(extra: str) -> None:
    copies, model = Copies(), Served()
    model.extra = extra
    assert not any(update(copies, model, weights(seed)) for seed in range(3))
    assert model.loads == 3


def test_a_parameter_that_is_left_out_is_never_taken_for_written() -> None:
    copies, model = Copies(), Served()
    assert not any(update(copies, model, weights(seed)[:-1]) for seed in range(2))


def test_a_tensor_that_is_not_read_may_only_be_a_tied_head() -> None:
    for name, repeated in (("unused", False), ("model.lm_head.weight", True)):
        copies, model = Copies(), Served()
        staged = [[*weights(seed), (name, torch.ones(2))] for seed in range(2)]
        assert [update(copies, model, pairs) for pairs in staged] == [False, repeated]


def test_a_tensor_that_is_read_in_part_is_loaded_every_time() -> None:
    copies, model = Copies(), Served()

    @torch.no_grad()
    def load(pairs: list[tuple[str, Tensor]]) -> None:
        model.load_weights(pairs[:-1])
        model.norm.copy_(pairs[-1][1][:4])

    for seed in range(2):
        staged = [*weights(seed)[:-1], ("norm", torch.ones(6))]
        assert not copies.repeat(model, staged)
        copies.record(model, staged, lambda staged=staged: load(staged))  # type: ignore[misc]


def test_other_tensors_or_a_model_that_was_rebuilt_are_recorded_anew() -> None:
    copies, model = Copies(), Served()
    update(copies, model, weights(0))
    assert not update(
        copies, model, [(n, t.t().contiguous().t()) for n, t in weights(1)[:2]] + weights(1)[2:]
    )
    assert not update(copies, model, weights(2))
    model.norm = nn.Parameter(torch.zeros(4))
    assert not update(copies, model, weights(3))
    assert torch.equal(model.norm, dict(weights(3))["norm"])
    assert update(copies, model, weights(4))
    assert torch.equal(model.norm, dict(weights(4))["norm"])
