"""The page on model families says what a trainer finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ludic.errors import ConfigError
from ludic.training.update import checks
from ludic.training.update.checks import check_packing, check_split
from ludic.training.update.policy import Policy
from tools.families import TABLE, VARIANTS, families, tiny, tried

QUICK = (
    "llama",
    "qwen3",
    "gemma3_text",
    "mixtral",
    "gpt2",
    "lfm2",
    "granitemoehybrid",
    "minimax",
    "recurrent_gemma",
    "mamba",
    "gpt_oss",
    "phi3 with longrope",
    "llama with dynamic rope",
    "bert-generation",
)


@pytest.mark.parametrize("name", QUICK)
def test_a_family_is_trained_as_the_page_says(name: str) -> None:
    assert tried(name).how == TABLE.written()[name]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_family_is_trained_as_the_page_says() -> None:
    found = {name: tried(name).how for name in families()}
    assert "wrong" not in found.values()
    assert TABLE.written() == found


def test_the_page_lists_every_family_of_the_installed_transformers() -> None:
    assert TABLE.written().keys() == set(families())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["lfm2", "granitemoehybrid", "minimax", "recurrent_gemma"])
def test_a_state_that_runs_past_a_row_is_seen_in_every_type(name: str, dtype: torch.dtype) -> None:
    policy = Policy(tiny(name).to(dtype))
    check_packing(policy, torch.device("cpu"))
    assert not policy.packs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_not_taken_for_a_leak(dtype: torch.dtype) -> None:
    for name in ("qwen2", "mixtral", "gemma3_text"):
        policy = Policy(tiny(name).to(dtype))
        check_packing(policy, torch.device("cpu"))
        assert policy.packs, name


@pytest.mark.parametrize("name", ["phi3 with longrope", "llama with dynamic rope"])
def test_only_rows_below_the_threshold_of_a_rotary_embedding_are_packed(name: str) -> None:
    assert name in VARIANTS
    policy = Policy(tiny(name))
    check_packing(policy, torch.device("cpu"))
    assert policy.packs
    assert policy.longest_packed == 12


def test_a_model_that_sees_what_comes_is_refused() -> None:
    with pytest.raises(ConfigError, match="no causal language model"):
        check_split(tiny("bert-generation"), torch.device("cpu"))


def test_a_model_whose_rows_do_not_pack_keeps_its_own_attention() -> None:
    model = tiny("gpt_oss")
    before = model.config._attn_implementation  # type: ignore[union-attr]
    ids = torch.arange(3, 13)[None]
    own = model(input_ids=ids).logits
    policy = Policy(model)
    check_packing(policy, torch.device("cpu"))
    assert not policy.packs
    assert model.config._attn_implementation == before  # type: ignore[union-attr]
    assert torch.equal(model(input_ids=ids).logits, own)


@pytest.mark.parametrize(("apart", "packs"), [(0.063, True), (0.5, False)])
def test_a_gap_between_two_kernels_is_measured_by_the_size_of_the_logits(
    monkeypatch: pytest.MonkeyPatch, apart: float, packs: bool
) -> None:
    """On a GPU a row alone comes from one kernel, whatever its length, and packed from another."""
    gaps = iter([0.0, apart])  # of rows of two lengths, and of packed rows
    monkeypatch.setattr(checks, "_mean_gap", lambda a, b: next(gaps, 0.0))
    model: Any = tiny("llama").to(torch.bfloat16)
    head = model.get_output_embeddings()
    with torch.no_grad():
        head.weight.mul_(1.5 / head.weight.std())  # random ids have log-probs of many nats
    policy = Policy(model)
    check_packing(policy, torch.device("cpu"))
    assert policy.packs is packs
