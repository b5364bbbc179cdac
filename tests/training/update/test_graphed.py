"""Passes on buffers of fixed sizes: padding changes no value and no gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ludic.inference.tiny import tiny_model
from ludic.saw.batch import make_batch
from ludic.saw.items import SAWBatch, SAWItem
from ludic.training.update import graphed as graphed_module
from ludic.training.update.graphed import PassGraphs, Sizes, pad
from ludic.training.update.packing import MicroBatch, lay_out, pack
from ludic.training.update.policy import Policy


def groups(prompts: Sequence[int], members: int, seed: int = 0) -> SAWBatch:
    """Rows that begin alike, group by group."""
    rng, items = np.random.default_rng(seed), []
    for prompt in prompts:
        start = rng.integers(3, 250, prompt)
        for _ in range(members):
            ids = np.concatenate([start, rng.integers(3, 250, int(rng.integers(1, 9)))])
            mask = np.zeros(len(ids), np.int8)
            mask[prompt:] = 1
            items.append(SAWItem(ids, np.ones(len(ids), np.int8), mask, 1.0))
    return make_batch(items)


def packed(prompts: Sequence[int], *, share: bool, members: int = 4, seed: int = 0) -> MicroBatch:
    batch = groups(prompts, members, seed)
    return pack(lay_out(batch), range(len(batch.items)), share=share)


def double_policy() -> Policy:
    return Policy(tiny_model(layers=2).double())


def gradients(policy: Policy) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


def weighted(logprobs: torch.Tensor, entropies: torch.Tensor | None) -> torch.Tensor:
    assert entropies is not None
    weights = torch.linspace(-1, 2, len(logprobs), dtype=logprobs.dtype)
    return (logprobs * weights).sum() + 0.3 * entropies.sum()


def graphed(policy: Policy) -> PassGraphs:
    """The policy's passes on fixed buffers, without graphs, which a CPU does not have."""
    graphs = PassGraphs(policy._logprobs_and_entropies, policy.model, 2, capture=False)
    policy.graphs = graphs
    return graphs


@pytest.mark.parametrize("share", [True, False])
def test_padding_changes_neither_values_nor_gradients(share: bool) -> None:
    policy = double_policy()
    micro = packed((20, 33, 7), share=share)
    plain = policy.score(micro, entropy=True)
    weighted(plain.logprobs, plain.entropy).backward()  # type: ignore[no-untyped-call]
    expected = gradients(policy)
    policy.zero_grad()

    sizes = Sizes.of(micro).rounded_up()
    assert sizes is not None
    assert sizes.tokens > len(micro.input_ids)
    padded = policy.score(pad(micro, sizes), entropy=True)
    actions = len(micro.target_ids)
    assert padded.entropy is not None
    assert len(padded.logprobs) == sizes.actions
    torch.testing.assert_close(padded.logprobs[:actions], plain.logprobs, rtol=1e-12, atol=1e-12)
    weighted(padded.logprobs[:actions], padded.entropy[:actions]).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(gradients(policy), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("share", [True, False])
def test_passes_on_fixed_buffers_add_the_same_gradients_micro_batch_by_micro_batch(
    share: bool,
) -> None:
    policy = double_policy()
    micros = [packed((20, 33, 7), share=share, seed=s) for s in range(3)]
    for micro in micros:
        scored = policy.score(micro, entropy=True)
        weighted(scored.logprobs, scored.entropy).backward()  # type: ignore[no-untyped-call]
    expected = gradients(policy)
    policy.zero_grad()

    graphs = graphed(policy)
    for number, micro in enumerate(micros):
        scored = policy.score(micro, entropy=True)
        assert graphs.serial == number + 1
        weighted(scored.logprobs, scored.entropy).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(gradients(policy), expected, rtol=1e-9, atol=1e-12)
    assert len(graphs.passes) < len(micros), "sizes that are alike share a graph"


def test_a_loss_without_entropy_gets_nothing_of_the_entropy_gradient_before_it() -> None:
    policy = double_policy()
    micro = packed((20, 33), share=True)
    policy.score(micro, entropy=True).logprobs.sum().backward()  # type: ignore[no-untyped-call]
    expected = gradients(policy)
    graphed(policy)
    for with_entropy in (True, False):
        policy.zero_grad()
        scored = policy.score(micro, entropy=True)
        loss = scored.logprobs.sum()
        if with_entropy:
            assert scored.entropy is not None
            loss = loss + 3 * scored.entropy.sum()
        loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(gradients(policy), expected, rtol=1e-9, atol=1e-12)


def test_a_loss_of_entropies_alone_gets_nothing_of_the_log_probs_gradient_before_it() -> None:
    policy = double_policy()
    micro = packed((20, 33), share=True)
    plain = policy.score(micro, entropy=True).entropy
    assert plain is not None
    plain.sum().backward()  # type: ignore[no-untyped-call]
    expected = gradients(policy)
    graphed(policy)
    policy.zero_grad()
    policy.score(micro, entropy=True).logprobs.sum().backward()  # type: ignore[no-untyped-call]
    policy.zero_grad()
    entropies = policy.score(micro, entropy=True).entropy
    assert entropies is not None
    entropies.sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(gradients(policy), expected, rtol=1e-9, atol=1e-12)


class Replayed:
    """A graph's stand-in on a CPU: runs what was captured."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work, self.replays = work, 0

    def replay(self) -> None:
        self.replays += 1
        self.work()


def capturing(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, failures: int
) -> tuple[PassGraphs, list[bool]]:
    """Passes whose first captures fail; every attempt says whether it did not."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None, raising=False)
    monkeypatch.setattr(graphed_module, "_PAUSE", 3)
    graphs = PassGraphs(policy._logprobs_and_entropies, policy.model, 2, capture=True)
    monkeypatch.setattr(graphs, "allocated", lambda: 100)
    monkeypatch.setattr(graphs, "peak", lambda: 100)
    monkeypatch.setattr(graphs, "free_memory", lambda: 2**40)
    policy.graphs = graphs
    attempts: list[bool] = []

    def captured(self: Any) -> Any:
        attempts.append(len(attempts) >= failures)
        if not attempts[-1]:
            raise RuntimeError("the stream was busy")
        return Replayed(self._forward), Replayed(self._backward)

    monkeypatch.setattr(graphed_module._Pass, "_captured", captured)
    # A CPU's attention asks for every length.
    monkeypatch.setattr(graphed_module._Pass, "_fixed", lambda self, padded: padded)
    return graphs, attempts


def run(policy: Policy, micro: MicroBatch) -> None:
    policy.zero_grad()
    scored = policy.score(micro, entropy=True)
    weighted(scored.logprobs, scored.entropy).backward()  # type: ignore[no-untyped-call]


def test_a_capture_that_failed_is_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, micro = double_policy(), packed((20, 33), share=True)
    run(policy, micro)
    expected = gradients(policy)
    graphs, attempts = capturing(policy, monkeypatch, failures=2)
    counts = []
    for _ in range(14):
        run(policy, micro)
        torch.testing.assert_close(gradients(policy), expected, rtol=1e-9, atol=1e-12)
        counts.append(len(attempts))
    # Launched first, then tried: after three passes again, after six more once more.
    assert counts == [0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 3, 3]
    assert attempts == [False, False, True]
    (known,) = graphs.passes.values()
    assert known.graphs is not None
    assert graphs._failures == 0


def test_captures_that_always_fail_are_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    policy, micro = double_policy(), packed((20, 33), share=True)
    graphs, attempts = capturing(policy, monkeypatch, failures=99)
    for _ in range(30):
        run(policy, micro)
    assert attempts == [False] * 3
    assert not graphs.passes
    assert "cannot be captured" in caplog.text


def test_a_capture_has_to_fit_beside_what_the_launched_pass_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy, micro = double_policy(), packed((20, 33), share=True)
    graphs, attempts = capturing(policy, monkeypatch, failures=0)
    monkeypatch.setattr(graphs, "peak", lambda: 100 + 2**33)
    monkeypatch.setattr(graphs, "free_memory", lambda: 2**33)
    run(policy, micro)
    # As the trainer does after a step, with nothing in use beside what stays.
    monkeypatch.setattr(graphs, "peak", lambda: 100)
    run(policy, micro)
    assert attempts == []
    monkeypatch.setattr(graphs, "free_memory", lambda: 2**34)
    for _ in range(4):
        run(policy, micro)
    assert attempts == [True]


def test_what_was_in_use_before_a_pass_needs_no_room_in_its_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy, micro = double_policy(), packed((20, 33), share=True)
    graphs, attempts = capturing(policy, monkeypatch, failures=0)
    for name in ("allocated", "peak", "free_memory"):
        monkeypatch.setattr(graphs, name, lambda: 2**33)
    for _ in range(2):
        run(policy, micro)
    assert attempts == [True]


@pytest.mark.parametrize("share", [True, False])
def test_the_kernels_of_a_graph_are_told_the_longest_row_that_it_has_room_for(share: bool) -> None:
    policy, micro = double_policy(), packed((20, 33), share=share)
    graphs = graphed(policy)
    policy.score(micro, entropy=True)
    (known,) = graphs.passes.values()
    fixed = known._fixed(pad(micro, known.sizes))
    assert fixed.lengths == (known.sizes.longest,)
    assert (fixed.keys is not None) is share
    assert fixed.keys is None or fixed.keys.lengths == (known.sizes.most_keys,)


def test_a_backward_pass_whose_memory_was_taken_by_another_pass_raises() -> None:
    policy = double_policy()
    graphed(policy)
    micro = packed((20, 33), share=True)
    first = policy.score(micro, entropy=True)
    policy.score(micro, entropy=True)
    with pytest.raises(RuntimeError, match="another forward pass"):
        weighted(first.logprobs, first.entropy).backward()  # type: ignore[no-untyped-call]


def test_hooks_logits_and_scoring_without_gradients_are_not_replayed() -> None:
    policy = double_policy()
    graphs = graphed(policy)
    micro = packed((20, 33), share=True)
    with torch.no_grad():
        policy.score(micro, entropy=True)
    policy.score(micro, logits=True)
    called = []
    handle = policy.model.get_input_embeddings().register_forward_hook(  # type: ignore[operator]
        lambda *_: called.append(1)
    )
    policy.score(micro, entropy=True)
    assert called
    handle.remove()
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        handle = getattr(next(policy.parameters()), register)(lambda *_: None)
        policy.score(micro, entropy=True)
        handle.remove()
    assert graphs.serial == 0
    policy.score(micro, entropy=True)
    assert graphs.serial == 1


def test_weights_that_moved_make_every_pass_new() -> None:
    policy = double_policy()
    graphs = graphed(policy)
    micro = packed((20, 33), share=True)
    policy.score(micro, entropy=True)
    before = list(graphs.passes.values())
    weight = next(policy.model.parameters())
    weight.data = weight.data.clone()
    policy.score(micro, entropy=True)
    assert list(graphs.passes.values()) != before


def test_a_parameter_without_a_part_in_the_pass_gets_no_gradient_and_a_frozen_one_neither() -> None:
    policy = double_policy()
    graphs = graphed(policy)
    policy.model.register_parameter("idle", torch.nn.Parameter(torch.ones(3).double()))
    first, second, *_ = [p for n, p in policy.model.named_parameters() if "layernorm" in n]
    for frozen, trained in ((first, second), (second, first)):  # as many, but others
        frozen.requires_grad_(False)
        trained.requires_grad_(True)
        policy.zero_grad()
        scored = policy.score(packed((20, 33), share=True), entropy=True)
        weighted(scored.logprobs, scored.entropy).backward()  # type: ignore[no-untyped-call]
        assert trained.grad is not None
        assert trained.grad.abs().sum() > 0
        assert frozen.grad is None
        assert policy.model.idle.grad is None
    assert graphs.serial == 2


def test_a_model_without_anything_to_train_is_left_to_the_caller() -> None:
    policy = double_policy()
    graphs = graphed(policy)
    policy.requires_grad_(False)
    policy.score(packed((20, 33), share=True), entropy=True)
    assert graphs.serial == 0


def test_large_micro_batches_and_truncated_sampling_are_left_to_the_caller() -> None:
    policy = double_policy()
    graphs = graphed(policy)
    graphs.most_tokens = 30
    policy.score(packed((20, 33), share=True), entropy=True)
    assert graphs.serial == 0


@given(data=st.data())
def test_rounded_up_sizes_fit_what_they_were_made_for(data: st.DataObject) -> None:
    whole = data.draw(st.lists(st.integers(1, 700), min_size=1, max_size=600))
    own = [data.draw(st.integers(1, n)) for n in whole[:20]] + whole[20:]
    shares = own != whole
    sizes = Sizes(
        sum(own),
        len(own),
        data.draw(st.integers(1, 5000)),
        max(own),
        sum(whole) if shares else 0,
        max(whole) if shares else 0,
    )
    rounded = sizes.rounded_up()
    if rounded is None:  # rare, and then the pass is launched
        return
    rows, tokens, keys = rounded.padding(sizes) or (0, 0, 0)
    assert sizes.tokens + tokens == rounded.tokens
    assert sizes.sequences + rows == rounded.sequences
    assert keys in (0, rounded.keys - sizes.keys)
    assert rounded.tokens <= 1.25 * (sizes.tokens + rounded.sequences) + 16
