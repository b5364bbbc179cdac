"""Who plays in a run besides the policy, and which of its environments come when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import ludic
from ludic.errors import LudicError
from ludic.rollouts import TargetSolveRate, read_rollouts
from ludic.runs.players.curriculum import make_curriculum
from ludic.runs.run import Run
from ludic.types import StepOutcome
from tests.inference.vllm.fake_server import FakeVLLM
from tests.runs.test_other_models import from_file, pair
from tests.runs.test_run import WORDS, small
from tests.runs.worlds import Letters

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]


class Pair(ludic.LudicEnv[str, str, str]):
    """Two say something at once; it is worth nothing."""

    blocking = False

    @property
    def agent_ids(self) -> list[str]:
        return ["x", "y"]

    @property
    def active_agents(self) -> list[str]:
        return ["x", "y"]

    def current_obs(self) -> dict[str, str]:
        return dict.fromkeys(self.agent_ids, "A or B?")

    def reset(self, *, seed: int | None = None) -> dict[str, tuple[str, dict[str, Any]]]:
        return {seat: ("A or B?", {}) for seat in self.agent_ids}

    def step(self, actions: Any) -> dict[str, StepOutcome]:
        return {seat: StepOutcome("", 1.0, terminated=True) for seat in self.agent_ids}


class Easy(Letters):
    """Solved whatever is said."""

    def env_step(self, action: str) -> StepOutcome:
        return StepOutcome("", 1.0, terminated=True)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


STOPS = f"inference.sampling.stop_token_ids={list(range(4, 256))}"
GROUPS = "algorithm.kwargs.group_size=2"
SEATS = """
[protocol]
kind = "multi_agent"
[protocol.kwargs.seats.y]
client = "rival"
"""


def rollouts(run: Run) -> list[Any]:
    return list(read_rollouts(run.folder.rollouts / "train.jsonl.zst"))


def test_an_opponent_is_another_model_and_leaves_no_rollout() -> None:
    model, tokenizer = pair(5)
    model.save_pretrained("saved")
    tokenizer.save_pretrained("saved")
    rival = '[[player]]\nname = "rival"\nmodel = "saved"\ntemperature = 0.5\n'
    kind = "env.kind=tests.runs.test_players:Pair"
    run = from_file(SEATS + rival, kind, GROUPS, STOPS)
    assert run.runtime.others["rival"].inference.sampling.temperature == 0.5
    run.go()
    assert {r.agent_id for r in rollouts(run)} == {"x"}
    assert {r.error for r in rollouts(run)} == {None}
    report = ludic.evaluate("run", episodes=2)
    assert not any(episode.error for episode in report.episodes)


async def test_an_opponent_is_a_model_behind_a_server() -> None:
    async def tokenize(request: web.Request) -> Any:
        from ludic.inference.tiny import tiny_tokenizer

        text = (await request.json())["prompt"]
        return {"tokens": tiny_tokenizer(words=WORDS).encode(text, add_special_tokens=False)}

    async with FakeVLLM(faults={"/tokenize": tokenize}).serving() as fake:
        run = ludic.Run(
            Pair,
            **small(out="run"),
            protocol={"kind": "multi_agent", "kwargs": {"seats": {"y": {"client": "rival"}}}},
            player={"name": "rival", "server": fake.url, "max_tokens": 3},
        )
        await run.go_async()
        assert all(body["model"] == "tiny" for body in fake.bodies if body)
        assert len(fake.bodies) > 8
    assert {r.error for r in rollouts(run)} == {None}


async def test_a_judge_is_a_model_behind_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    asked: list[Any] = []

    async def chat(request: web.Request) -> Any:
        asked.append((request.headers.get("Authorization"), await request.json()))
        message = {"role": "assistant", "content": "Fine. <score>7</score>"}
        return {"choices": [{"message": message, "finish_reason": "stop"}]}

    rows = [{"question": "A or B?", "answer": "A"}] * 4
    async with FakeVLLM(faults={"/v1/chat/completions": chat}).serving() as fake:
        judge = {"kind": "judge", "server": f"{fake.url}/v1", "model": "big"}
        judge |= {"rubric": "Be right.", "api_key_env": "JUDGE_KEY"}
        env = {"kind": "dataset_qa", "kwargs": {"rows": rows, "rewards": judge}}
        sampling = {"max_tokens": 2, "stop_token_ids": list(range(4, 256))}
        inference = {**small()["inference"], "sampling": sampling}
        run = ludic.Run(env, **small(inference=inference, out="run"))
        await run.go_async()
    assert asked
    assert {key for key, _ in asked} == {"Bearer secret"}
    assert 0.7 in {r.total_reward for r in rollouts(run)}


STAGES = """
[[env]]
kind = "tests.runs.test_players:Easy"
name = "easy"
[curriculum]
kind = "stages"
[[curriculum.stage]]
envs = ["easy"]
episodes = 4
[[curriculum.stage]]
envs = ["tests.runs.worlds:Letters", "easy"]
"""


def test_stages_come_one_after_the_other() -> None:
    run = from_file(STAGES, GROUPS).go()
    names = [r.meta["curriculum"] for r in rollouts(run)]
    assert names[:4] == ["easy"] * 4
    assert set(names[4:]) == {"easy", "tests.runs.worlds:Letters"}
    assert {r.meta["stage"] for r in rollouts(run)} == {0, 1}


def test_an_adaptive_curriculum_follows_what_is_solved() -> None:
    adaptive = STAGES[: STAGES.index("[[curriculum")].replace("stages", "target_solve_rate")
    more = ["training.steps=6", "curriculum.learning_rate=1.0", "curriculum.floor=0.0", STOPS]
    run = from_file(adaptive, GROUPS, *more, "curriculum.width=0.5").go()
    assert isinstance(run.seating.curriculum, TargetSolveRate)
    rates = run.seating.curriculum.solve_rates
    assert rates.keys() == {"easy", "tests.runs.worlds:Letters"}
    assert rates["easy"] != 0.5
    fixed = from_file(adaptive, GROUPS, "curriculum.tasks_per_env=3", out="fixed")
    curriculum = make_curriculum(fixed.config, fixed.algorithm, seed=0)
    assert isinstance(curriculum, TargetSolveRate)
    assert len(curriculum.probabilities()) == 6


def test_spo_draws_the_least_certain_tasks() -> None:
    text = '[algorithm]\nname = "spo"\nkwargs = { returns = [-1, 1] }\n[curriculum]\n'
    run = from_file(text + 'kind = "uncertain"\ntasks_per_env = 3\n').go()
    assert {r.task_key.partition("#")[0] for r in rollouts(run)} == {"tests.runs.worlds:Letters"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (SEATS, "unknown client 'rival'"),
        (
            SEATS + '[[player]]\nname = "rivals"\nmodel = "tiny"\n',
            "unknown client 'rival'; did you mean 'rivals'",
        ),
        ('[[player]]\nname = "rival"\nmodel = "tiny"\n', "player 'rival' has no seat"),
        (
            SEATS + '[[player]]\nname = "rival"\nmodel = "tiny"\n' * 2,
            "two players are called 'rival'",
        ),
        (SEATS + '[[player]]\nname = "rival"\nmodel = "start"\n', "past_opponents"),
        (SEATS + '[[player]]\nnam = "rival"\nmodel = "tiny"\n', "did you mean 'name'"),
        (
            SEATS + '[[player]]\nname = "rival"\nserver = "http://a"\napi = "openai"\n',
            "served_name",
        ),
        (STAGES.replace('["easy"]', '["eazy"]'), "stage 1, 'eazy'; did you mean 'easy'"),
        (STAGES.replace("episodes = 4", ""), "stage 0 never ends"),
        (STAGES.replace('"stages"', '"stage"'), "curriculum.kind.*'stages'"),
        (STAGES.replace('"stages"', '"mix"'), "set it to 'stages', or leave stage out"),
        ('[curriculum]\nkind = "stages"\n', r"add \[\[curriculum.stage\]\]"),
        ('[curriculum]\nkind = "uncertain"\n', "algorithm.name='spo'"),
        ('[curriculum]\ntarget = 2.0\nkind = "target_solve_rate"\n', "curriculum.target"),
        ("[curriculum]\ntarget = 0.4\n", "set it to 'target_solve_rate'"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(text: str, said: str) -> None:
    overrides = ["env.kind=tests.runs.test_players:Pair"] if "protocol" in text else []
    with pytest.raises(LudicError, match=said):
        from_file(text, GROUPS, *overrides)
    assert not Path("run").exists()
