"""The deadlines of a run file hold for every kind of episode that a run plays."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ludic.envs import SingleAgentEnv
from ludic.errors import RolloutError
from ludic.registry import ENVS
from ludic.runs.episodes import evaluate_policy
from ludic.runs.players.teacher import write_lessons
from ludic.runs.playing import generate_file, open_policy
from ludic.runs.settings import RunConfig, parse_run
from ludic.types import StepOutcome

RUN = """
[env]
kind = "slow"
[inference.sampling]
max_tokens = 1
[sft]
teacher = "builtins:max"
examples = 2
[eval]
episodes = 2
"""


class Slow(SingleAgentEnv):
    """Takes longer to begin than anybody waits."""

    def env_reset(self, *, seed=None):  # type: ignore[no-untyped-def]
        time.sleep(2)
        return "Go.", {}

    def env_step(self, action: str) -> StepOutcome:
        return StepOutcome("Gone.", 1.0, terminated=True)

    def env_current_obs(self) -> str:
        return "Go."


@pytest.fixture
def config() -> Iterator[RunConfig]:
    ENVS.register("slow", Slow)
    yield parse_run(RUN, ["training.step_timeout_s=0.05"])
    ENVS.unregister("slow")


async def test_an_evaluation_does_not_wait_longer(config: RunConfig) -> None:
    async with open_policy(config) as policy:
        report = await evaluate_policy(config, policy.runtime, name="slow")
    assert [e.error is not None and "0.05 s" in e.error for e in report.episodes] == [True, True]


async def test_a_teacher_does_not_wait_longer(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ludic.runs.players.teacher.load_function", lambda _: lambda obs, rng: "x")
    async with open_policy(config) as policy:
        with pytest.raises(RolloutError, match=r"every episode of the teacher failed.*0\.05 s"):
            await write_lessons(config, policy.tokenizer, tmp_path / "lessons.jsonl")
    assert not (tmp_path / "lessons.jsonl").exists()


async def test_generating_does_not_wait_longer(tmp_path: Path, config: RunConfig) -> None:
    (tmp_path / "slow.toml").write_text(RUN)
    run = str(tmp_path / "slow.toml")
    overrides = ["training.episode_timeout_s=0.05"]
    counts = await generate_file(run, overrides, output=tmp_path / "out.jsonl", episodes=2, keep=[])
    assert counts == {"kept": 0, "failed": 2}
    with pytest.raises(RolloutError, match=r"0\.05 s"):
        await generate_file(run, overrides, output=tmp_path / "more.jsonl", episodes=9, keep=[])
