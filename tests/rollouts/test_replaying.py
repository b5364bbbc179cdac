from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pytest
from msgspec.structs import replace

from ludic.envs import SingleAgentEnv
from ludic.errors import ConfigError, RolloutError
from ludic.inference.sampling import InferenceSpec, SamplingConfig
from ludic.inference.scripted_client import ScriptedCall, ScriptedChatClient
from ludic.inference.templates.hf import HFChatTemplate
from ludic.inference.templates.tool_parsers import HermesToolParser
from ludic.inference.tiny import tiny_tokenizer
from ludic.interaction.base import Runtime
from ludic.parsers import ParseResult
from ludic.registry import register_tool, unregister_tool
from ludic.rollouts import EnvSpec, ProtocolSpec, RolloutEngine, RolloutRequest, replay
from ludic.types import (
    AgentStep,
    EnvironmentStep,
    Info,
    Obs,
    Rollout,
    StepOutcome,
    TokenTrace,
    from_json,
    to_json,
)
from tests.rollouts.worlds import ENVS, engine, protocols, random_digit, request, runtime, template

REGISTRIES: dict[str, Any] = {"env_registry": ENVS, "protocol_registry": protocols()}


async def play(kind: str = "guess", max_steps: int = 4, **options: Any) -> list[Rollout]:
    return await engine().generate_rollouts([request(kind, **options)], max_steps, 1)


def changed(rollout: Rollout, step: int, **changes: Any) -> Rollout:
    steps = list(rollout.steps)
    steps[step] = replace(steps[step], **changes)
    return replace(rollout, steps=tuple(steps))


@pytest.mark.parametrize("kind", ["guess", "duel"])
@pytest.mark.parametrize("mode", ["messages", "template", "model"])
async def test_an_episode_replays_without_a_divergence(kind: str, mode: str) -> None:
    modes: dict[str, dict[str, Any]] = {
        "messages": {},
        "template": {"chat_template": template()},
        "model": {"runtime": runtime()},
    }
    rollouts = await play(kind)
    report = await replay(rollouts, **modes[mode], **REGISTRIES)
    assert report.matches, str(report.divergence)
    assert report.steps == sum(len(r.steps) for r in rollouts)
    assert report.tokens == sum(r.num_tokens for r in rollouts)


async def test_another_observation_is_reported_where_it_first_shows() -> None:
    rollouts = await play()
    at = next(i for i, s in enumerate(rollouts[0].steps) if isinstance(s, EnvironmentStep))
    told = rollouts[0].steps[at].next_obs  # type: ignore[union-attr]
    report = await replay(changed(rollouts[0], at, next_obs="Something else."), **REGISTRIES)
    assert report.divergence is not None
    assert (report.divergence.step, report.divergence.field) == (at, "next_obs")
    assert (report.divergence.recorded, report.divergence.replayed) == ("Something else.", told)
    assert f"step {at}" in str(report.divergence)
    assert report.steps == at


class TellingEnv(SingleAgentEnv):
    """One step, and an info that the test decides."""

    blocking: ClassVar[bool] = False
    tells: ClassVar[dict[str, Any]] = {}

    def env_reset(self, *, seed: int | None = None) -> tuple[Obs, Info]:
        return "Go.", {}

    def env_step(self, action: str) -> StepOutcome:
        return StepOutcome("", 0.0, terminated=True, info=dict(self.tells))

    def env_current_obs(self) -> Obs:
        return "Go."


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ({"a": 1}, {"a": 2}, "info['a'] was 1 and is now 2"),
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 3]}}, "info['a'] was {'b': [1, 2]} and is now"),
        ({"a": 1}, {"a": True}, "info['a'] was 1 and is now True"),
        ({"a": 1, "b": None}, {"a": 1}, "keys of info was ['a', 'b'] and is now ['a']"),
        ({"a": 1}, {"a": 2, "0": 1}, "info['a'] was 1 and is now 2"),
        ({"b": 1}, {"a": 1, "b": 1, "c": None}, None),
        ({"a": "x" * 900 + "y"}, {"a": "x" * 900 + "z"}, f"…{'x' * 20}y' and is now …{'x' * 20}z'"),
        (
            {"a": float("nan"), "b": {"c": 1, "d": 2}},
            {"b": {"d": 2, "c": 1}, "a": float("nan")},
            None,
        ),
    ],
)
async def test_another_info_is_reported_shortly(
    monkeypatch: pytest.MonkeyPatch, old: dict[str, Any], new: dict[str, Any], said: str | None
) -> None:
    envs = {"telling": TellingEnv}
    monkeypatch.setattr(TellingEnv, "tells", old)
    [rollout] = await engine(envs=envs).generate_rollouts([request("telling")], 1, 1)
    stored = from_json(Rollout, to_json(rollout))
    registries = {**REGISTRIES, "env_registry": envs}
    assert (await replay(stored, **registries)).matches
    monkeypatch.setattr(TellingEnv, "tells", new)
    report = await replay(stored, **registries)
    assert report.matches == (said is None)
    if said is not None:
        assert report.divergence is not None
        assert report.divergence.step == 1
        assert said in str(report.divergence)
        assert len(str(report.divergence)) < 500


async def test_another_seed_is_another_episode() -> None:
    [rollout] = await play(env_seed=1)
    secret = Random(1).randrange(4)
    other = next(s for s in range(2, 99) if Random(s).randrange(4) != secret)
    reports = [await replay(replace(rollout, env_seed=s), **REGISTRIES) for s in (1, other)]
    assert [r.matches for r in reports] == [True, False]


async def test_another_policy_is_reported_at_its_first_token() -> None:
    [rollout] = await play()
    report = await replay(rollout, runtime=runtime(lambda call: "77"), **REGISTRIES)
    assert report.divergence is not None
    assert (report.divergence.field, report.divergence.token) == ("completion_token_ids", 0)
    assert report.divergence.step == 0


async def test_other_log_probs_are_a_divergence_of_the_model_alone() -> None:
    [rollout] = await play()
    other = runtime(random_digit, logprob=-0.25)
    report = await replay(rollout, runtime=other, **REGISTRIES)
    assert report.divergence is not None
    assert report.divergence.field == "completion_logprobs"
    assert (await replay(rollout, **REGISTRIES)).matches


async def test_a_prompt_that_the_template_now_spells_otherwise_is_reported() -> None:
    [rollout] = await play()
    first = rollout.steps[0]
    assert isinstance(first, AgentStep)
    assert first.trace is not None
    prompt = (*first.trace.prompt_token_ids[:-1], 5)
    trace = TokenTrace(prompt, first.trace.completion_token_ids, first.trace.completion_logprobs)
    report = await replay(changed(rollout, 0, trace=trace), chat_template=template(), **REGISTRIES)
    assert report.divergence is not None
    assert report.divergence.field == "prompt_token_ids"
    assert report.divergence.token == len(prompt) - 1


async def test_the_sampling_settings_of_the_request_are_used_again() -> None:
    def warm(call: ScriptedCall) -> str:
        return f"{random_digit(call)} at {call.request.sampling.temperature}"

    spec = InferenceSpec(SamplingConfig(temperature=0.5, stop=("!",)))
    [rollout] = await engine(warm).generate_rollouts([request(inference=spec)], 3, 1)
    assert rollout.agent_steps[0].message["content"].endswith("at 0.5")
    report = await replay(rollout, runtime=runtime(warm), **REGISTRIES)
    assert report.matches, str(report.divergence)


async def test_a_parse_failure_replays_as_one() -> None:
    protocol = ProtocolSpec("single_agent", {"parser": {"kind": "xml", "tag": "move"}})

    def clumsy(call: ScriptedCall) -> str:
        return "no tags" if call.index == 0 else f"<move>{random_digit(call)}</move>"

    asked = request(protocol=protocol)
    [rollout] = await engine(clumsy).generate_rollouts([asked], 4, 1)
    assert rollout.env_steps[0].info["parse_error"]
    assert not rollout.env_steps[0].stepped
    report = await replay(rollout, **REGISTRIES)
    assert report.matches, str(report.divergence)
    assert all(to_json(r) for r in report.rollouts)


def touch(name: str) -> Any:
    """Stands for any function that a file might name."""
    Path(name).touch()
    return lambda text: ParseResult(text)


@pytest.mark.parametrize(
    "changes",
    [
        {"protocol": ProtocolSpec("single_agent", {"parser": {"kind": f"{__name__}:touch"}})},
        {"protocol": ProtocolSpec("single_agent", {"agent": "tool", "tools": ["os:system"]})},
        {"protocol": ProtocolSpec("single_agent", {"context": {"kind": f"{__name__}:touch"}})},
        {"env": EnvSpec("dataset_qa", {"rows": [{}], "rewards": {"kind": f"{__name__}:touch"}})},
    ],
    ids=["parser", "tool", "context", "reward"],
)
async def test_no_function_that_stored_data_names_is_imported_or_called(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    touched = tmp_path / "touched"
    [rollout] = await engine().generate_rollouts([request()], 4, 1)
    rollout = replace(rollout, env=EnvSpec("tic_tac_toe"), protocol=ProtocolSpec("single_agent"))
    for spec in changes.values():
        for value in spec.kwargs.values():
            if isinstance(value, dict):
                value["name"] = str(touched)
    with pytest.raises(ConfigError, match=r"stored data.*register"):
        await replay(replace(rollout, **changes))
    assert not touched.exists()


class CounterEnv(SingleAgentEnv):
    """Takes any answer; two turns."""

    blocking: ClassVar[bool] = False

    def env_reset(self, *, seed: int | None = None) -> tuple[Obs, Info]:
        self._turns = 0
        return f"How much is {(seed or 0) % 5} and 2?", {}

    def env_step(self, action: str) -> StepOutcome:
        self._turns += 1
        return StepOutcome("Again.", 1.0, terminated=self._turns == 2)

    def env_current_obs(self) -> Obs:
        return "Again."


async def test_tools_run_again_and_their_answers_are_compared() -> None:
    handicap = 0

    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b + handicap

    def policy(call: ScriptedCall) -> str:
        if call.index % 3 == 0:
            return '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
        if call.index % 3 == 1:
            return "<tool_call>{broken</tool_call>"
        return "three"

    spelled = HFChatTemplate(tiny_tokenizer(), tool_parser=HermesToolParser())

    def scripted() -> Runtime:
        return Runtime(ScriptedChatClient(policy, spelled), spelled, "m")

    register_tool("replay_add", add)
    try:
        kwargs = {"agent": "tool", "tools": ["replay_add"], "parser": "text"}
        asked = RolloutRequest(EnvSpec("counter"), ProtocolSpec("single_agent", kwargs), env_seed=1)
        envs: Mapping[str, Any] = {"counter": CounterEnv}
        running = RolloutEngine(envs, runtime=scripted())
        [rollout] = await running.generate_rollouts([asked], 4, 1)
        assert rollout.error is None
        assert len(rollout.agent_steps) == 6
        assert rollout.agent_steps[0].tool_messages[0]["content"] == "3"
        for options in ({}, {"chat_template": spelled}, {"runtime": scripted()}):
            report = await replay(rollout, env_registry=envs, **options)
            assert report.matches, str(report.divergence)
        handicap = 1
        report = await replay(rollout, env_registry=envs)
        assert report.divergence is not None
        assert report.divergence.field == "tool_messages"
        assert report.divergence.step == 0
    finally:
        unregister_tool("replay_add")


async def test_bots_play_again_without_a_record_of_their_own() -> None:
    seats = {"second": {"bot": "random", "choices": ["0", "1", "2", "3"]}}
    protocol = ProtocolSpec("multi_agent", {"parser": "text", "seats": seats})
    rollouts = await engine().generate_rollouts([request("duel", protocol=protocol)], 4, 1)
    assert [r.agent_id for r in rollouts] == ["first"]
    report = await replay(rollouts, **REGISTRIES)
    assert report.matches, str(report.divergence)


async def test_sub_agents_are_started_again_from_their_own_records() -> None:
    spelled = HFChatTemplate(tiny_tokenizer(), tool_parser=HermesToolParser())

    def policy(call: ScriptedCall) -> str:
        if "helper" in str(call.request.conversation_id):
            return f"five and {random_digit(call)}"
        if call.index == 0:
            return '<tool_call>{"name": "helper", "arguments": {"task": "add"}}</tool_call>'
        return "done"

    def scripted() -> Runtime:
        return Runtime(ScriptedChatClient(policy, spelled), spelled, "m")

    helper = {"description": "Adds.", "agent": "agent", "parser": "text"}
    kwargs = {"sub_agents": {"helper": helper}, "parser": "text", "agent": "tool"}
    asked = RolloutRequest(EnvSpec("counter"), ProtocolSpec("delegating", kwargs))
    envs: Mapping[str, Any] = {"counter": CounterEnv}
    rollouts = await RolloutEngine(envs, runtime=scripted()).generate_rollouts([asked], 4, 1)
    assert [r.agent_id for r in rollouts] == ["agent", "helper"]
    assert rollouts[1].parent_id == rollouts[0].id
    for options in ({}, {"chat_template": spelled}, {"runtime": scripted()}):
        report = await replay(rollouts, env_registry=envs, **options)
        assert report.matches, str(report.divergence)
    with pytest.raises(RolloutError, match="helper"):
        await replay(rollouts[0], env_registry=envs)


async def test_a_context_that_was_full_is_where_the_record_ends() -> None:
    running = engine(lambda call: "9", max_context_tokens=110)
    [rollout] = await running.generate_rollouts([request(kwargs={"tries": 50})], 50, 1)
    assert rollout.truncation_reason == "context_window"
    report = await replay(rollout, **REGISTRIES)
    assert report.matches, str(report.divergence)


class TwoAtOnceEnv(CounterEnv):
    """Two agents count at the same time, and one of them is told much more than the other."""

    agent_ids = active_agents = ("brief", "long")

    def reset(self, *, seed: int | None = None) -> Mapping[str, tuple[Obs, Info]]:
        return {"brief": ("Go.", {}), "long": ("Go. " + "Much to read. " * 40, {})}


@pytest.mark.parametrize("with_template", [False, True])
@pytest.mark.parametrize("room", [800, 1400])
async def test_a_turn_that_a_full_context_ended_replays_with_its_reward_and_beside_others(
    room: int, with_template: bool
) -> None:
    spelled = HFChatTemplate(tiny_tokenizer(), tool_parser=HermesToolParser())

    def policy(call: ScriptedCall) -> str:
        return '<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>'

    client = ScriptedChatClient(policy, spelled, max_context_tokens=room)
    kwargs = {"agent": "tool", "tools": ["calculator"], "parser": "text", "max_tool_rounds": 50}
    asked = RolloutRequest(EnvSpec("two"), ProtocolSpec("multi_agent", kwargs), env_seed=1)
    envs: Mapping[str, Any] = {"two": TwoAtOnceEnv}
    running = RolloutEngine(envs, runtime=Runtime(client, spelled, "m"))
    rollouts = await running.generate_rollouts([asked], 4, 1)
    assert {r.truncation_reason for r in rollouts} == {"context_window"}
    assert rollouts[0].total_reward == -0.1, "its calls used up the room"
    assert len(rollouts[1].agent_steps) == (0 if room == 800 else 3)
    spelled_again = spelled if with_template else None
    report = await replay(rollouts, env_registry=envs, chat_template=spelled_again)
    assert report.matches, str(report.divergence)
    assert report.steps == sum(len(r.steps) for r in rollouts)


async def test_a_turn_that_tool_calls_filled_before_a_compaction_replays() -> None:
    spelled = HFChatTemplate(tiny_tokenizer(), tool_parser=HermesToolParser())

    def policy(call: ScriptedCall) -> str:
        if "Sum up." in call.tail(40):
            return "Nothing yet."
        return '<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>'

    client = ScriptedChatClient(policy, spelled)
    context = {"kind": "compacting", "window": 900, "summary_tokens": 40, "request": "Sum up."}
    kwargs = {"agent": "tool", "tools": ["calculator"], "parser": "text", "max_tool_rounds": 50}
    protocol = ProtocolSpec("single_agent", {**kwargs, "context": context})
    asked = RolloutRequest(EnvSpec("counter"), protocol, env_seed=1)
    envs: Mapping[str, Any] = {"counter": CounterEnv}
    running = RolloutEngine(envs, runtime=Runtime(client, spelled, "m"))
    [rollout] = await running.generate_rollouts([asked], 3, 1)
    assert rollout.error is None
    assert [s.info.get("compacted", False) for s in rollout.env_steps] == [False, True] * 2 + [
        False
    ]
    report = await replay(rollout, env_registry=envs)
    assert report.matches, str(report.divergence)


async def test_an_episode_that_went_on_longer_than_it_did_is_a_divergence() -> None:
    [rollout] = await play(kwargs={"tries": 9}, max_steps=3)
    cut = replace(rollout, steps=rollout.steps[:-2])
    report = await replay(cut, **REGISTRIES)
    assert not report.matches


async def test_all_rollouts_of_an_episode_are_needed() -> None:
    rollouts = await play("duel")
    with pytest.raises(RolloutError, match="pass all rollouts"):
        await replay(rollouts[0], **REGISTRIES)


async def test_rollouts_of_two_episodes_are_refused() -> None:
    rollouts = await play(num_episodes=2)
    with pytest.raises(RolloutError, match="one episode"):
        await replay(rollouts, **REGISTRIES)


@pytest.mark.parametrize("lacks", [{"env": None}, {"protocol": None}, {"env_seed": None}])
async def test_a_rollout_of_unknown_origin_is_refused(lacks: dict[str, Any]) -> None:
    [rollout] = await play()
    with pytest.raises(RolloutError, match="only rollouts of a RolloutEngine"):
        await replay(replace(rollout, **lacks), **REGISTRIES)


async def test_an_environment_that_is_gone_is_an_error_and_no_divergence() -> None:
    [rollout] = await play()

    def broken() -> Any:
        raise OSError("no such dataset")

    with pytest.raises(RolloutError, match="no such dataset"):
        await replay(rollout, env_registry={"guess": broken}, protocol_registry=protocols())
