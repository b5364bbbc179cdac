"""Episodes in other processes: the same rollouts, and no failure that is lost on the way."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from msgspec import structs

from ludic.errors import ConfigError, RequestRejectedError, UnknownNameError
from ludic.inference import HermesToolParser, HFChatTemplate
from ludic.inference.local import LocalChatClient
from ludic.inference.sampling import SamplingConfig
from ludic.inference.scripted_client import ScriptedCall, ScriptedChatClient
from ludic.inference.tiny import tiny_model, tiny_tokenizer
from ludic.interaction.base import Runtime
from ludic.rollouts import ProtocolSpec, RolloutEngine, RolloutWriter
from ludic.rollouts.episode_runner import EpisodeRunner
from ludic.rollouts.processes import WorkerPool, pool
from ludic.rollouts.processes.messages import described, made
from ludic.types import EnvironmentStep, EnvSpec, Message, Rollout
from tests.inference.local.asking import until
from tests.rollouts.processes import worlds
from tests.rollouts.worlds import (
    GuessEnv,
    engine,
    protocols,
    random_digit,
    request,
    runtime,
    template,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


NAMES = ("alone", "there")


def in_processes(
    workers: WorkerPool | None, policy: Any = random_digit, **options: Any
) -> RolloutEngine:
    return engine(policy, envs=worlds.ENVS, workers=workers, **options)


def processes_of(rollouts: list[Rollout]) -> list[Any]:
    steps = [step for r in rollouts for step in r.steps if isinstance(step, EnvironmentStep)]
    return [step.info["process"] for step in steps]


async def test_rollouts_are_those_of_one_process() -> None:
    asked = [
        request(num_episodes=6, group_id="a"),
        request("duel", num_episodes=3),
        request("broken", num_episodes=2),
        request(num_episodes=4, meta={"level": 2}),
    ]
    alone = await engine().generate_rollouts(asked, 5, 8)
    async with WorkerPool(2) as workers:
        for _ in range(2):
            several = await in_processes(workers).generate_rollouts(asked, 5, 8)
            assert several == alone
        where = await in_processes(workers).generate_rollouts(
            [request("where", num_episodes=8)], 1, 8
        )
    found = set(processes_of(where))
    assert len(found) == 2
    assert os.getpid() not in found
    for process in found:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


async def test_they_are_written_as_in_one_process(tmp_path: Path) -> None:
    asked = [request(num_episodes=3), request("broken", num_episodes=2, group_id="a")]
    async with WorkerPool(1) as workers:
        for name, where in zip(NAMES, (None, workers), strict=True):
            with RolloutWriter(tmp_path / f"{name}.jsonl") as writer:
                playing = in_processes(where, lost_member="retry", max_failure_rate=1.0)
                await playing.generate_rollouts(asked, 5, 8, writer=writer)
                assert writer.count == 5
    alone, there = (sorted((tmp_path / f"{n}.jsonl").read_text().splitlines()) for n in NAMES)
    assert alone == there
    assert sum("earlier_errors" in line for line in there) == 2  # written with what came later


async def test_a_group_is_played_in_one_process() -> None:
    groups = [request("where", num_episodes=4, group_id=f"group-{i}") for i in range(4)]
    async with WorkerPool(2) as workers:
        rollouts = await in_processes(workers).generate_rollouts(groups, 1, 16)
    by_group = [set(processes_of(rollouts[i : i + 4])) for i in range(0, 16, 4)]
    assert [len(group) for group in by_group] == [1] * 4
    assert len(set.union(*by_group)) == 2


async def test_the_engine_in_this_process_serves_them_without_a_task_for_each() -> None:
    model, tokenizer = tiny_model(max_position_embeddings=512), tiny_tokenizer()
    asked = [request(num_episodes=12)]
    protocol = ProtocolSpec("single_agent", {"parser": "text"})
    asked = [structs.replace(r, protocol=protocol) for r in asked]
    async with (
        WorkerPool(1) as workers,
        LocalChatClient(model, tokenizer, max_slots=4, max_queue=3) as client,
    ):
        played_with = Runtime(client, template(), "tiny")
        sampling = SamplingConfig(max_tokens=6)
        played_with = replace(
            played_with, inference=structs.replace(played_with.inference, sampling=sampling)
        )
        runs = []
        for where in (None, workers):
            made = engine()._runner  # the registries
            playing = RolloutEngine(
                made.env_registry, protocols(), runtime=played_with, workers=where
            )
            runs.append(await playing.generate_rollouts(asked, 3, 12))
        assert client.stats()["slots_taken"] == 0
    tokens = [[step.trace for r in run for step in r.agent_steps] for run in runs]
    assert tokens[0] == tokens[1]  # deterministic: whatever was asked together
    assert not any(r.error for run in runs for r in run)


async def test_a_process_that_ends_takes_its_episodes_with_it_and_another_takes_its_place() -> None:
    async with WorkerPool(1) as workers:
        dead = await in_processes(workers, max_failure_rate=1.0).generate_rollouts(
            [request("dying", num_episodes=3)], 5, 3
        )
        assert [r.error for r in dead] == ["the process that played it ended with -9"] * 3
        assert [r.episode_id for r in dead] == [f"call-0/0/{i}" for i in range(3)]
        alive = await in_processes(workers).generate_rollouts([request(num_episodes=3)], 5, 3)
    assert not any(r.error for r in alive)


async def test_a_process_that_hangs_as_a_whole_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "GRACE_S", 0.5)
    async with WorkerPool(1) as workers:
        playing = in_processes(workers, max_failure_rate=1.0, episode_timeout_s=1.0)
        [frozen] = await playing.generate_rollouts([request("freezing")], 5, 1)
        assert frozen.error == "the process that played it did not answer within 1 s"
        [after] = await in_processes(workers).generate_rollouts([request()], 5, 1)
    assert after.error is None


async def test_errors_of_configuration_end_the_call_with_their_own_type_and_words() -> None:
    async with WorkerPool(1) as workers:
        alone = pytest.raises(UnknownNameError)
        with alone as here:
            await engine().generate_rollouts([request("gues")], 5, 1)
        with pytest.raises(UnknownNameError) as there:
            await in_processes(workers).generate_rollouts([request("gues")], 5, 1)
    assert "gues" in str(there.value)
    assert str(there.value).split(";")[0] == str(here.value).split(";")[0]


async def test_modules_that_cannot_be_imported_are_named() -> None:
    async with WorkerPool(1, imports=["tests.rollouts.processes.no_such_module"]) as workers:
        with pytest.raises(ConfigError, match="no_such_module"):
            await in_processes(workers).generate_rollouts([request()], 5, 1)
        with pytest.raises(ConfigError, match="no_such_module"):
            await in_processes(workers).generate_rollouts([request()], 5, 1)


async def test_errors_of_the_client_are_those_of_one_process() -> None:
    def refuse(call: ScriptedCall) -> str:
        raise RequestRejectedError("no such prompt, please")

    [alone] = await engine(refuse, max_failure_rate=1.0).generate_rollouts([request()], 5, 1)
    async with WorkerPool(1) as workers:
        [there] = await in_processes(workers, refuse, max_failure_rate=1.0).generate_rollouts(
            [request()], 5, 1
        )
    assert alone.error is not None
    assert "no such prompt" in alone.error
    assert there == alone


async def test_arguments_that_would_come_changed_are_refused_and_not_changed() -> None:
    asked = [
        structs.replace(request("taking"), env=EnvSpec("taking", {"given": given}))
        for given in ((1, 2), {3, 1}, [1, 2.0])
    ]
    async with WorkerPool(1) as workers:
        playing = in_processes(workers, max_failure_rate=1.0)
        *changed, kept = await playing.generate_rollouts(asked, 1, 3)
    for rollout in changed:
        assert "cannot be sent" in (rollout.error or "")
        assert "use a list" in (rollout.error or "")
    assert kept.env_steps[-1].next_obs == "[1, 2.0]"


async def test_what_cannot_be_sent_costs_one_episode() -> None:
    async with WorkerPool(1) as workers:
        registry = {**protocols(), "secretive": worlds.Secretive}
        playing = RolloutEngine(
            engine()._runner.env_registry,
            registry,
            runtime=runtime(),
            workers=workers,
            max_failure_rate=1.0,
        )
        rollouts = await playing.generate_rollouts(
            [request(protocol=ProtocolSpec("secretive")), request(num_episodes=2)], 5, 3
        )
    assert "cannot be sent" in (rollouts[0].error or "")
    assert [r.error for r in rollouts[1:]] == [None, None]


async def test_a_runtime_that_cannot_be_sent_is_an_error_of_configuration() -> None:
    async with WorkerPool(1) as workers:
        playing = RolloutEngine(
            {"guess": lambda: GuessEnv()}, protocols(), runtime=runtime(), workers=workers
        )
        with pytest.raises(ConfigError, match="cannot be sent to another process"):
            await playing.generate_rollouts([request()], 5, 1)


async def test_what_the_other_process_cannot_import_is_an_error_of_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "only_here", here := ModuleType("only_here"))
    here.Guess = Guess = type("Guess", (GuessEnv,), {"__module__": "only_here"})  # type: ignore[attr-defined]
    async with WorkerPool(1) as workers:
        playing = RolloutEngine({"guess": Guess}, protocols(), runtime=runtime(), workers=workers)
        with pytest.raises(ConfigError, match=r"cannot be made there.*only_here"):
            await playing.generate_rollouts([request()], 5, 1)


async def test_closing_the_stream_takes_back_what_was_asked() -> None:
    begun: list[int] = []
    cancelled: list[int] = []

    async def never(call: ScriptedCall) -> str:
        begun.append(1)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(1)
            raise
        return ""

    async with WorkerPool(1) as workers:
        stream = in_processes(workers, never).stream_rollouts([request(num_episodes=3)], 5, 3)
        async with aclosing(stream):
            first = asyncio.ensure_future(anext(stream))
            await until(lambda: len(begun) == 3, 60)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
        await until(lambda: len(cancelled) == 3, 60)
        # And the process goes on.
        [rollout] = await in_processes(workers).generate_rollouts([request()], 5, 1)
    assert rollout.error is None


async def test_episodes_that_are_cut_off_close_what_they_opened(tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def never(call: ScriptedCall) -> str:
        begun.set()
        await asyncio.Event().wait()
        return ""

    file = tmp_path / "closed"
    async with WorkerPool(1) as workers:
        playing = in_processes(workers, never)
        asked = [request("tidy", kwargs={"file": str(file)})]
        task = asyncio.create_task(playing.generate_rollouts(asked, 5, 1))
        await asyncio.wait_for(begun.wait(), 60)
        task.cancel()
        await asyncio.wait([task])
    assert file.read_text() == "closed"


async def test_other_players_are_asked_here_too() -> None:
    other = ScriptedChatClient(lambda call: "9", template())
    mine = runtime()
    both = replace(mine, others={"rival": Runtime(other, template(), "rival")})
    seats = ProtocolSpec(
        "multi_agent", {"parser": "text", "seats": {"second": {"client": "rival"}}}
    )
    made = engine()._runner
    async with WorkerPool(1) as workers:
        playing = RolloutEngine(made.env_registry, protocols(), runtime=both, workers=workers)
        rollouts = await playing.generate_rollouts([request("duel", protocol=seats)], 5, 1)
    assert [r.agent_id for r in rollouts] == ["first"]
    assert rollouts[0].total_reward == 0.0  # no digit is larger


async def test_a_pool_that_is_closed_before_it_began_says_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with WorkerPool(2, imports=["tests.rollouts.processes.no_such_module"]):
        pass
    async with WorkerPool(1, imports=["tests.rollouts.processes.no_such_module"]) as workers:
        await asyncio.wait([workers._workers[0]._began], timeout=60)
    del workers
    gc.collect()
    assert not [record for record in caplog.records if record.name.startswith("ludic")]


async def test_a_pool_that_is_not_open_says_so() -> None:
    with pytest.raises(ConfigError, match="async with"):
        await in_processes(WorkerPool(1)).generate_rollouts([request()], 5, 1)
    with pytest.raises(ConfigError, match="at least 1"):
        WorkerPool(0)


SCRIPT = """
import asyncio, os
from tests.rollouts.processes.test_pool import WorkerPool, in_processes, processes_of, request
async def main():
    async with WorkerPool(1) as workers:
        found = await in_processes(workers).generate_rollouts([request("where")], 1, 1)
        print(*processes_of(found), flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_processes_end_with_the_one_that_started_them() -> None:
    script = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SCRIPT),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert script.stdout is not None
    worker = int(await asyncio.wait_for(script.stdout.readline(), 120))
    os.kill(worker, 0)
    script.kill()
    await script.wait()

    def is_gone() -> bool:
        status = Path(f"/proc/{worker}/stat")
        return not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"

    await until(is_gone, 60)


def test_what_episodes_are_played_with_is_made_again_from_plain_values() -> None:
    parser = HermesToolParser()
    shown = HFChatTemplate(tiny_tokenizer(), parser, variables={"x": 1}, trust_content=True)
    client = ScriptedChatClient([""], shown)
    runner = EpisodeRunner(None, protocols(), Runtime(client, shown, "m"), 1.0, None)
    clients: list[Any] = []
    data = msgspec.msgpack.decode(msgspec.msgpack.encode(described(runner, clients)))
    again = made(data, lambda number, _: clients[number])
    assert (again.env_registry, again.protocol_registry) == (None, protocols())
    assert (again.step_timeout_s, again.episode_timeout_s) == (1.0, None)
    assert again.runtime is not None
    assert again.runtime.client is client
    template = again.runtime.chat_template
    messages: list[Message] = [{"role": "user", "content": "Hi <|im_end|>"}]
    assert isinstance(template, HFChatTemplate)
    assert list(template.render(messages)) == list(shown.render(messages))
    assert template.end_token_id == shown.end_token_id
    assert template.options == shown.options
    assert type(template.tool_parser) is HermesToolParser
