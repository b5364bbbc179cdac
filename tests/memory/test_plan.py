"""What fits, how it is chosen, and what is said where it does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic.memory.plan import (
    GIB,
    Engine,
    Plan,
    remedies,
    settled,
    with_logits,
    worthwhile_tokens,
)
from ludic.memory.shape import PLAIN_FAMILIES, Adapter, ModelShape
from ludic.memory.update import STREAM_BYTES, Training, host_bytes, pass_bytes

SEVEN = ModelShape(28, 3584, 28, 4, 128, 18_944, 152_064, tied=False)
SEVENTY = ModelShape(80, 8192, 64, 8, 128, 28_672, 128_256, tied=False)
H200 = 139 * GIB

shapes = st.builds(
    ModelShape,
    layers=st.integers(1, 80),
    hidden=st.sampled_from([64, 576, 1536, 4096]),
    heads=st.sampled_from([4, 16]),
    kv_heads=st.sampled_from([1, 4]),
    head_dim=st.sampled_from([16, 128]),
    inner=st.sampled_from([128, 8960]),
    vocab=st.sampled_from([259, 150_000]),
    tied=st.booleans(),
)
trainings = st.builds(
    Training,
    tokens=st.integers(64, 100_000),
    precision=st.sampled_from(["bfloat16", "mixed", "tf32", "float32"]),
    device=st.sampled_from(["cuda", "cpu"]),
    adapter=st.none() | st.builds(Adapter, st.integers(1, 64)),
    checkpointing=st.booleans(),
    optimizer_device=st.sampled_from(["cuda", "cpu"]),
    ranks=st.integers(1, 8),
)
engines = st.none() | st.builds(Engine, st.integers(1, 256), st.integers(64, 8192))
plans = st.builds(Plan, shapes, trainings, engines)


@given(plans, st.integers(1, 10_000))
def test_more_tokens_never_need_less(plan: Plan, more: int) -> None:
    assert plan.with_tokens(plan.training.tokens + more).total >= plan.total


@given(shapes, trainings)
def test_a_step_with_its_state_on_the_host_has_room_for_what_streams_through(
    shape: ModelShape, training: Training
) -> None:
    how = replace(training, device="cuda", optimizer_device="cpu", tokens=64)
    state = host_bytes(shape, how)
    assert state == 12 * how.trained(shape) // how.ranks
    assert sum(pass_bytes(shape, how).values()) >= min(STREAM_BYTES, state)
    assert host_bytes(shape, replace(how, optimizer_device="cuda")) == 0


@given(plans, st.integers(1, 100))
def test_more_slots_and_longer_ones_never_need_less(plan: Plan, more: int) -> None:
    engine = plan.engine or Engine(4, 64)
    less = replace(plan, engine=engine).total
    assert replace(plan, engine=replace(engine, slots=engine.slots + more)).total >= less
    assert replace(plan, engine=replace(engine, context=engine.context + more)).total >= less


@given(plans, st.integers(0, H200), st.integers(0, H200), st.integers(2, 9000))
def test_more_memory_never_fits_less(plan: Plan, free: int, more: int, longest: int) -> None:
    small, large = (settled(plan, size, longest) for size in (free, free + more))
    if small.fits(free):
        assert large.fits(free + more)
        assert large.training.checkpointing <= small.training.checkpointing
        if large.training.checkpointing == small.training.checkpointing:
            assert large.training.tokens >= small.training.tokens
    assert small.training.tokens >= longest


@given(plans, st.integers(0, H200), st.integers(2, 9000), st.integers(1, 10_000))
def test_logits_are_kept_only_in_what_the_passes_leave(
    plan: Plan, free: int, longest: int, more: int
) -> None:
    alone = settled(plan, free, longest)
    keeping = with_logits(alone, free)
    kept, how = keeping.training.keep_logits, alone.training
    assert replace(keeping, training=replace(keeping.training, keep_logits=0)) == alone
    assert alone.total <= keeping.total
    assert 0 <= kept <= how.tokens
    if kept:
        assert (how.device, how.ranks) == ("cuda", 1)
        assert keeping.total <= 0.91 * (free - 2 * how.weight_item * how.trained(plan.shape))
    assert with_logits(alone, free + more).training.keep_logits >= kept
    assert with_logits(alone, free, more).training.keep_logits == more
    assert settled(keeping, free, longest) == alone


def test_kept_logits_take_four_bytes_each_beside_a_chunk_of_them() -> None:
    how = Training(tokens=20_000, precision="bfloat16", adapter=Adapter(16))

    def total(keep: int) -> int:
        return sum(pass_bytes(SEVEN, replace(how, keep_logits=keep)).values())

    assert total(15_000) - total(10_000) == 5_000 * 4 * SEVEN.vocab
    assert total(20_000) - total(20_000 - 2304) == 0  # a chunk is there in any case
    settled_plan = with_logits(settled(Plan(SEVEN, how), H200, 2048), H200)
    assert settled_plan.training.keep_logits == settled_plan.training.tokens


@given(plans, st.integers(2, 4000))
def test_every_single_remedy_is_one(plan: Plan, longest: int) -> None:
    free = plan.total // 2
    for remedy in remedies(plan, free, longest):
        assert "=" in remedy or remedy.startswith("torchrun")
    if plan.training.tokens > longest and plan.with_tokens(longest).fits(free):
        said = [r for r in remedies(plan, free, longest) if "micro_token_budget" in r]
        tokens = int(said[0].split("=")[1])
        assert plan.with_tokens(tokens).fits(free)
        assert not plan.with_tokens(tokens + 512).fits(free)


def test_recomputation_is_chosen_only_if_the_longest_row_does_not_fit_without() -> None:
    shape = ModelShape(28, 1536, 12, 2, 128, 8960, 151_936)
    plan = Plan(shape, Training(tokens=1, precision="bfloat16"))
    short, long = (settled(plan, 80 * GIB, rows) for rows in (2048, 32_768))
    assert not short.training.checkpointing
    assert long.training.checkpointing
    assert long.fits(80 * GIB)
    said = settled(plan, 80 * GIB, 32_768, checkpointing=False)
    assert not said.training.checkpointing
    assert not said.fits(80 * GIB)


def test_a_pass_takes_no_more_than_gains_speed() -> None:
    fused = replace(SEVEN, family="qwen2")
    lora = Plan(fused, Training(tokens=1, precision="bfloat16", adapter=Adapter(16)))
    plan = settled(replace(lora, engine=Engine(128, 320)), H200, 256)
    assert plan.training.tokens == worthwhile_tokens(SEVEN, Adapter(16))
    assert plan.total < 61e9


@pytest.mark.parametrize(
    ("shape", "precision", "helps"),
    [
        (SEVEN, "bfloat16", ['training.optimizer_device = "cpu"', "model.lora.rank = 16"]),
        (SEVEN, "float32", ["model.lora.rank = 16"]),
        (SEVENTY, "bfloat16", ["torchrun --nproc-per-node 11"]),
    ],
)
def test_what_cannot_fit_is_told_with_what_would(
    shape: ModelShape, precision: Any, helps: list[str]
) -> None:
    plan = Plan(shape, Training(tokens=1, precision=precision), Engine(128, 4096))
    plan = settled(plan, H200, 2048)
    assert not plan.fits(H200)
    assert "free" in plan.table(H200)
    assert f"{shape.parameters * (2 if precision == 'bfloat16' else 4) / GIB:.2f} GiB" in (
        plan.table(H200)
    )
    said = remedies(plan, H200, 2048)
    for remedy in helps:
        assert any(line.startswith(remedy) for line in said), said


def test_settings_that_do_not_help_alone_are_named_together() -> None:
    plan = settled(Plan(SEVENTY, Training(tokens=1, precision="float32")), 2 * H200, 2048)
    first = remedies(plan, 2 * H200, 2048)[0]
    assert first.startswith('model.precision = "bfloat16", ')


@pytest.mark.parametrize("family", sorted(PLAIN_FAMILIES))
def test_the_parameters_of_a_family_follow_from_its_configuration(family: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, num_hidden_layers=2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = ModelShape.of(config.to_dict())
    assert shape is not None
    assert shape.parameters == pytest.approx(sum(p.numel() for p in model.parameters()), rel=1e-3)


def test_a_run_is_expected_to_take_what_its_passes_and_its_sampling_reach() -> None:
    how = Training(tokens=8192, precision="bfloat16", adapter=Adapter(16))
    plan = Plan(SEVEN, how, Engine(128, 1024))
    taken = plan.taken(4096, 20_000)
    half = plan.with_tokens(4096).parts
    assert taken["activations: MLP"] == half["activations: MLP"]
    # The cache doubles from 16,384 tokens on; a step of the engine has gone when a pass begins.
    assert taken["prefix cache"] == 32_768 * 2 * SEVEN.kv_numbers
    assert "engine's step" not in taken
    assert plan.taken(4096, 20_000, beside=True)["engine's step"] == half["engine's step"]
    assert sum(taken.values()) < plan.total
    # Neither more tokens than a pass takes nor more than the cache may hold.
    most = plan.taken(10**6, 10**9, beside=True)
    assert most == plan.parts
