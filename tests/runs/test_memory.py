"""A run that cannot fit is refused before its model is loaded, with what would make it fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ludic.errors import ConfigError, OutOfMemoryError
from ludic.inference.tiny import tiny_model
from ludic.memory.plan import GIB
from ludic.runs import check, memory
from ludic.runs.memory import check_memory, plan_loaded, plan_run, planned
from ludic.runs.settings import parse_run
from ludic.training import TrainerConfig
from ludic.training.update.budget import shape_of

H200 = 139 * GIB
SEVEN = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152_064,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": False,
}
SEVENTY = SEVEN | {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


def run_of(folder: Path, facts: dict[str, Any], *overrides: str) -> Any:
    """A run of a model that is nothing but its configuration."""
    (folder / "config.json").write_text(json.dumps(facts))
    return parse_run(f'[env]\nkind = "tic_tac_toe"\n[model]\nname = "{folder}"\n', list(overrides))


@pytest.mark.usefixtures("gpu")
def test_seven_billion_in_float32_are_refused_with_a_table_and_remedies(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        check_memory(run_of(tmp_path, SEVEN, "model.precision=float32"), H200)
    text = str(caught.value)
    assert "7.62B parameters in float32" in text
    for row in ("weights ", "masters and moments", "engine's slots", "needed", "free"):
        assert row in text
    assert "\n  model.lora.rank = 16" in text


@pytest.mark.usefixtures("gpu")
def test_what_a_refusal_suggests_is_accepted(tmp_path: Path) -> None:
    lora = run_of(tmp_path, SEVEN, "model.precision=float32", "model.lora.rank=16")
    check_memory(lora, H200)


@pytest.mark.usefixtures("gpu")
def test_seventy_billion_need_several_gpus(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemoryError, match=r"torchrun --nproc-per-node 1\d"):
        check_memory(run_of(tmp_path, SEVENTY), H200)


def test_on_a_cpu_the_memory_of_the_machine_counts(tmp_path: Path) -> None:
    run = run_of(tmp_path, SEVEN, "model.device=cpu")
    with pytest.raises(OutOfMemoryError, match="this machine's memory"):
        check_memory(run, 64 * GIB)
    check_memory(run, 512 * GIB)


def test_a_context_that_is_longer_than_the_models_is_refused(tmp_path: Path) -> None:
    run = run_of(tmp_path, SEVEN, "inference.max_context_tokens=40000")
    with pytest.raises(ConfigError, match=r"40000 is more than the 32768 positions.*set it to"):
        check_memory(run, 512 * GIB)


def test_a_run_checks_its_memory_before_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "host_memory", lambda: 16 * GIB)
    with pytest.raises(OutOfMemoryError):
        check.check_parts(run_of(tmp_path, SEVENTY))


@pytest.mark.parametrize("facts", [{}, {"model_type": "gpt2"}])
def test_nothing_is_said_of_models_whose_size_is_not_known(
    tmp_path: Path, facts: dict[str, Any]
) -> None:
    check_memory(run_of(tmp_path, facts), 1)


def test_a_loaded_model_is_planned_with_its_own_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    model, run = tiny_model(), parse_run('[env]\nkind = "tic_tac_toe"\n')
    plan = plan_loaded(run, model)
    assert plan is not None
    assert plan.parts["weights"] == 4 * sum(p.numel() for p in model.parameters())
    monkeypatch.setattr(memory, "host_memory", lambda: 1 << 20)
    with pytest.raises(OutOfMemoryError, match="does not fit"):
        plan_loaded(run, model)


@pytest.mark.usefixtures("gpu")
def test_a_plan_on_a_gpu_settles_the_trainers_budget() -> None:
    model, run = tiny_model(), parse_run('[env]\nkind = "tic_tac_toe"\n')
    shape = shape_of(model)
    assert shape is not None
    plan = plan_run(run, shape, torch.device("cuda", 0), H200)
    cfg = planned(TrainerConfig(), plan)
    assert cfg.micro_token_budget == plan.training.tokens
    assert cfg.gradient_checkpointing is False
    assert cfg.keep_logits == plan.training.keep_logits == plan.training.tokens
    unplanned = TrainerConfig()
    assert planned(unplanned, None) is unplanned


@pytest.mark.usefixtures("gpu")
def test_no_logits_are_kept_where_the_runs_own_server_wants_the_memory(tmp_path: Path) -> None:
    def kept(*overrides: str) -> int:
        run = run_of(tmp_path, SEVEN, "model.lora.rank=16", *overrides)
        shape = memory.shape_by_name(run.model)
        assert shape is not None
        return plan_run(run, shape, torch.device("cuda", 0), H200).training.keep_logits

    vllm = ("inference.backend=vllm", "inference.publish_plane=http")
    assert kept() > 0
    assert kept("training.keep_logits=0") == 0
    assert kept(*vllm) == 0
    assert kept(*vllm, "training.keep_logits=300") == 300


@pytest.mark.usefixtures("gpu")
def test_models_that_score_or_play_beside_the_policy_are_counted(tmp_path: Path) -> None:
    beside = f"""
[reference]
model = "{tmp_path}"
[[player]]
name = "rival"
model = "{tmp_path}"
[[teacher]]
server = "http://elsewhere:8000"
"""
    run, weights = run_of(tmp_path, SEVEN), 7_615_283_200 * 2
    more = parse_run(f'[env]\nkind = "tic_tac_toe"\n[model]\nname = "{tmp_path}"\n{beside}')
    shape = memory.shape_by_name(run.model)
    assert shape is not None
    alone, plan = (plan_run(c, shape, torch.device("cuda", 0), 4 * H200) for c in (run, more))
    assert plan.parts["reference"] == pytest.approx(weights, rel=1e-3)
    assert plan.parts["player rival"] > plan.parts["reference"]
    assert "teacher 1" not in plan.parts
    assert plan.total > alone.total + 2 * 0.999 * weights


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("overrides", "copied"),
    [
        ([], True),
        (["model.lora.rank=8"], False),
        (["model.lora.rank=8", "training.overlap=1"], True),
    ],
)
def test_the_policy_at_the_start_is_a_copy_unless_it_is_what_an_adapter_stands_on(
    tmp_path: Path, overrides: list[str], copied: bool
) -> None:
    run = run_of(tmp_path, SEVEN, "reference.model=start", *overrides)
    shape = memory.shape_by_name(run.model)
    assert shape is not None
    plan = plan_run(run, shape, torch.device("cuda", 0), 4 * H200)
    assert ("reference" in plan.parts) == copied
