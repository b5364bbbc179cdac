"""What a new trainer tries its model on: which rows, and what is seen in them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ludic.errors import ConfigError
from ludic.inference.tiny import tiny_model
from ludic.training import CompositeLoss, ConstantCredit, EntropyBonus, RLAlgorithm, Trainer
from ludic.training.types import Scope
from ludic.training.update import checks
from ludic.training.update.checks import check_loss, check_packing, check_split
from ludic.training.update.packing import MicroBatch
from ludic.training.update.policy import Policy

CPU = torch.device("cpu")


def tried(policy: Policy, monkeypatch: pytest.MonkeyPatch, longest: int = 2048) -> list[MicroBatch]:
    """The micro-batches that are scored to find out whether rows can be packed."""
    micros: list[MicroBatch] = []
    score = policy.score

    def noting(micro: MicroBatch, *args: Any, **kwargs: Any) -> Any:
        micros.append(micro)
        return score(micro, *args, **kwargs)

    monkeypatch.setattr(policy, "score", noting)
    check_packing(policy, CPU, longest)
    monkeypatch.undo()
    return micros


def rows(micro: MicroBatch) -> list[Tensor]:
    return list(torch.split(micro.input_ids, list(micro.lengths)))


def test_two_rows_are_tried_together_alone_and_beside_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = Policy(tiny_model())
    packed, shifted, first, second, longer, *_ = map(rows, tried(policy, monkeypatch))
    assert [*map(len, packed)] == [15, 20]
    assert torch.equal(torch.cat(packed), torch.cat([*first, *second]))
    assert torch.equal(shifted[1], packed[1])
    assert bool((shifted[0] != packed[0]).all())
    assert [*map(len, longer)] == [20]
    assert torch.equal(longer[0][:15], first[0])
    assert policy.packs
    assert policy.shares


def test_rows_that_share_differ_in_their_ends_and_one_of_them_comes_last_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    *_, whole, shared, beside_another = tried(Policy(tiny_model()), monkeypatch)
    one, last = rows(whole)
    assert torch.equal(one[:15], last[:15])
    assert bool((one[15:] != last[15:]).all())
    assert shared.lengths == beside_another.lengths == (20, 5)
    assert [*map(len, rows(whole))] == [20, 20]
    assert torch.equal(torch.cat(rows(shared)), torch.cat([one, last[15:]]))
    another, again = rows(beside_another)
    assert torch.equal(again, last[15:])
    assert torch.equal(another[:15], one[:15])
    assert bool((another[16:] != one[16:]).all())
    assert bool((another[15:] != last[15:]).all())


def test_one_log_prob_that_another_rows_end_changes_is_enough_to_share_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy, shared = Policy(tiny_model()), list[MicroBatch]()
    score = policy.score

    def leaking(micro: MicroBatch, *args: Any, **kwargs: Any) -> Any:
        scored = score(micro, *args, **kwargs)
        if micro.lengths == (20, 5):
            shared.append(micro)
            scored.logprobs[19] += float(len(shared) == 2)  # the first of the second row
        return scored

    monkeypatch.setattr(policy, "score", leaking)
    check_packing(policy, CPU)
    assert len(shared) == 2
    assert policy.packs
    assert not policy.shares


@pytest.mark.parametrize(
    ("window", "longest", "lengths"),
    [
        (30, 2048, (15, 34)),
        (30, 34, (15, 34)),
        (30, 33, (15, 20)),
        (None, 16, (15, 16)),
        (None, 15, (14, 15)),
        (None, 3, (2, 3)),
    ],
)
def test_the_second_row_reaches_past_the_window_where_rows_get_that_long(
    window: int | None,
    longest: int,
    lengths: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = Policy(tiny_model())
    monkeypatch.setattr(checks, "_windows", lambda _: [window] if window else [])
    assert tried(policy, monkeypatch, longest)[0].lengths == lengths
    assert policy.packs


def test_rows_of_two_tokens_at_most_are_not_tried_and_not_packed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = Policy(tiny_model())
    assert tried(policy, monkeypatch, 2) == []
    assert not policy.packs


def test_a_head_of_zeros_is_split_like_any_other() -> None:
    model = tiny_model(layers=1)
    head: Any = model.get_output_embeddings()
    head.weight = nn.Parameter(torch.zeros_like(head.weight))
    check_split(model, CPU)


def test_a_token_that_is_seen_by_the_one_before_it_is_enough_to_refuse_a_model() -> None:
    model = tiny_model(layers=1)
    embeddings: Any = model.get_input_embeddings()
    embeddings.register_forward_hook(lambda _module, _inputs, out: out + 0.5 * out.roll(-1, 1))
    with pytest.raises(ConfigError, match="no causal language model"):
        check_split(model, CPU)


class WithHead(nn.Module):
    """A loss with a layer of its own."""

    needs_logits = False
    scope: Scope = "token"

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 1)

    def compute(self, policy: Any, batch: Any) -> Any:
        raise AssertionError("it is never asked")


class Holding:
    """A loss that is no module, but holds one."""

    needs_logits = False
    scope: Scope = "token"

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    compute = WithHead.compute


def test_a_loss_with_parameters_that_nothing_would_train_is_refused() -> None:
    model = tiny_model()
    for loss in (WithHead(), CompositeLoss((1.0, WithHead()), (0.1, EntropyBonus()))):
        with pytest.raises(ConfigError, match=r"WithHead has the parameters \['head.weight'"):
            check_loss(loss, model)
    with pytest.raises(ConfigError, match=r"Holding has the parameters \['weight', 'bias'\]"):
        check_loss(Holding(nn.Linear(2, 1)), model)
    with pytest.raises(ConfigError) as refused:
        check_loss(Holding(tiny_model()), model)
    assert len(str(refused.value)) < 400, "not the names of a whole model"
    check_loss(WithHead().requires_grad_(False), model)
    check_loss(Holding(model), model)
    check_loss(EntropyBonus(), model)


def test_a_trainer_refuses_a_loss_that_it_would_not_train() -> None:
    algo = RLAlgorithm("own", ConstantCredit(), WithHead())
    with pytest.raises(ConfigError, match="the trainer trains only the model's"):
        Trainer(model=tiny_model(), algo=algo, batch_source=None)
