"""The environment: rewards, attempts, feedback, the cache, and answers that are no programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ludic.envs.code_exec import (
    CodeExecEnv,
    FunctionTask,
    IOCase,
    ResultCache,
    SandboxError,
    SandboxUnavailableError,
    StdioTask,
    extract_code,
)
from ludic.envs.code_exec.judge import fingerprint
from ludic.envs.code_exec.sandbox import pool as sandbox_pool
from ludic.envs.code_exec.tasks import humaneval_task, mbpp_task, stdio_task
from ludic.errors import ConfigError, EnvError, UnknownNameError
from ludic.plumbing.lazy import stored_names
from ludic.registry import list_envs, make_env
from ludic.rollouts import EnvSpec, ProtocolSpec, RolloutEngine, RolloutRequest
from ludic.types import StepOutcome

pytestmark = [pytest.mark.integration]

DOUBLE = {
    "prompt": "Double the number.",
    "inputs": ["1\n", "2\n", "3\n"],
    "outputs": ["2", "4", "6"],
}
RIGHT = "Here it is:\n```python\nprint(2 * int(input()))\n```\n"
ONE_RIGHT = "```\nprint(2)\n```"


def env_of(**options: Any) -> CodeExecEnv:
    return CodeExecEnv(rows=[DOUBLE], **{"workers": 2, **options})


def step(env: CodeExecEnv, answer: str) -> StepOutcome:
    outcomes = env.step({"agent": answer})
    assert isinstance(outcomes, Mapping)
    return outcomes["agent"]


def answered(env: CodeExecEnv, answer: str) -> StepOutcome:
    env.reset(seed=0)
    return env.env_step(answer)


@pytest.mark.sandbox
def test_all_or_nothing_and_partial_credit() -> None:
    assert answered(env_of(), RIGHT).reward == 1.0
    assert answered(env_of(), ONE_RIGHT).reward == 0.0
    outcome = answered(env_of(reward="partial"), ONE_RIGHT)
    assert outcome.reward == pytest.approx(1 / 3)
    assert outcome.terminated
    assert outcome.info["result"] == "failed"
    assert (outcome.info["tests_passed"], outcome.info["tests"]) == (1, 3)


@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ("", "no_code"),
        ("  \n\t ", "no_code"),
        ("```python\n```", "no_code"),
        ("def f(:", "no_compile"),
        ("I do not know.", "no_compile"),
        ("print(1)\x00", "no_compile"),
        ("\x7fELF\x02\x01\x01", "no_compile"),
        ("print('\ud800')", "no_compile"),
        ("x = 1\n" * 500_000, "too_long"),
        ("(" * 5000, "no_compile"),
    ],
    ids=["empty", "blank", "empty block", "syntax", "prose", "null", "binary", "not utf-8",
         "megabytes", "deep"],
)  # fmt: skip
def test_an_answer_that_is_no_program_ends_the_episode_with_the_penalty(
    answer: str, outcome: str
) -> None:
    result = answered(env_of(compile_penalty=0.5), answer)
    assert result.info["result"] == outcome
    assert result.terminated
    assert result.reward == -0.5
    assert result.reward_components == {"tests": 0.0, "compile": -0.5}


@pytest.mark.sandbox
def test_a_program_that_crashes_is_no_compile_error() -> None:
    outcome = answered(env_of(compile_penalty=0.5), "print(1 / 0)")
    assert outcome.info["result"] == "crashed"
    assert outcome.reward == 0.0
    reads_code = "n = int(input())\neval('1 2') if n == 3 else print(2 * n)"
    outcome = answered(env_of(compile_penalty=0.5, reward="partial"), reads_code)
    assert outcome.info["result"] == "crashed"
    assert outcome.reward == pytest.approx(2 / 3)
    outcome = answered(env_of(limits={"wall_s": 0.5}), "while True: pass")
    assert outcome.info["result"] == "crashed"
    assert outcome.info["status"] == "wall_time"


@pytest.mark.sandbox
def test_the_agent_sees_errors_and_may_try_again() -> None:
    env = env_of(max_attempts=3)
    env.reset(seed=0)
    first = step(env, "print(undefined)")
    assert not first.terminated
    assert "NameError: name 'undefined' is not defined" in first.obs
    assert "test 1 of 3" in first.obs
    second = step(env, ONE_RIGHT)
    assert "Wrong output in test 2 of 3" in second.obs
    assert "4" not in second.obs.replace("test 2 of 3", "")
    last = step(env, RIGHT)
    assert last.terminated
    assert last.reward == 1.0
    with pytest.raises(EnvError, match="reset"):
        step(env, RIGHT)


@pytest.mark.sandbox
def test_feedback_can_be_the_verdict_alone() -> None:
    env = env_of(max_attempts=2, feedback="verdict")
    env.reset(seed=0)
    assert env.env_step("1 / 0").obs == "Not all tests passed.\nTry again."


@pytest.mark.sandbox
def test_expected_outputs_do_not_reach_the_solution() -> None:
    row = {"prompt": "", "inputs": ["x"], "outputs": ["expected-" + "8341"]}
    look = """
import os, sys
seen = []
for root, _, names in os.walk("/tmp"):
    for name in names:
        seen.append(open(os.path.join(root, name), "rb").read())
seen += [str(os.environ).encode(), open("/proc/self/cmdline", "rb").read(), str(sys.argv).encode()]
print("expected-" + "8341" if any(b"expected-" + b"8341" in s for s in seen) else "nothing")
"""
    env = CodeExecEnv(rows=[row], workers=2)
    assert answered(env, look).reward == 0.0


@pytest.mark.sandbox
def test_the_same_answer_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    env = env_of()
    unique = f"# {id(env)}\nprint(2 * int(input()))"
    assert answered(env, unique).reward == 1.0
    monkeypatch.setattr(type(env._judge.pool), "run", lambda *a, **k: 1 / 0)
    assert answered(env, unique).reward == 1.0
    with pytest.raises(ZeroDivisionError):
        answered(env_of(verifier="exact"), unique)
    with pytest.raises(ZeroDivisionError):
        answered(env_of(cache=False), unique)


def test_errors_of_the_sandbox_are_not_cached() -> None:
    cache: ResultCache[int] = ResultCache(max_entries=2)

    def fails() -> int:
        raise SandboxError("gone")

    with pytest.raises(SandboxError):
        cache.get(b"a", fails)
    assert cache.get(b"a", lambda: 1) == 1
    assert cache.get(b"a", fails) == 1
    for key in (b"b", b"c"):
        cache.get(key, lambda: 2)
    assert len(cache) == 2
    assert cache.get(b"a", lambda: 3) == 3
    assert fingerprint("a", 1) != fingerprint("a", "1") != fingerprint("a1")


def test_tasks_without_tests_or_columns_are_refused() -> None:
    with pytest.raises(EnvError, match="no cases"):
        stdio_task({"id": 7, "question": "", "input_output": '{"inputs": [], "outputs": []}'})
    with pytest.raises(EnvError, match="no tests"):
        FunctionTask("p", "f", ())
    with pytest.raises(EnvError, match="1 inputs and 0 outputs"):
        stdio_task({"question": "", "inputs": ["1"], "outputs": []})
    with pytest.raises(EnvError, match="not JSON"):
        stdio_task({"question": "", "input_output": "{"})
    with pytest.raises(EnvError, match="'prompt'"):
        humaneval_task({"entry_point": "f"})


def test_rows_become_tasks() -> None:
    apps = {"problem_id": 3, "question": "q", "input_output": json.dumps({"inputs": [["1", "2"]], "outputs": ["3\n"]})}  # fmt: skip  # noqa: E501
    assert stdio_task(apps) == StdioTask("q", (IOCase("1\n2", "3\n"),), None, "3")
    mbpp = {"task_id": 2, "text": "Write f.", "test_list": ["assert set(shared((1, 2), (2,))) == {2}"], "test_setup_code": "import math"}  # fmt: skip  # noqa: E501
    task = mbpp_task(mbpp)
    assert task.entry_point == "shared"
    assert "import math" in task.setup


def test_code_is_found_in_an_answer() -> None:
    assert extract_code("x = 1") == "x = 1"
    assert extract_code("a\n```\nx\n```\nb\n```python\ny\n```\n```text\nz\n```") == "y\n"
    rust = "```rust\nx\n```\n```python\ny\n```\n```text\nz\n```"
    assert extract_code(rust) == "y\n"
    assert extract_code(rust, ("rust", "rs")) == "x\n"
    assert extract_code("```\nx = '```'\n```") == "x = '```'\n"
    assert extract_code("```py\r\nx\r\n```") == "x\n"
    assert extract_code("```python\nnever closed") == "```python\nnever closed"


def test_bad_settings_are_refused_when_it_is_made() -> None:
    for options, wrong in (
        ({"reward": "some"}, "reward"),
        ({"feedback": "all"}, "feedback"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"template": "x"}, "template"),
        ({"limits": {"ram": 1}}, "ram"),
        ({"verifier": "close"}, "verifier"),
        ({"adapter": "stdoi"}, "stdio"),
    ):
        with pytest.raises((ConfigError, UnknownNameError), match=wrong):
            env_of(**options)


def test_stored_data_gets_no_weaker_sandbox_and_no_function() -> None:
    with stored_names():
        env_of()
        with pytest.raises(ConfigError, match="stored data asks for the sandbox 'plain'"):
            env_of(sandbox="plain")
        with pytest.raises(ConfigError, match="stored data"):
            env_of(adapter="json:loads")


def test_it_is_registered_by_name() -> None:
    assert "sandbox" in list_envs()["code_exec"]
    assert isinstance(make_env("code_exec", rows=[DOUBLE]), CodeExecEnv)


REQUEST = RolloutRequest(
    env=EnvSpec("code_exec", {"rows": [DOUBLE]}),
    protocol=ProtocolSpec("single_agent", {}),
)


async def rollouts(answers: list[str]) -> Any:
    from ludic.inference import HFChatTemplate, ScriptedChatClient
    from ludic.inference.tiny import tiny_tokenizer
    from ludic.interaction import Runtime

    template = HFChatTemplate(tiny_tokenizer())
    runtime = Runtime(ScriptedChatClient(answers, template), template, "script")
    return await RolloutEngine(runtime=runtime, seed=0).generate_rollouts([REQUEST], max_steps=3)


@pytest.mark.sandbox
async def test_an_episode_runs_to_its_end() -> None:
    (rollout,) = await rollouts([RIGHT])
    assert rollout.error is None
    assert rollout.steps[-1].info["result"] == "passed"


async def test_a_sandbox_that_is_missing_stops_the_run_with_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing() -> bool:
        raise SandboxUnavailableError("no bwrap here")

    monkeypatch.setattr(sandbox_pool, "check_bubblewrap", missing)
    monkeypatch.setattr("ludic.envs.code_exec.sandbox.pool._shared", {})
    with pytest.raises(SandboxUnavailableError, match=r"no bwrap here.*asked for by name"):
        await rollouts([RIGHT])


async def test_a_sandbox_that_fails_costs_one_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def attempt(self, *args: Any, **kwargs: Any) -> Any:
            raise SandboxError("the sandbox fell over")

        run = attempt

    monkeypatch.setattr("ludic.envs.code_exec.env.shared_pool", lambda *args: Failing())
    found = await rollouts(["```\nprint('never tried before')\n```"])
    (error,) = (rollout.error for rollout in found)
    assert error is not None
    assert error.startswith("SandboxError: the sandbox fell over (")


def test_rows_come_from_a_file_too(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({**DOUBLE, "id": "double"}) + "\n")
    assert CodeExecEnv(path=str(path)).num_rows() == 1
