"""Tokens that several rows begin with, computed once on a GPU: the kernels, in each precision."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from ludic.inference.tiny import tiny_model
from ludic.plumbing.precision import Precision, float32_products, weights_dtype
from ludic.saw.batch import make_batch
from ludic.saw.items import SAWBatch, SAWItem
from ludic.training.config import TrainerConfig
from ludic.training.update.attention import packed_attention
from ludic.training.update.checks import check_packing
from ludic.training.update.dense_attention import SequenceLengths, in_buckets, one_by_one
from ludic.training.update.packing import SharedKeys, lay_out, pack
from ludic.training.update.policy import Policy
from tools.families import SMALL, tiny

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
OWN, WHOLE = [72, 12, 12, 3, 1, 700, 1100, 9], [72, 72, 70, 63, 64, 1300, 1100, 1209]
"""Queries and keys of sequences, some above the length that is computed alone."""


def heads(*counts: tuple[int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    gen = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn(1, count, length, 64, device=CUDA, generator=gen).to(dtype)
        for count, length in counts
    ]


@pytest.mark.parametrize("window", [0, 20])
def test_attention_in_buckets_with_more_keys_than_queries_is_exact_in_float32(window: int) -> None:
    inputs = heads((9, sum(OWN)), (3, sum(WHOLE)), (3, sum(WHOLE)), dtype=torch.float32)
    results = []
    for attend in (in_buckets, one_by_one):
        double = attend is one_by_one
        q, k, v = leaves = [(t.double() if double else t.clone()).requires_grad_() for t in inputs]
        out = attend(q, k, v, SequenceLengths(OWN, CUDA, WHOLE), None, window)
        out.square().sum().backward()  # type: ignore[no-untyped-call]
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for a, b in zip(*results, strict=True):
        assert a is not None
        assert b is not None
        assert (a - b).abs().max() < 1e-4 * max(1.0, b.abs().max().item())


@pytest.mark.parametrize("window", [0, 20])
def test_the_packed_kernel_takes_queries_as_the_last_tokens_of_their_sequence(window: int) -> None:
    q, k, v = heads((8, sum(OWN)), (2, sum(WHOLE)), (2, sum(WHOLE)), dtype=torch.bfloat16)
    results = []
    for kind in ("varlen", "sdpa"):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        if kind == "sdpa":
            leaves = [t.detach().double().requires_grad_() for t in leaves]
        out = packed_attention(
            torch.nn.Identity(),
            *leaves,
            ludic_kind=kind,
            cu_seq_lens_q=bounds(OWN),
            cu_seq_lens_k=bounds(WHOLE),
            max_length_q=max(OWN),
            max_length_k=max(WHOLE),
            sliding_window=window,
            ludic_lengths=SequenceLengths(OWN, CUDA, WHOLE),
        )
        out.square().sum().backward()  # type: ignore[no-untyped-call]
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for a, b in zip(*results, strict=True):
        assert a is not None
        assert b is not None
        assert (a.double() - b).norm() < 0.02 * b.norm()


def bounds(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=CUDA).cumsum(0).int()


def groups(prompts: Sequence[int], members: int, completion: int, vocab: int) -> SAWBatch:
    rng, items = np.random.default_rng(0), []
    for prompt in prompts:
        start = rng.integers(3, vocab, prompt)
        for _ in range(members):
            ids = np.concatenate([start, rng.integers(3, vocab, int(rng.integers(1, completion)))])
            mask = np.zeros(len(ids), np.int8)
            mask[prompt:] = 1
            items.append(SAWItem(ids, np.ones(len(ids), np.int8), mask, 1.0))
    return make_batch(items)


def scored(policy: Policy, batch: SAWBatch, *, share: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs, and the gradient of a weighted sum of them."""
    policy.zero_grad()
    micro = pack(lay_out(batch), range(len(batch.items)), share=share).to(CUDA)
    assert isinstance(micro.keys, SharedKeys) is share
    with float32_products(policy.precision):
        found = policy.score(micro).logprobs
        weights = torch.linspace(-1, 2, len(found), device=CUDA, dtype=found.dtype)
        (found * weights).sum().backward()  # type: ignore[no-untyped-call]
    grads = [p.grad.flatten().double() for p in policy.parameters() if p.grad is not None]
    return found.detach().double(), torch.cat(grads)


@pytest.mark.parametrize("prompts", [(60, 57, 60, 31), (1200, 40)])
@pytest.mark.parametrize("precision", ["bfloat16", "mixed", "tf32", "float32"])
def test_sharing_is_as_close_to_the_truth_as_rows_computed_whole(
    precision: Precision, prompts: tuple[int, ...]
) -> None:
    batch = groups(prompts, 16, 13, 250)
    model = tiny_model(hidden_size=256, layers=3).to(CUDA, weights_dtype(precision))
    exact = tiny_model(hidden_size=256, layers=3).to(CUDA)
    exact.load_state_dict(model.state_dict())
    truth = scored(Policy(exact.double(), TrainerConfig(attention="sdpa")), batch, share=False)
    policy = Policy(model, TrainerConfig(precision=precision))
    with float32_products(precision):
        check_packing(policy, CUDA)
    assert policy.shares
    shared, whole = (scored(policy, batch, share=share) for share in (True, False))
    for ours, plain, right in zip(shared, whole, truth, strict=True):
        assert (ours - right).norm() < 1.5 * (plain - right).norm() + 1e-5 * right.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text"])
def test_families_share_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    sizes = {**SMALL, "head_dim": 64, "sliding_window": 16}
    policy = Policy(tiny(name, sizes).to(CUDA, dtype))
    check_packing(policy, CUDA)
    assert policy.packs
    assert policy.shares
    shared, whole = (scored(policy, groups((40, 30), 6, 9, 96), share=s) for s in (True, False))
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-3
    for ours, plain in zip(shared, whole, strict=True):
        assert (ours - plain).norm() < tolerance * plain.norm()


def test_recomputed_activations_share_too() -> None:
    batch = groups((60, 50), 8, 13, 250)
    model = tiny_model(hidden_size=256, layers=3).to(CUDA, torch.bfloat16)
    whole = scored(Policy(model), batch, share=False)
    shared = scored(Policy(model, TrainerConfig(gradient_checkpointing=True)), batch, share=True)
    for ours, plain in zip(shared, whole, strict=True):
        assert (ours - plain).norm() < 0.05 * plain.norm()
