"""Calibrating a run leaves room for the engines that sample beside the trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ludic.errors import ConfigError, OutOfMemoryError
from ludic.inference.local.build import engine_memory
from ludic.inference.tiny import tiny_model
from ludic.inference.vllm.memory import GIB
from ludic.runs import memory
from ludic.runs.memory import (
    beside_the_weights,
    need_of_server,
    sampling_bytes,
    server_shares_gpu,
    share_of_server,
)
from ludic.runs.settings import parse_run
from ludic.runs.vllm_backend import check_publishing
from ludic.sharding.world import World
from ludic.training import TrainerConfig
from ludic.training.update.budget import trainer_bytes

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


VLLM = RUN + 'backend = "vllm"\n'
GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("overrides", "device", "shares"),
    [
        ([], "cuda", True),
        ([], "cuda:0", True),
        ([], "cuda:1", False),
        ([], "cpu", False),
        (["inference.vllm.flags={tensor_parallel_size = 2}"], "cuda:1", True),
        (['inference.servers=["http://127.0.0.1:1"]'], "cuda:0", False),
    ],
)
def test_a_server_that_is_started_is_on_the_first_gpus(
    overrides: list[str], device: str, shares: bool
) -> None:
    assert server_shares_gpu(parse_run(VLLM, overrides), torch.device(device)) is shares


def test_a_servers_need_follows_from_the_model_and_the_run() -> None:
    model = tiny_model(hidden_size=64, heads=4, kv_heads=2, layers=3)
    need = need_of_server(parse_run(VLLM, ["model.precision=bfloat16"]), model)
    assert need is not None
    assert need.weights == 2 * sum(p.numel() for p in model.parameters())
    assert need.least_cache == 2 * 3 * 2 * 16 * 2 * 96
    assert need.whole_cache == 24 * need.least_cache
    halved = parse_run(VLLM, ["inference.vllm.flags={tensor-parallel-size = 2}"])
    wide = need_of_server(parse_run(VLLM, ["model.precision=float32"]), model)
    half = need_of_server(halved, model)
    assert wide is not None
    assert half is not None
    assert half.weights * 2 == wide.weights == need.weights * 2


def test_what_a_trainer_takes_grows_with_its_tokens_and_shrinks_with_checkpointing() -> None:
    model = tiny_model()
    parameters = sum(p.numel() for p in model.parameters())

    def taken(**settings: Any) -> int:
        return trainer_bytes(model, TrainerConfig(max_seq_len=64, **settings), World()) or 0

    small, large = taken(micro_token_budget=1024), taken(micro_token_budget=2048)
    usual, frugal = taken(), taken(gradient_checkpointing=True)
    assert small > 12 * parameters
    assert usual > large > small
    assert 12 * parameters < frugal < usual


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, free: int, total: int) -> None:
    monkeypatch.setattr(memory, "server_shares_gpu", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (free, total))


def test_the_share_leaves_the_trainer_what_it_will_take(monkeypatch: pytest.MonkeyPatch) -> None:
    model, run = tiny_model(), parse_run(VLLM, ["training.micro_token_budget=4096"])
    need, total = need_of_server(run, model), 24 * GIB
    assert need is not None
    trainer = beside_the_weights(run, model, 20 * GIB)
    on_a_gpu(monkeypatch, 20 * GIB, total)
    share = share_of_server(run, model)
    assert share is not None
    assert need.wanted <= share * total <= 20 * GIB - trainer
    on_a_gpu(monkeypatch, 2 * GIB, total)
    with pytest.raises(OutOfMemoryError, match=r"2\.0 GiB of the GPU's 24\.0 GiB are free.*state"):
        share_of_server(run, model)
    stated = parse_run(VLLM, ["inference.vllm.gpu_memory=0.05"])
    assert share_of_server(stated, model) == 0.05


def test_other_models_in_the_process_are_left_room_for() -> None:
    model = tiny_model()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    alone = beside_the_weights(parse_run(VLLM), model, GIB)
    with_others = parse_run(VLLM, ["training.past_opponents=2", "reference.model=start"])
    assert beside_the_weights(with_others, model, GIB) == alone + 3 * weights


def test_on_the_cpu_the_share_is_vllms_own() -> None:
    assert share_of_server(parse_run(VLLM), tiny_model()) is None


def test_nccl_to_a_server_on_the_same_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    run = parse_run(VLLM, ["inference.publish_plane=nccl", "model.device=cuda"])
    with pytest.raises(ConfigError, match='NCCL refuses two processes on one: set "ipc"'):
        check_publishing(run)
