from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from ludic.envs import build_env
from ludic.envs.adapters.verifiers import VerifiersEnv
from ludic.errors import ConfigError, EnvError
from ludic.inference import HFChatTemplate
from ludic.inference.tiny import tiny_tokenizer
from ludic.interaction import RunSpec, SingleAgentSyncProtocol
from ludic.parsers import text_parser
from ludic.plumbing.lazy import stored_names
from ludic.types import EnvSpec
from tests.agents.scripted import scripted_agent, tool_call
from tests.envs.adapters.playing import alone

pytestmark = pytest.mark.adapters


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def env(kind: str = "single", **options: Any) -> VerifiersEnv:
    return VerifiersEnv("vf-sums", args={"kind": kind}, index=3, **options)


async def test_one_turn_is_scored_by_the_rubric_and_ends() -> None:
    opening, ending = await alone(env(), ["8"])
    assert opening.obs == "What is 4 + 4?"
    assert ending.reward == 1.5
    assert ending.reward_components == {"right": 1.0, "brief": 0.5}
    assert ending.info["metrics"]["turns"] == 1.0
    assert ending.terminated
    assert not ending.truncated
    assert (await alone(env(), ["eleven, I think"]))[-1].reward == 0.0


async def test_the_rewards_are_those_that_verifiers_gives_to_the_same_conversation() -> None:
    import verifiers as vf

    bare = env("guess")._env

    class Says(vf.Client):  # type: ignore[misc]
        """A model that says these answers."""

        answers = ["1", "8"]  # noqa: RUF012

        def setup_client(self, config: Any) -> Any: ...
        async def to_native_tool(self, tool: Any) -> Any: ...
        async def to_native_prompt(self, messages: Any) -> Any:
            return messages, {}

        async def get_native_response(self, *args: Any, **kwargs: Any) -> Any:
            return self.answers.pop(0)

        async def raise_from_native_response(self, response: Any) -> None: ...

        async def from_native_response(self, response: Any) -> Any:
            message = vf.types.ResponseMessage(
                content=response, finish_reason="stop", is_truncated=False
            )
            return vf.types.Response(id="", created=0, model="m", message=message)

        async def close(self) -> None: ...

    row = dict(bare.get_dataset()[3])
    state = await bare.rollout(row, Says(None), "m", {})
    await bare.rubric.score_rollout(state)
    outcomes = await alone(env("guess"), ["1", "8"])
    assert outcomes[-1].reward == state["reward"]
    assert outcomes[-1].info["metrics"] == state["metrics"]
    assert outcomes[-1].info["stopped_by"] == state["stop_condition"]
    assert outcomes[-1].obs == "Right."


async def test_several_turns_until_the_answer_is_right() -> None:
    outcomes = await alone(env("guess"), ["1", "8"])
    assert [o.obs for o in outcomes] == ["What is 4 + 4?", "1 is wrong. Again.", "Right."]
    assert outcomes[-1].terminated


async def test_the_limit_of_turns_is_a_truncation_and_scored() -> None:
    outcomes = await alone(env("guess"), ["1", "2", "3", "4"])
    assert len(outcomes) == 4
    assert outcomes[-1].truncated
    assert not outcomes[-1].terminated
    assert outcomes[-1].reward == 0.5
    assert outcomes[-1].info["stopped_by"] == "max_turns_reached"


async def test_an_error_of_the_environment_costs_the_episode() -> None:
    with pytest.raises(EnvError, match=r"vf-sums failed: .*the environment crashed"):
        await alone(env("guess"), ["1", "crash"])


async def test_tools_are_shown_called_and_answered() -> None:
    tools = env("tools")
    calls = [tool_call("add", a=4, b=4), tool_call("add", a=4), "<tool_call>{</tool_call>", "8"]
    outcomes = await alone(tools, calls)
    assert '"name": "add"' in str(tools.suggested_sysprompt("agent"))
    assert outcomes[1].obs == "<tool_response>8</tool_response>"
    assert "missing 1 required positional argument: 'b'" in outcomes[2].obs
    assert outcomes[3].obs.startswith("<tool_response>Expecting property name")
    assert outcomes[4].info["metrics"]["add_calls"] == 2.0
    assert outcomes[4].reward == 1.5


async def test_an_agent_plays_it_with_ludics_loop_and_its_own_tokens() -> None:
    template = HFChatTemplate(tiny_tokenizer())  # the environment reads the calls, not the agent
    script = [tool_call("add", a=4, b=4), "8"]
    agent = scripted_agent(script, template=template, parser=text_parser())
    rollouts = await SingleAgentSyncProtocol(agent).run(env("tools"), RunSpec("e", env_seed=1))
    (rollout,) = rollouts
    assert rollout.error is None
    assert rollout.total_reward == 1.5
    assert rollout.task_key == "vf-sums#3"
    traces = [step.trace for step in rollout.agent_steps]
    assert all(trace is not None for trace in traces)
    assert traces[1].prompt_token_ids[: len(traces[0].prompt_token_ids)] == (  # type: ignore[union-attr]
        traces[0].prompt_token_ids  # type: ignore[union-attr]
    )


async def test_the_same_seed_is_the_same_row_also_beside_others() -> None:
    def fresh() -> VerifiersEnv:
        return VerifiersEnv("vf-sums", args={"kind": "guess"})

    first = await alone(fresh(), ["1", "8"], seed=7)
    several = await asyncio.gather(*(alone(fresh(), ["1", "8"], seed=s) for s in (7, 8, 7, 9)))
    assert several[0] == several[2] == first
    assert len({str(one) for one in several}) > 1


async def test_an_environment_by_name_and_its_evaluation_rows() -> None:
    made = build_env(EnvSpec("verifiers", {"id": "vf-sums", "split": "eval", "limit": 2}))
    assert (await alone(made, [], seed=1))[0].obs in ("What is 1 + 1?", "What is 2 + 2?")


def test_it_does_not_take_over_ctrl_c() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    VerifiersEnv("vf-sums", args={"kind": "guess", "timeout_seconds": 99.0})
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


async def test_the_environments_own_time_limit_is_a_truncation() -> None:
    hasty = VerifiersEnv("vf-sums", args={"kind": "guess", "timeout_seconds": 1e-9}, index=3)
    outcomes = await alone(hasty, ["1", "8"])
    assert len(outcomes) == 2
    assert outcomes[-1].truncated
    assert outcomes[-1].info["stopped_by"] == "timeout_reached"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"id": "vf-nowhere"}, "cannot load 'vf-nowhere'"),
        ({"id": "vf-sums", "args": {"kind": "none"}}, "there is no kind 'none'"),
        ({"id": "vf-sums", "args": {"kind": "group"}}, "comparing a group of them"),
        ({"id": "vf-sums", "split": "test"}, "must be 'train' or 'eval'"),
        ({"id": "vf-sums", "index": 5}, "has 5 rows"),
    ],
)
def test_what_cannot_be_played_is_refused_in_a_sentence(arguments: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        VerifiersEnv(**arguments)


def test_stored_data_gets_no_module_imported() -> None:
    VerifiersEnv("vf-sums")
    with stored_names():
        VerifiersEnv("vf-sums")
        with pytest.raises(ConfigError, match="named by stored data"):
            VerifiersEnv("antigravity")
    assert "antigravity" not in sys.modules
