"""Whole runs with real servers: on several ranks, and with other models behind addresses."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer
from transformers import Qwen2ForCausalLM

import ludic
from ludic.distributed.publisher import BroadcastPolicyPublisher
from ludic.envs import LudicEnv
from ludic.errors import LudicError
from ludic.inference.judge import _judge_messages, server_judge
from ludic.inference.tiny import tiny_tokenizer
from ludic.inference.vllm.client import VLLMChatClient
from ludic.inference.vllm.server import VLLMServer, free_port
from ludic.rewards import Attempt
from ludic.rollouts import read_rollouts
from ludic.runs.storage import rollout_file
from ludic.sharding.weights import ModelWeights
from ludic.types import AgentStep, VersionSpan
from tests.inference.vllm.asking import PATIENT, largest_gap, request, scored, trace_of
from tests.inference.vllm.conftest import NAME, ROOT, server_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

Servers = tuple[VLLMServer, VLLMServer]
SIZES = {"hidden_size": 64, "heads": 2, "kv_heads": 1}
KEY = "sesame-4711"

TINY_RUN = """\
[model]
kwargs = {{ hidden_size = 64, heads = 2, kv_heads = 1 }}

[env]
kind = "key_door"

[inference]
backend = "vllm"
servers = ["{url}"]

[inference.sampling]
max_tokens = 8

[algorithm]
name = "reinforce"

[training]
steps = 2
rollouts_per_update = 4
max_steps = 1
max_seq_len = 512
learning_rate = 1e-3

[eval]
episodes = 2
"""


async def output_of(where: Path, *command: str) -> str:
    """What a command printed, which must end well."""
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *command),
        cwd=where,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(), 1500)
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    assert process.returncode == 0, out.decode()
    return out.decode()


def on_two_ranks(*module: str) -> tuple[str, ...]:
    """The command line after `python -m` for a module on two ranks of this machine."""
    return (
        *("torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"),
        *("--master-port", str(free_port()), "-m", *module),
    )


def trace_spans(step: AgentStep) -> tuple[VersionSpan, ...]:
    """Which policies sampled the call's tokens."""
    assert step.trace is not None
    return step.trace.version_spans


async def is_served(client: VLLMChatClient, trained: Path) -> bool:
    """Whether the server has the weights of a checkpoint after two updates."""
    model = Qwen2ForCausalLM.from_pretrained(trained / "model")
    trace = trace_of(await client.complete_tokens(request()))
    assert {span.version for span in trace.version_spans} == {2}
    return largest_gap(scored(model, trace), trace.completion_logprobs) <= 1e-3


async def test_two_ranks_sample_from_the_server_and_publish_to_it(
    server: VLLMServer, client: VLLMChatClient, tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(TINY_RUN.format(url=server.url))
    out = await output_of(tmp_path, *on_two_ranks("ludic", "train", "run.toml", "--out", "run"))
    assert "sharded over 2 ranks; sampled by vLLM" in out
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    assert [line["train/version"] for line in lines] == [1, 2]
    assert all(line["train/mismatch_max"] <= 1e-3 for line in lines)
    assert all(line["train/staleness_max"] == 0 for line in lines)
    assert any(line["train/grad_norm"] > 0 for line in lines)
    # The server has what the ranks have trained.
    saved = tmp_path / "run/checkpoints/rl/step-00000002"
    assert json.loads((saved / "manifest.json").read_text())["world_size"] == 2
    assert await is_served(client, saved)


@pytest.mark.skipif(not shutil.which("redis-server"), reason="needs a redis-server")
@pytest.mark.parametrize("ranks", [1, 2])
async def test_an_actor_over_redis_samples_from_the_server_that_the_trainer_publishes_to(
    server: VLLMServer, client: VLLMChatClient, tmp_path: Path, ranks: int
) -> None:
    (tmp_path / "run.toml").write_text(TINY_RUN.format(url=server.url))
    settings = ("pipeline.actors=1", "training.max_lag=0")
    train = ("ludic", "train", "run.toml", "--async", "--out", "run", *settings)
    await output_of(tmp_path, *(on_two_ranks(*train) if ranks == 2 else train))
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    assert [line["train/version"] for line in lines] == [1, 2]
    assert all(line["train/mismatch_max"] <= 1e-3 for line in lines)
    assert all(line["train/pipeline_lag_max"] == 0 for line in lines)
    spans = [
        (span.attempt, span.version)
        for rollout in read_rollouts(rollout_file(tmp_path / "run/rollouts", "train"))
        for step in rollout.agent_steps
        for span in trace_spans(step)
    ]
    assert set(spans) == {(1, 0), (1, 1)}
    assert await is_served(client, tmp_path / "run/checkpoints/rl/step-00000002")


def test_a_run_files_settings_reach_a_server(two_servers: Servers) -> None:
    _, second = two_servers
    (taken,) = re.findall("non-default args: .*", second.log.read_text())
    for setting in (
        *("'max_num_batched_tokens': 2048", "'max_logprobs': 25", "'enforce_eager': True"),
        *("'max_model_len': 1024", "'max_num_seqs': 32", "'dtype': 'float32'"),
    ):
        assert setting in taken


@asynccontextmanager
async def guarded(url: str) -> AsyncIterator[str]:
    """The same server behind an address that wants the key."""

    async def forward(asked: web.Request) -> web.StreamResponse:
        if asked.headers.get("Authorization") != f"Bearer {KEY}":
            return web.json_response({"error": {"message": "no key"}}, status=401)
        body = await asked.read()
        async with session.request(
            asked.method,
            url + str(asked.rel_url),
            data=body,
            headers={"Content-Type": "application/json"},
        ) as answer:
            return web.Response(
                body=await answer.read(), status=answer.status, content_type=answer.content_type
            )

    app = web.Application(client_max_size=2**28)
    app.router.add_route("*", "/{tail:.*}", forward)
    guard = TestServer(app)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        await guard.start_server()
        try:
            yield str(guard.make_url("")).rstrip("/")
        finally:
            await guard.close()


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    file = tmp_path / "key"
    file.write_text(KEY + "\n")
    return str(file)


def small(url: str, **changes: Any) -> dict[str, Any]:
    """The arguments of a run of one update, sampled at `url`, which wants the key."""
    return {
        "model": {"name": NAME, "kwargs": SIZES},
        "inference": {
            "backend": "vllm",
            "servers": [url],
            "api_key_env": "LUDIC_TEST_KEY",
            # A random model ends its answers only by one of these.
            "sampling": {"max_tokens": 32, "stop_token_ids": list(range(0, 256, 4))},
        },
        "steps": 1,
        "eval": {"episodes": 2},
        "logging": {"loggers": []},
        **changes,
    }


def metrics(run: ludic.Run) -> dict[str, float]:
    (line,) = [json.loads(line) for line in run.folder.metrics.open()]
    return dict(line)


class Talk(LudicEnv[Any, Any, Any]):
    """Two seats say something in turn, whatever it is; the second one's length is its reward."""

    blocking = False

    @property
    def agent_ids(self) -> tuple[str, ...]:
        return ("first", "second")

    @property
    def active_agents(self) -> tuple[str, ...]:
        return (self.agent_ids[len(self.said)],)

    def reset(self, *, seed: int | None = None) -> dict[str, Any]:
        self.said: list[str] = []
        return {"first": ("Begin.", {})}

    def step(self, actions: Any) -> dict[str, Any]:
        self.said += actions.values()
        if len(self.said) == 1:
            answer = ludic.StepOutcome(f"It said {self.said[0]!r}.", 0.0)
            return {"first": ludic.StepOutcome("", 0.0), "second": answer}
        end = ludic.StepOutcome("", float(len(self.said[1])), terminated=True)
        return dict.fromkeys(self.agent_ids, end)

    def current_obs(self) -> dict[str, str]:
        return dict.fromkeys(self.agent_ids, "Begin.")


async def give(server: VLLMServer, model: Qwen2ForCausalLM) -> None:
    async with VLLMChatClient(server.url, model=NAME) as client:
        await BroadcastPolicyPublisher(client, **PATIENT).publish(ModelWeights(model), 1)


async def test_a_reference_and_an_opponent_behind_servers_with_keys(
    two_servers: Servers,
    tmp_path: Path,
    key_file: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LUDIC_TEST_KEY", KEY)
    first, second = two_servers
    await give(second, server_model(seed=3))
    async with guarded(first.url) as here, guarded(second.url) as there:
        run = ludic.Run(
            Talk,
            out=tmp_path / "run",
            algorithm=ludic.grpo(group_size=4, kl_coeff=0.1),
            protocol={
                "kind": "multi_agent",
                "kwargs": {
                    "parser": {"kind": "text"},
                    "seats": {"first": {"client": "rival"}},
                },
            },
            reference={"server": there, "api_key_env": "LUDIC_TEST_KEY"},
            player={"name": "rival", "server": there, "api_key_file": key_file},
            training={"rollouts_per_update": 4, "max_steps": 12, "max_seq_len": 1024},
            **small(here),
        )
        await run.go_async()
    found = metrics(run)
    assert found["train/mismatch_max"] <= 1e-3
    assert found["train/kl_reference_k3"] > 1e-3  # another model, and not the policy
    rollouts = list(read_rollouts(rollout_file(run.folder.rollouts, "train")))
    assert {rollout.agent_id for rollout in rollouts} == {"second"}
    for rollout in rollouts:
        assert "It said" in rollout.agent_steps[0].new_messages[-1]["content"]
    stored = "".join(p.read_text() for p in (tmp_path / "run").rglob("*.json"))
    assert KEY not in stored


def judge_model() -> Qwen2ForCausalLM:
    """A model that gives every answer the score 7."""
    model, tokenizer, rng = server_model().train(), tiny_tokenizer(), Random(0)
    said = [*tokenizer.encode("<score>7</score>"), tokenizer.eos_token_id]
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(100):
        answer = "".join(chr(rng.randint(33, 126)) for _ in range(rng.randint(0, 32)))
        asked = _judge_messages(Attempt(answer, "4", "2 + 2?", {}), "Be right.", 10)
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        prompt = prompt if step % 4 == 0 else prompt[-48:]
        logits = model(input_ids=torch.tensor([prompt + said])).logits[0, len(prompt) - 1 : -1]
        loss: Any = torch.nn.functional.cross_entropy(logits, torch.tensor(said))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


async def test_a_teacher_and_a_judge_behind_a_server_with_a_key(
    two_servers: Servers,
    tmp_path: Path,
    key_file: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LUDIC_TEST_KEY", KEY)
    first, second = two_servers
    await give(second, judge_model())
    (tmp_path / "rows.jsonl").write_text('{"question": "2 + 2?", "answer": "4"}\n')
    async with guarded(first.url) as here, guarded(second.url) as there:
        judge = {"kind": "judge", "server": f"{there}/v1", "model": NAME, "rubric": "Be right."}
        run = ludic.Run(
            ludic.EnvSpec(
                "dataset_qa",
                {
                    "path": str(tmp_path / "rows.jsonl"),
                    "rewards": {**judge, "api_key_file": key_file, "timeout_s": 600.0},
                },
            ),
            out=tmp_path / "run",
            algorithm=ludic.opd(),
            teacher={"server": there, "api_key_env": "LUDIC_TEST_KEY"},
            training={
                **{"rollouts_per_update": 2, "max_steps": 1, "max_seq_len": 1024},
                "step_timeout_s": 1200.0,
            },
            **small(here),
        )
        await run.go_async()
    found = metrics(run)
    assert found["train/reward_mean"] == pytest.approx(0.7)
    assert found["train/mismatch_max"] <= 1e-3
    assert found["train/grad_norm"] > 0


async def test_a_judge_without_its_key_is_refused(server: VLLMServer, tmp_path: Path) -> None:
    (tmp_path / "wrong").write_text("another")
    async with guarded(server.url) as here:
        judge = server_judge(
            server=f"{here}/v1", model=NAME, rubric="x", api_key_file=str(tmp_path / "wrong")
        )
        with pytest.raises(LudicError, match="no key"):
            await judge(Attempt("4", "4", "2 + 2?", {}))  # type: ignore[misc]
