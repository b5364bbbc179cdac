"""The scripts' `--host` and `--port` against a stand-in for vLLM, whose answers are moves."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ludic.distributed.vllm.canary import prompt_logprobs
from ludic.distributed.vllm.shared_memory import open_shared
from ludic.errors import InferenceError
from ludic.inference.tiny import tiny_model, tiny_tokenizer
from ludic.inference.vllm.server import FoundServer, find_server
from tests.examples.conftest import run_script
from tests.inference.vllm.fake_server import ROUTES, FakeVLLM

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a model and its tokenizer, as the server is said to have one."""
    folder = tmp_path / "model"
    tiny_model(hidden_size=32, heads=2, kv_heads=1, layers=1).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@dataclass
class PlayingServer(FakeVLLM):
    """Has the model of a folder, takes the weights that are sent to it, scores prompts with them,
    and answers every board with a free cell that the request's seed decides."""

    routes: tuple[str, ...] = (*ROUTES, "/tokenize")
    folder: Path = Path()
    asked: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokenizer = tiny_tokenizer()
        self.model = AutoModelForCausalLM.from_pretrained(self.folder)

    def _reply(self, path: str, body: Any) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": str(self.folder), "max_model_len": 512}]}
        if path == "/tokenize":
            return {"tokens": self.tokenizer.encode(body["prompt"])}
        return super()._reply(path, body)

    def _stage(self, update: Any) -> None:
        if update is not None and update["plane"] == "shared_memory":
            parameters = dict(self.model.named_parameters())
            with torch.no_grad():
                for name, tensor in open_shared(Path(update["path"])):
                    parameters[name].copy_(tensor)
        super()._stage(update)

    def _completion(self, path: str, body: Any) -> Any:
        if not body:
            return super()._completion(path, body)
        params, prompt = body["sampling_params"], body["token_ids"]
        if "prompt_logprobs" in params:
            scores = zip(prompt[1:], prompt_logprobs(self.model, prompt), strict=True)
            rows = [None, *({str(token): {"logprob": score}} for token, score in scores)]
            return {**super()._completion(path, body), "prompt_logprobs": rows}
        self.asked.append(body)
        free = self.tokenizer.decode(prompt).rpartition("Free:")[2]
        cell = Random(params["seed"]).choice(re.findall("[ABC][123]", free))
        ids = [*self.tokenizer.encode(f"<move>{cell}</move>"), self.tokenizer.eos_token_id]
        found = prompt_logprobs(self.model, [*prompt, *ids])[-len(ids) :]
        content = [{"token_id": i, "logprob": x} for i, x in zip(ids, found, strict=True)]
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "token_ids": ids,
            "logprobs": {"content": content},
            "weight_versions": [{"version": self.version, "start": 0, "end": len(ids)}],
        }
        return {"choices": [choice]}


def address(fake: FakeVLLM) -> list[str]:
    host, _, port = fake.url.removeprefix("http://").rpartition(":")
    return ["--host", host, "--port", port]


Script = Callable[..., Awaitable[str]]


@pytest.fixture
def run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    process_as_it_was: None,
) -> Script:
    """Runs a script in a thread, while this one serves; returns what it printed."""
    monkeypatch.chdir(tmp_path)

    async def run(script: str, *arguments: object) -> str:
        name, words = f"tic_tac_toe/{script}", map(str, arguments)
        await asyncio.to_thread(run_script, name, *words, monkeypatch=monkeypatch)
        return capsys.readouterr().out

    return run


async def test_games_are_evaluated_on_the_server(tmp_path: Path, model: Path, run: Script) -> None:
    async with PlayingServer(folder=model).serving() as fake:
        common = ["--model", model, *address(fake), "--max-tokens", 24]
        options = [*common, "--games", 6, "--output", "report.json"]
        told = await run("eval_tic_tac_toe_vllm.py", *options)
    assert "parse_failure" in told
    episodes = json.loads((tmp_path / "report.json").read_text())["episodes"]
    assert len(episodes) == 6
    assert not any(episode["parse_failures"] for episode in episodes)
    assert len(fake.asked) >= 6
    assert {body["model"] for body in fake.asked} == {str(model)}


async def test_training_samples_on_the_server_and_publishes_every_update_to_it(
    tmp_path: Path, model: Path, run: Script
) -> None:
    async with PlayingServer(folder=model).serving() as fake:
        common = ["--model", model, *address(fake), "--max-tokens", 24, "--output", "grpo"]
        small = ["--steps", 2, "--rollouts-per-update", 8, "--group-size", 4, "--rank", 2]
        told = await run("train_tic_tac_toe.py", *common, *small)
    assert "step      2" in told
    assert len(fake.asked) >= 16
    assert fake.version == "2"
    lines = [json.loads(line) for line in (tmp_path / "grpo/log/metrics.jsonl").open()]
    assert [line["train/version"] for line in lines] == [1, 2]
    # The server scores with the weights it was sent, the trainer with its own.
    assert all(line["train/mismatch_max"] < 1e-3 for line in lines)
    assert all(line["train/staleness_max"] == 0 for line in lines)
    before, after = (
        load_file(folder / "model.safetensors") for folder in (model, tmp_path / "grpo")
    )
    assert any(not before[name].equal(after[name]) for name in before)


async def test_the_scripts_find_a_server_at_its_default_port(
    model: Path, monkeypatch: pytest.MonkeyPatch, run: Script
) -> None:
    small = ["--steps", "1", "--rollouts-per-update", "8", "--group-size", "4", "--rank", "2"]
    async with PlayingServer(folder=model).serving() as fake:
        port = int(fake.url.rpartition(":")[2])
        monkeypatch.setattr("ludic.inference.vllm.server.DEFAULT_PORT", port)
        for script, options in (
            ("train_tic_tac_toe.py", [*small, "--max-tokens", "24"]),
            ("eval_tic_tac_toe_vllm.py", ["--model", str(model), "--games", "2"]),
        ):
            asked = len(fake.asked)
            await run(script, *options)
            assert len(fake.asked) > asked
        assert fake.version == "1"
        found = await asyncio.to_thread(find_server)
        assert found == FoundServer(fake.url, str(model), str(model))
        assert await asyncio.to_thread(find_server, "another/model") is None
        with pytest.raises(InferenceError, match="not 'another/model'"):
            await asyncio.to_thread(find_server, "another/model", port=port)
    assert find_server() is None
    with pytest.raises(InferenceError, match=r"no vLLM server answers.*ludic serve MODEL"):
        find_server(port=port)
