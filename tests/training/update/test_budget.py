"""What a trainer settles by itself if nobody says it: the tokens of a pass, recomputation, and how
many logits are kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ludic.inference.tiny import tiny_model
from ludic.memory.plan import worthwhile_tokens
from ludic.memory.shape import ModelShape
from ludic.memory.update import CHUNK_LOGITS, Training, pass_bytes
from ludic.sharding.world import World
from ludic.training import TrainerConfig, make_algorithm
from ludic.training.update import budget
from ludic.training.update.budget import (
    USUAL,
    default_budget,
    filled_in,
    plan_update,
    shape_of,
    trainer_bytes,
)
from ludic.training.update.calibrate import trial_pass

SMOLLM2 = ModelShape(30, 576, 9, 3, 64, 1536, 49_152)


@pytest.mark.parametrize(
    ("precision", "measured"), [("bfloat16", 727_000), ("mixed", 901_000), ("float32", 1_480_000)]
)
def test_the_estimate_is_near_what_smollm2_took_on_a_gpu(precision: Any, measured: int) -> None:
    few, many = (
        sum(pass_bytes(SMOLLM2, Training(tokens=n, precision=precision)).values())
        for n in (30_000, 60_000)
    )
    assert (many - few) / 30_000 == pytest.approx(measured, rel=0.1)


def test_a_cpu_takes_the_usual_budget_or_the_longest_sample() -> None:
    model, cpu = tiny_model(), World()
    assert default_budget(model, TrainerConfig(), cpu) == USUAL
    assert default_budget(model, TrainerConfig(max_seq_len=20_000), cpu) == 20_000


def test_a_model_that_does_not_say_its_size_takes_the_usual_budget() -> None:
    model = tiny_model()
    model.config.num_hidden_layers = 0
    assert shape_of(model) is None
    cfg = TrainerConfig()
    assert default_budget(model, cfg, World()) == USUAL
    assert filled_in(cfg, model, None) is cfg


def with_memory(monkeypatch: pytest.MonkeyPatch, free: int) -> World:
    monkeypatch.setattr(budget, "free_memory", lambda device: free)
    return World(device=torch.device("cuda"))


def test_a_gpu_takes_what_is_worthwhile_or_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cfg = tiny_model(), TrainerConfig()
    shape = shape_of(model)
    assert shape is not None
    assert default_budget(model, cfg, with_memory(monkeypatch, 1 << 50)) == worthwhile_tokens(shape)
    less = default_budget(model, cfg, with_memory(monkeypatch, 64 << 20))
    assert cfg.max_seq_len < less < worthwhile_tokens(shape)


def test_what_is_said_stays_and_what_is_open_is_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(layers=24)
    cfg = TrainerConfig(max_seq_len=2048)
    assert filled_in(cfg, model, None).gradient_checkpointing is False
    monkeypatch.setattr(budget, "host_memory", lambda: 150 << 20)
    tight = filled_in(cfg, model, None)
    assert tight.gradient_checkpointing is True
    assert tight.micro_token_budget is not None
    assert 2048 <= tight.micro_token_budget < USUAL
    assert tight.keep_logits == 0  # on a CPU
    said = replace(cfg, gradient_checkpointing=False, micro_token_budget=4096, keep_logits=7)
    assert filled_in(said, model, None) is said


def test_logits_are_kept_on_a_gpu_with_room_and_never_instead_of_a_larger_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, cfg = tiny_model(vocab_size=5000), TrainerConfig(precision="float32")
    monkeypatch.setitem(CHUNK_LOGITS, "cuda", 2**20)
    counts = []
    for megabytes in (100, 600, 900, 5000):
        world = with_memory(monkeypatch, megabytes << 20)
        plan = plan_update(model, cfg, world)
        without = plan_update(model, replace(cfg, keep_logits=0), world)
        assert plan is not None
        assert without is not None
        assert plan.training.tokens == without.training.tokens
        taken = trainer_bytes(model, cfg, world)
        assert taken == without.total - without.parts["weights"]
        counts.append((plan.training.tokens, plan.training.keep_logits))
    assert counts[0][1] == 0
    assert counts[-1][0] == counts[-1][1]


def test_a_trial_pass_changes_nothing() -> None:
    model = tiny_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    cfg = TrainerConfig(max_seq_len=64, micro_token_budget=256, gradient_checkpointing=True)
    trial_pass(model, make_algorithm("grpo").loss, cfg, World())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
