"""What a scripted teacher is called with, and how a run spells its conversations."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random
from typing import Any

import pytest

import ludic
from ludic.errors import ConfigError, RolloutError
from ludic.inference.tiny import tiny_tokenizer
from ludic.registry import ENVS
from ludic.rollouts import read_rollouts
from ludic.runs.check import check_parts
from ludic.runs.episodes import with_template
from ludic.runs.model import build_model
from ludic.runs.players.teacher import load_teacher, write_lessons
from ludic.runs.results.terminal import episode_text
from ludic.runs.settings import RunConfig, load_run, parse_run

RUN = """
[inference.sampling]
max_tokens = 256
[env]
kind = "higher"
[protocol]
kwargs = { parser = { kind = "xml", tag = "move" }, system_prompt = "From 1 to 100." }
[sft]
teacher = "tests.runs.test_teacher:%s"
examples = 6
"""
SEEN: list[tuple[str, Any]] = []


class Higher(ludic.SingleAgentEnv):
    """A number is guessed; an observation says only which side of the last guess it is on."""

    blocking = False

    def env_reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.number = Random(seed).randint(1, 100)
        return "Your guess?", {}

    def env_step(self, action: str) -> ludic.StepOutcome:
        guess = int(action)
        if guess == self.number:
            return ludic.StepOutcome("Right.", 1.0, terminated=True)
        return ludic.StepOutcome("It is higher." if guess < self.number else "It is lower.", 0.0)

    def env_current_obs(self) -> str:
        return ""


def halving(obs: str, rng: Random, history: list[dict[str, Any]]) -> str:
    SEEN.append((obs, [dict(message) for message in history]))
    low, high = 1, 100
    heard = [m["content"] for m in history if m["role"] == "user"] + [obs]
    guesses = [m["content"] for m in history if m["role"] == "assistant"]
    for guess, answer in zip(guesses, heard[1:], strict=True):
        number = int(re.findall(r"\d+", guess)[0])
        low, high = (number + 1, high) if "higher" in answer else (low, number - 1)
    history.clear()  # what a teacher does to it is its own matter
    return f"<move>{(low + high) // 2}</move>"


def as_before(obs: str, rng: Random, certainty: float = 1.0) -> str:
    assert certainty == 1.0
    return f"<move>{rng.randint(1, 100)}</move>"


def calling(obs: str, rng: Random) -> str:
    if obs == "Your guess?":
        call = '{"name": "calculator", "arguments": {"expression": "25 + 25"}}'
        return f"Half of it. <tool_call>{call}</tool_call>"
    return f"<move>{obs if obs.isdigit() else rng.randint(1, 100)}</move>"


def too_much(obs: str, rng: Random, memory: list[Any]) -> str:
    return ""


@pytest.fixture
def higher() -> Any:
    SEEN.clear()
    ENVS.register("higher", Higher)
    yield
    ENVS.unregister("higher")


async def lessons(tmp_path: Path, name: str, **protocol: Any) -> list[Any]:
    config: RunConfig = parse_run(RUN % name)
    kwargs = {**config.protocol.kwargs, **protocol}
    changed = config.protocol.model_copy(update={"kwargs": kwargs})
    config = config.model_copy(update={"protocol": changed})
    await write_lessons(config, tiny_tokenizer(), tmp_path / "lessons.jsonl")
    return list(read_rollouts(tmp_path / "lessons.jsonl"))


@pytest.mark.usefixtures("higher")
async def test_a_teacher_with_the_history_shows_a_strategy(tmp_path: Path) -> None:
    rollouts = await lessons(tmp_path, "halving")
    assert len(rollouts) == 6
    assert all(r.total_reward == 1 and len(list(r.turns())) <= 7 for r in rollouts)
    first, later = SEEN[0], next(seen for seen in SEEN if len(seen[1]) > 2)
    assert first == ("Your guess?", [{"role": "system", "content": "From 1 to 100."}])
    assert [message["role"] for message in later[1]] == ["system", "user", "assistant"]
    assert later[1][2]["content"] == "<move>50</move>"


@pytest.mark.usefixtures("higher")
async def test_a_teacher_beside_tools_hears_as_much(tmp_path: Path) -> None:
    rollouts = await lessons(tmp_path, "halving", agent="tool", tools=["calculator"])
    assert all(rollout.total_reward == 1 for rollout in rollouts)


@pytest.mark.usefixtures("higher")
async def test_a_teachers_tool_calls_are_run_and_shown_in_its_episodes(tmp_path: Path) -> None:
    rollouts = await lessons(tmp_path, "calling", agent="tool", tools=["calculator"])
    shown = episode_text(rollouts[0]).plain
    called = shown.index("calls: calculator(expression='25 + 25')")
    assert called < shown.index("tool: 50") < shown.index("model: <move>50</move>")


def long_winded(obs: str, rng: Random) -> str:
    return f"Let me think about {obs}" + " again" * 60 + " <move>1</move>"


@pytest.mark.usefixtures("higher")
async def test_answers_of_a_teacher_that_would_be_cut_are_no_lessons(tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match=r"teacher's answer takes more than 256 tokens: raise"):
        await lessons(tmp_path, "long_winded")
    assert not (tmp_path / "lessons.jsonl").exists()


@pytest.mark.usefixtures("higher")
async def test_a_teacher_of_two_arguments_is_called_as_before(tmp_path: Path) -> None:
    rollouts = await lessons(tmp_path, "as_before")
    assert not any(rollout.error for rollout in rollouts)


def test_a_misspelt_teacher_gets_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'halving'"):
        load_teacher("tests.runs.test_teacher:halvin")


def test_a_teacher_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"is called with the observation.*'memory'"):
        load_teacher("tests.runs.test_teacher:too_much")


async def test_a_run_may_bring_its_own_chat_template(tmp_path: Path) -> None:
    shown = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    (tmp_path / "plain.jinja").write_text(shown + "<|im_start|>assistant: ")
    (tmp_path / "run.toml").write_text(
        '[model]\nchat_template = "plain.jinja"\n[env]\nkind = "key_door"\n'
    )
    config = load_run(tmp_path / "run.toml")
    _, tokenizer = build_model(config)
    spelled = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert spelled == "<|im_start|>user: hi<|im_end|><|im_start|>assistant: "

    given = tiny_tokenizer()
    before = given.chat_template
    assert with_template(config, given).chat_template.startswith("{% for m in")
    assert given.chat_template == before  # the script's own is left as it is


def test_a_chat_template_that_is_not_there_is_named_before_anything_is_loaded(
    tmp_path: Path,
) -> None:
    (tmp_path / "run.toml").write_text(
        '[model]\nname = "no/such-model"\nchat_template = "gone.jinja"\n[env]\nkind = "key_door"\n'
    )
    with pytest.raises(ConfigError, match=r"model.chat_template=.*gone\.jinja.*cannot be read"):
        check_parts(load_run(tmp_path / "run.toml"))
