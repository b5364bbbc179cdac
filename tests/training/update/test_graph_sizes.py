"""The sizes of buffers that micro-batches are padded to, and the padding itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from ludic.inference.tiny import tiny_model
from ludic.saw.batch import make_batch
from ludic.saw.items import SAWItem
from ludic.training.update.graphed import PassGraphs, Sizes, pad
from ludic.training.update.packing import MicroBatch, lay_out, pack
from ludic.training.update.policy import Policy

OWN = Sizes(tokens=100, sequences=4, actions=40, longest=50, keys=0, most_keys=0)
SHARED = Sizes(tokens=60, sequences=4, actions=40, longest=30, keys=100, most_keys=40)


@pytest.mark.parametrize(
    ("inner", "outer", "padding"),
    [
        (OWN, OWN, (0, 0, 0)),
        (OWN, OWN._replace(actions=41), (0, 0, 0)),
        (OWN, OWN._replace(sequences=5, tokens=101), (1, 1, 0)),
        (OWN, OWN._replace(sequences=5, tokens=150), (1, 50, 0)),
        (OWN, OWN._replace(sequences=6, tokens=200), (2, 100, 0)),
        (OWN, OWN._replace(sequences=6, tokens=201), None),  # over the longest
        (OWN, OWN._replace(sequences=5), None),  # a sequence without a token
        (OWN, OWN._replace(sequences=6, tokens=101), None),
        (OWN, OWN._replace(tokens=101), None),  # a token without a sequence
        (OWN, OWN._replace(sequences=5, tokens=101, actions=39), None),
        (OWN, OWN._replace(sequences=5, tokens=101, longest=49), None),
        (OWN, OWN._replace(sequences=5, tokens=101, keys=101, most_keys=50), None),
        (SHARED, SHARED, (0, 0, 0)),
        (SHARED, SHARED._replace(keys=101), None),
        (SHARED, SHARED._replace(sequences=5, tokens=70, keys=110), (1, 10, 10)),
        (SHARED, SHARED._replace(sequences=5, tokens=70, keys=140), (1, 10, 40)),
        (SHARED, SHARED._replace(sequences=6, tokens=70, keys=180), (2, 10, 80)),
        (SHARED, SHARED._replace(sequences=5, tokens=70, keys=109), None),  # fewer than tokens
        (SHARED, SHARED._replace(sequences=5, tokens=70, keys=141), None),
        (SHARED, SHARED._replace(sequences=6, tokens=61, keys=110), None),
        (SHARED, SHARED._replace(sequences=5, tokens=70, keys=0, most_keys=40), None),
    ],
)
def test_padding_is_whole_sequences_of_a_token_and_its_keys_at_least(
    inner: Sizes, outer: Sizes, padding: tuple[int, int, int] | None
) -> None:
    assert outer.padding(inner) == padding


@pytest.mark.parametrize(
    ("sizes", "rounded"),
    [
        # Up to the next of a few sizes each, with a token for each sequence of padding.
        (Sizes(100, 3, 20, 50, 0, 0), Sizes(128, 16, 32, 128, 0, 0)),
        (Sizes(110, 3, 20, 50, 0, 0), Sizes(128, 16, 32, 128, 0, 0)),
        (Sizes(1, 1, 1, 1, 0, 0), Sizes(16, 16, 16, 128, 0, 0)),
        (Sizes(1000, 15, 256, 128, 0, 0), Sizes(1024, 16, 256, 128, 0, 0)),
        (Sizes(1000, 16, 257, 129, 0, 0), Sizes(1024, 32, 320, 256, 0, 0)),
        (Sizes(9000, 70, 3000, 300, 0, 0), Sizes(10240, 80, 3072, 384, 0, 0)),
        (Sizes(9200, 70, 3000, 120, 0, 0), Sizes(10240, 80, 3072, 128, 0, 0)),
        # More sequences of padding where the tokens or keys of fewer would be too long.
        (Sizes(8200, 79, 3000, 100, 0, 0), Sizes(10240, 96, 3072, 128, 0, 0)),
        (Sizes(1000, 79, 400, 50, 8200, 100), Sizes(1024, 96, 448, 128, 10240, 128)),
        (Sizes(60, 4, 40, 30, 100, 40), Sizes(80, 16, 48, 128, 128, 128)),
        (Sizes(600, 12, 400, 100, 6000, 600), Sizes(640, 16, 448, 128, 6144, 640)),
        (Sizes(2000, 15, 400, 600, 2010, 610), Sizes(2048, 16, 448, 640, 2560, 640)),
    ],
)
def test_sizes_are_rounded_up_to_few(sizes: Sizes, rounded: Sizes) -> None:
    assert sizes.rounded_up() == rounded


def test_a_graph_is_used_for_micro_batches_of_a_third_of_its_size_at_least() -> None:
    graph = Sizes(300, 8, 428, 128, 0, 0)
    for tokens, actions, close in ((100, 100, True), (99, 100, False), (100, 99, False)):
        assert graph.is_close_fit(OWN._replace(tokens=tokens, actions=actions)) is close


def micro_batch(*, share: bool) -> MicroBatch:
    """Two rows of 6 and 7 tokens that begin with the same 4; the last 2 and 3 are actions."""
    start, rows = [11, 12, 13, 14], ([21, 22], [31, 32, 33])
    items = []
    for end in rows:
        ids = np.array([*start, *end])
        mask = np.array([0] * 4 + [1] * len(end), np.int8)
        items.append(SAWItem(ids, np.ones(len(ids), np.int8), mask, 1.0))
    return pack(lay_out(make_batch(items)), (0, 1), share=share)


def test_padding_comes_behind_the_micro_batch_and_reads_as_tokens_and_actions_of_no_account() -> (
    None
):
    micro = micro_batch(share=False)
    assert Sizes.of(micro) == Sizes(13, 2, 5, 7, 0, 0)
    padded = pad(micro, Sizes(18, 4, 8, 7, 0, 0))
    assert Sizes.of(padded) == Sizes(18, 4, 8, 7, 0, 0)
    assert padded.input_ids.tolist() == [*micro.input_ids.tolist(), 0, 0, 0, 0, 0]
    assert padded.position_ids.tolist() == [*range(6), *range(7), 0, 0, 0, 0, 0]
    assert padded.lengths == (6, 7, 3, 2)
    assert padded.cu_seqlens.tolist() == [0, 6, 13, 16, 18]
    assert padded.action_positions.tolist() == [3, 4, 9, 10, 11, 0, 0, 0]
    assert padded.target_ids.tolist() == [21, 22, 31, 32, 33, 0, 0, 0]
    assert padded.temperatures.tolist() == [1.0] * 8
    assert padded.keys is None
    assert padded.loss is micro.loss


def test_padding_of_rows_that_share_tokens_sees_keys_of_padding_alone() -> None:
    micro = micro_batch(share=True)
    assert Sizes.of(micro) == Sizes(9, 2, 5, 6, 13, 7)
    padded = pad(micro, Sizes(12, 4, 5, 6, 20, 8))
    assert micro.keys is not None
    assert padded.keys is not None
    assert padded.lengths == (6, 3, 2, 1)
    assert padded.cu_seqlens.tolist() == [0, 6, 9, 11, 12]
    assert padded.keys.lengths == (6, 7, 4, 3)
    assert padded.keys.cu_seqlens.tolist() == [0, 6, 13, 17, 20]
    assert padded.keys.places.tolist() == [*micro.keys.places.tolist(), *[9] * 7]


def test_what_does_not_fit_is_not_padded() -> None:
    with pytest.raises(ValueError, match="cannot be padded"):
        pad(micro_batch(share=False), Sizes(14, 2, 5, 7, 0, 0))


def graphs_of(policy: Policy, *, capture: bool = False) -> PassGraphs:
    return PassGraphs(policy._logprobs_and_entropies, policy.model, 2, capture=capture)


def test_the_larger_the_layers_the_fewer_tokens_a_graph_has() -> None:
    def most_tokens(layers: int, model: nn.Module) -> int:
        return PassGraphs(lambda _: NotImplemented, model, layers, capture=False).most_tokens

    assert most_tokens(30, nn.Linear(1, 134_515_008, bias=False, device="meta")) == 22_302
    assert most_tokens(28, nn.Linear(1, 7_615_616_512, bias=False, device="meta")) == 367
    assert most_tokens(1, nn.Identity()) == 10**11


def test_the_largest_micro_batch_of_a_graph_has_the_most_tokens() -> None:
    policy, micro = Policy(tiny_model()), micro_batch(share=False)
    graphs = policy.graphs = graphs_of(policy)
    for most, passes in ((12, 0), (13, 1)):
        graphs.most_tokens = most
        policy.score(micro, entropy=True)
        assert graphs.serial == passes


def test_the_pass_that_was_used_longest_ago_makes_room() -> None:
    model, micro = nn.Linear(1, 1), micro_batch(share=False)
    ids, lengths = micro.input_ids, micro.lengths

    def computed(padded: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        values = model.weight[0] * padded.temperatures
        return values, values

    graphs = PassGraphs(computed, model, 2, capture=False)

    def used(times: int) -> Sizes:
        """The size of the pass for that many times the micro-batch."""
        long = replace(
            micro,
            input_ids=ids.repeat(times),
            position_ids=micro.position_ids.repeat(times),
            lengths=lengths * times,
            cu_seqlens=torch.tensor([0, *lengths * times], dtype=torch.int32).cumsum(
                0, dtype=torch.int32
            ),
        )
        assert graphs(long) is not None
        return next(reversed(graphs.passes))

    sizes = [used(4**n) for n in range(6)]
    assert len(set(sizes)) == 6
    assert [*graphs.passes] == sizes
    first = graphs.passes[sizes[0]]
    assert used(1) == sizes[0]
    assert graphs.passes[sizes[0]] is first
    assert [*graphs.passes] == [*sizes[1:], sizes[0]]
    seventh = used(4**6)
    assert [*graphs.passes] == [*sizes[2:], sizes[0], seventh]


def test_a_capture_needs_a_quarter_more_than_the_pass_took_and_some_to_spare(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for missing, may in ((0, True), (1, False)):
        graphs = graphs_of(Policy(tiny_model()), capture=True)
        monkeypatch.setattr(graphs, "free_memory", lambda m=missing: 5000 + 2**30 - m)
        assert graphs.may_capture(4000) is may


def test_captures_pause_for_longer_after_every_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = graphs_of(Policy(tiny_model()), capture=True)
    monkeypatch.setattr(graphs, "free_memory", lambda: 2**40)
    for passes in (200, 400):
        graphs.failed("busy")
        assert [graphs.may_capture(0) for _ in range(passes + 1)] == [False] * passes + [True]


def test_only_passes_that_are_captured_count_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 3)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 5)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (7, 11))  # what is free, and all
    for capture, counted in ((True, (3, 5)), (False, (0, 0))):
        graphs = graphs_of(Policy(tiny_model()), capture=capture)
        assert (graphs.allocated(), graphs.peak()) == counted
        assert graphs.free_memory() == 7
