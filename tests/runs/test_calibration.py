"""Calibrating a run leaves room for the engines that sample beside the trainer."""

from __future__ import annotations

from ludic.inference.local.gpu.engine_memory import engine_memory
from ludic.inference.tiny import tiny_model
from ludic.runs.calibration import sampling_bytes
from ludic.runs.settings import parse_run

RUN = '[env]\nkind = "tic_tac_toe"\n[inference]\nslots = 24\nmax_context_tokens = 96\n'


def test_a_run_reserves_what_its_engine_takes() -> None:
    model = tiny_model()
    engine = engine_memory(model, max_slots=24, max_context_tokens=96)
    assert sampling_bytes(parse_run(RUN), model) == engine.total


def test_every_past_opponent_takes_an_engine_and_a_copy_of_the_model() -> None:
    model = tiny_model()
    engine = engine_memory(model, max_slots=24, max_context_tokens=96).total
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    run = parse_run(RUN)
    run = run.model_copy(update={"training": run.training.model_copy(update={"past_opponents": 2})})
    assert sampling_bytes(run, model) == 3 * engine + 2 * weights


def test_a_server_takes_nothing_of_the_trainers_memory() -> None:
    run = parse_run(RUN, ["inference.backend=vllm"])
    assert sampling_bytes(run, tiny_model()) == 0
