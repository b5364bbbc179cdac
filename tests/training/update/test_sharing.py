"""Tokens that several rows begin with are computed once, and nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor, nn

from ludic.inference.tiny import tiny_model
from ludic.saw.batch import make_batch
from ludic.saw.items import SAWBatch, SAWItem
from ludic.sharding.world import World
from ludic.training.algorithms.grpo import make_grpo
from ludic.training.batching.scoring import LocalScores
from ludic.training.config import TrainerConfig
from ludic.training.metrics.stats import StatBuffer
from ludic.training.update.checks import check_packing
from ludic.training.update.optimizer import MasterAdamW
from ludic.training.update.packing import LEAST, MicroBatch, RowOrder, gather, lay_out, pack
from ludic.training.update.passes import Passes
from ludic.training.update.planning import Cost, plan_micro_batches, workload
from ludic.training.update.policy import Policy
from tools.families import tiny

CPU = torch.device("cpu")
FAMILIES = ("gpt2", "llama", "qwen2", "qwen3", "gemma3_text")
"""The first is in float64 throughout; the last has layers with a window of eight tokens."""


def item(ids: Sequence[int], actions: Sequence[int], number: int = 0) -> SAWItem:
    mask = np.zeros(len(ids), np.int8)
    mask[list(actions)] = 1
    return SAWItem(
        np.array(ids, np.int64),
        np.ones(len(ids), np.int8),
        mask,
        1.0 + 0.5 * number,
        rollout_id=f"r{number}",
        temperature=0.7 if number % 2 else 1.0,
    )


def groups(seed: int, members: Sequence[int], prompt: int = 13, completion: int = 4) -> SAWBatch:
    """Groups whose members share a prompt; completions of one to `completion` tokens."""
    rng, items = np.random.default_rng(seed), list[SAWItem]()
    for count in members:
        start = rng.integers(3, 96, prompt + int(rng.integers(3))).tolist()
        for _ in range(count):
            end = rng.integers(3, 96, 1 + int(rng.integers(completion))).tolist()
            actions = range(len(start), len(start) + len(end))
            items.append(item(start + end, actions, len(items)))
    return make_batch(items)


@cache
def policy(name: str) -> Policy:
    return Policy(tiny(name).double())


def scored(
    policy: Policy, batch: SAWBatch, *, share: bool, split: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs and entropies by item, and the gradient of a sum of both."""
    layout = lay_out(batch)
    policy.zero_grad()
    logprobs, entropies = [], []
    for members in np.array_split(np.arange(len(batch.items)), split):
        found = policy.score(pack(layout, members.tolist(), share=share), entropy=True)
        assert found.entropy is not None
        weights = torch.linspace(-1, 2, len(found.logprobs), dtype=torch.float64)
        (found.logprobs * weights + 0.3 * found.entropy).sum().backward()  # type: ignore[no-untyped-call]
        logprobs.append(found.logprobs.detach())
        entropies.append(found.entropy.detach())
    gradient = [p.grad.flatten() for p in policy.parameters() if p.grad is not None]
    return torch.cat(logprobs), torch.cat(entropies), torch.cat(gradient)


def assert_nothing_changes(policy: Policy, batch: SAWBatch, gradient: float = 1e-6) -> None:
    """Most families' norms are float32 in any model, and round the sums of gradients there."""
    shared, whole = (scored(policy, batch, share=share) for share in (True, False))
    for a, b in zip(shared[:2], whole[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    scale = float(whole[2].abs().max())
    assert scale > 1e-3
    torch.testing.assert_close(shared[2], whole[2], rtol=0, atol=gradient * scale)


@pytest.mark.parametrize("name", FAMILIES)
def test_log_probs_entropies_and_gradients_are_those_of_rows_computed_whole(name: str) -> None:
    batch = groups(0, (5, 1, 3))
    micro = pack(lay_out(batch), range(9), share=True)
    assert len(micro.input_ids) < sum(len(i.input_ids) for i in batch.items) / 2
    assert_nothing_changes(policy(name), batch, 1e-12 if name == "gpt2" else 1e-6)


@pytest.mark.parametrize("name", FAMILIES)
def test_log_probs_are_those_of_the_model_itself(name: str) -> None:
    model, batch = tiny(name).double(), groups(1, (3, 2))
    expected = []
    for row in batch.items:
        logits = model(torch.from_numpy(row.input_ids)[None]).logits[0] / row.temperature
        where = np.flatnonzero(row.action_mask)
        logp = logits.log_softmax(1)[where - 1]
        expected.append(logp.gather(1, torch.from_numpy(row.input_ids[where])[:, None])[:, 0])
    found = Policy(model).score(pack(lay_out(batch), range(5), share=True))
    torch.testing.assert_close(found.logprobs, torch.cat(expected), rtol=1e-6, atol=1e-7)


tokens = st.integers(3, 5)
"""So few that rows begin alike to every length."""


@settings(deadline=None, max_examples=25)
@given(
    rows=st.lists(st.lists(tokens, min_size=2, max_size=20), min_size=1, max_size=8), data=st.data()
)
def test_any_rows_give_the_same_however_they_begin(
    rows: list[list[int]], data: st.DataObject
) -> None:
    items = []
    for number, ids in enumerate(rows):
        some = st.lists(st.integers(1, len(ids) - 1), min_size=1, unique=True)
        items.append(item(ids, data.draw(some), number))
    assert_nothing_changes(policy("gemma3_text"), make_batch(items))


def test_a_row_is_where_its_tokens_are() -> None:
    """The packed row holds each distinct beginning once; the places of a row spell it."""
    rows = [[1, 2, 3, 4, 5], [1, 2, 3, 9], [7, 8], [1, 2, 3, 4, 5], [1, 2, 6], [1, 2, 3, 4]]
    layout = lay_out(make_batch([item(ids, [len(ids) - 1], n) for n, ids in enumerate(rows)]))
    micro = pack(layout, range(len(rows)), share=True)
    assert micro.keys is not None
    assert len(micro.input_ids) == len(
        {tuple(ids[: n + 1]) for ids in rows for n in range(len(ids))}
    )
    spelt = torch.split(micro.input_ids[micro.keys.places], list(micro.keys.lengths))
    assert sorted(row.tolist() for row in spelt) == sorted(map(list, {tuple(ids) for ids in rows}))
    where = torch.split(micro.position_ids[micro.keys.places], list(micro.keys.lengths))
    assert all(row.tolist() == list(range(len(row))) for row in where)
    assert micro.cu_seqlens.diff().tolist() == list(micro.lengths)
    assert micro.target_ids.tolist() == [5, 9, 8, 5, 6, 4]
    assert micro.input_ids[micro.action_positions].tolist() == [4, 3, 7, 4, 2, 3]


def test_rows_of_several_turns_share_what_none_of_them_or_all_of_them_train_on() -> None:
    same = list(range(3, 20))
    rows = [
        item([*same, 30, 31, 40], [10, 11, 19], 0),  # what the others have as state
        item([*same, 30, 31, 41, 42], [17, 18, 20], 1),
        item([*same, 50], [17], 2),
    ]
    assert_nothing_changes(policy("llama"), make_batch(rows))
    assert len(pack(lay_out(make_batch(rows)), range(3), share=True).input_ids) == 17 + 3 + 2 + 1


def test_equal_rows_are_computed_once_and_each_counts() -> None:
    rows = [item([5, 6, 7, 8], [2, 3], number) for number in range(3)]
    micro = pack(lay_out(make_batch(rows)), range(3), share=True)
    assert micro.input_ids.tolist() == [5, 6, 7, 8]
    assert micro.lengths == (4,)
    assert len(micro.target_ids) == 6
    assert_nothing_changes(policy("qwen2"), make_batch(rows))


def test_rows_that_share_little_or_nothing_are_packed_as_ever() -> None:
    long = [item([1, *range(3, 3 + LEAST), n], [LEAST + 1], n) for n in (50, 60)]
    begun = [item([1, n, *range(n, n + LEAST)], [LEAST], n) for n in (60, 50)]
    for rows, shares in ((long, True), (begun, False)):
        layout = lay_out(make_batch(rows))
        micro, plain = (pack(layout, range(2), share=share) for share in (True, False))
        assert (micro.keys is not None) is shares
        assert torch.equal(micro.input_ids, plain.input_ids) is not shares


def test_the_order_of_tokens_puts_rows_that_begin_alike_side_by_side() -> None:
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 3, int(rng.integers(1, 12))) for _ in range(40)]
    order = RowOrder.of(rows)
    by_rank = sorted(range(40), key=order.ranks.__getitem__)
    assert [rows[i].tolist() for i in by_rank] == sorted(row.tolist() for row in rows)
    for row, shared in order.arrange(range(40)):
        others = [o for o in range(40) if order.ranks[o] < order.ranks[row]]
        most = max((_common(rows[o], rows[row]) for o in others), default=0)
        assert shared == (most if LEAST * most >= rows[row].size else 0)


def _common(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> int:
    return next(
        (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def test_gradients_of_one_place_are_added_up_in_float32() -> None:
    values = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    found = gather(values, torch.zeros(1000, dtype=torch.long))
    assert found.dtype == torch.bfloat16
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert values.grad is not None
    assert values.grad.item() == 1000  # 1 + 1 + ... in bfloat16 ends at 256


def test_recomputing_activations_changes_nothing() -> None:
    batch = groups(2, (4,))
    recomputing = Policy(tiny("llama").double(), TrainerConfig(gradient_checkpointing=True))
    assert_nothing_changes(recomputing, batch)
    for a, b in zip(
        scored(recomputing, batch, share=True),
        scored(policy("llama"), batch, share=True),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_an_adapter_learns_the_same() -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(tiny("llama").double(), LoraConfig(r=2, init_lora_weights=False))
    assert_nothing_changes(Policy(model.eval()), groups(3, (3, 3)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*FAMILIES, "mixtral", "deepseek_v3"])
def test_families_that_pack_share_in_every_type(name: str, dtype: torch.dtype) -> None:
    policy = Policy(tiny(name).to(dtype))
    check_packing(policy, CPU)
    assert policy.packs
    assert policy.shares


def test_a_model_that_sharing_changes_shares_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def count_by_boundaries(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        lengths = kwargs["cu_seq_lens_q"].diff().tolist() if "cu_seq_lens_q" in kwargs else []
        own = [torch.arange(length) for length in lengths]
        return args, kwargs | ({"position_ids": torch.cat(own)[None]} if own else {})

    model: Any = tiny("llama")
    model.model.register_forward_pre_hook(count_by_boundaries, with_kwargs=True)
    policy = Policy(model)
    with caplog.at_level("INFO", "ludic.training"):
        check_packing(policy, CPU)
    assert policy.packs
    assert not policy.shares
    assert "computed for each: sharing changes their log-probs by" in caplog.text


def test_under_dropout_every_row_is_computed_whole() -> None:
    model = tiny_model()
    policy = Policy(model)
    assert policy.shares
    model.train()
    model.model.layers[0].self_attn.attention_dropout = 0.1
    assert not policy.shares
    model.eval()
    assert policy.shares


def test_rows_that_are_computed_one_at_a_time_share_nothing() -> None:
    policy = Policy(tiny_model())
    policy.one_at_a_time("a test")
    assert not policy.shares
    with pytest.raises(ValueError, match="one at a time cannot share"):
        policy.score(pack(lay_out(groups(5, (2,))), range(2), share=True))


def passes(budget: int, model: nn.Module | None = None) -> Passes:
    cfg = TrainerConfig(micro_token_budget=budget, max_seq_len=min(budget, 64), learning_rate=1e-3)
    return Passes(Policy(model or tiny_model()), make_grpo(group_size=4).loss, cfg, World(), Cost())


def test_the_trainers_passes_share_and_scores_are_the_same() -> None:
    batch = groups(6, (4, 4))
    layout, ours = lay_out(batch), passes(64, tiny_model().double())
    shared = ours.score(batch)
    plan = ours.plan(layout)[0]
    ours.policy.sharing = False
    whole = ours.score(batch)
    assert len(plan) < len(ours.plan(layout)[0])
    for a, b in zip(shared, whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


async def test_a_references_passes_share(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, seen = groups(7, (6,)), list[int]()
    scores = LocalScores(tiny_model())
    real = scores.policy.score

    def score(micro: MicroBatch, **kwargs: Any) -> Any:
        seen.append(len(micro.input_ids))
        return real(micro, **kwargs)

    monkeypatch.setattr(scores.policy, "score", score)
    shared = await scores.logprobs(batch.items)
    scores.policy.sharing = False
    whole = await scores.logprobs(batch.items)
    assert seen[0] < seen[1] / 2
    for a, b in zip(shared, whole, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_what_was_computed_is_what_the_passes_report() -> None:
    batch = groups(8, (4, 4))
    ours = passes(1000)
    work = []
    for sharing in (True, False):
        ours.policy.sharing = sharing
        optimizer = MasterAdamW(ours.policy.model.named_parameters(), ours.cfg)
        work.append(
            ours.accumulate(
                lay_out(_with_behavior(batch)), optimizer, StatBuffer(), version=0, proximal=None
            )
        )
    lengths = [len(i.input_ids) for i in batch.items]
    assert work[1].tokens == sum(lengths)
    assert work[1].pairs == sum(n * n for n in lengths)
    assert work[0].tokens == len(pack(lay_out(batch), range(8), share=True).input_ids)
    assert work[0].pairs < work[1].pairs / 2


def _with_behavior(batch: SAWBatch) -> SAWBatch:
    items = [
        replace(
            i,
            attachments=replace(
                i.attachments, behavior_logprobs=np.full(int(i.action_mask.sum()), -4.0, np.float32)
            ),
        )
        for i in batch.items
    ]
    return make_batch(items)


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 10_000),
    members=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    budget=st.integers(30, 120),
    world=st.integers(1, 4),
    scope=st.sampled_from(["token", "turn", "rollout"]),
)
def test_a_plan_that_shares_covers_every_item_once_within_the_budget(
    seed: int, members: list[int], budget: int, world: int, scope: str
) -> None:
    layout, cost = lay_out(groups(seed, members)), Cost(0.01)
    plan = plan_micro_batches(
        layout,
        micro_token_budget=budget,
        scope=scope,  # type: ignore[arg-type]
        cost=cost,
        world_size=world,
        shares=True,
    )
    assert len({len(rank) for rank in plan}) == 1
    assert sorted(i for rank in plan for m in rank for i in m) == list(range(sum(members)))
    for micro in (m for rank in plan for m in rank if m):
        assert workload(layout, micro, cost, shares=True).size <= budget


def test_members_of_a_group_stay_together_where_that_costs_nothing() -> None:
    layout = lay_out(groups(0, (8,) * 8, prompt=60, completion=1))
    assert layout.items[8].input_ids[0] != layout.items[0].input_ids[0]
    shared = {frozenset(range(8 * g, 8 * g + 8)) for g in range(8)}
    for world in (1, 2, 4, 8):
        plan = plan_micro_batches(layout, micro_token_budget=150, world_size=world, shares=True)
        for micro in (frozenset(m) for rank in plan for m in rank):
            assert all(group <= micro or not group & micro for group in shared)


def test_ranks_do_not_wait_for_one_that_got_a_whole_group() -> None:
    layout = lay_out(groups(0, (16,), prompt=10, completion=30))
    plan = plan_micro_batches(layout, micro_token_budget=4000, world_size=4, shares=True)
    loads = [sum(workload(layout, m, Cost(), shares=True).cost for m in rank) for rank in plan]
    assert max(loads) < 1.3 * min(loads)
