from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from ludic.envs import build_env
from ludic.envs.adapters.reasoning_gym import ReasoningGymEnv
from ludic.errors import ConfigError, EnvError, UnknownNameError
from ludic.inference.scripted_client import ScriptedCall
from ludic.registry import make_env
from ludic.rollouts import FixedMix, RolloutEngine, RolloutRequest, Stage, Stages
from ludic.types import EnvSpec, ProtocolSpec
from tests.agents.scripted import scripted_runtime
from tests.envs.adapters.playing import alone

pytestmark = [pytest.mark.adapters, pytest.mark.filterwarnings("ignore::SyntaxWarning")]


def summed(question: str) -> str:
    return str(eval(question.partition(": ")[2].rstrip("= ")))


async def test_a_right_answer_scores_what_the_task_gives_for_it() -> None:
    outcomes = await alone(make_env("reasoning_gym", task="chain_sum"), summed, seed=3)
    assert outcomes[-1].reward == 1.0
    assert outcomes[-1].terminated
    assert outcomes[-1].info["target"] == summed(outcomes[0].obs)


async def test_the_scores_are_those_of_the_package_itself() -> None:
    import reasoning_gym

    dataset = reasoning_gym.create_dataset("propositional_logic", size=7, seed=5)
    for index in range(4):
        entry = dataset[index]
        for answer in ("", "P", "(P ∨ Q)", str(entry["metadata"].get("example_answer"))):
            env = ReasoningGymEnv("propositional_logic", size=7, dataset_seed=5, index=index)
            (opening, ending) = await alone(env, [answer])
            assert opening.obs == entry["question"]
            assert ending.reward == dataset.score_answer(answer=answer, entry=entry)


async def test_a_wrong_answer_and_one_that_the_scoring_raises_for() -> None:
    wrong = await alone(ReasoningGymEnv("chain_sum"), ["1e9"], seed=3)
    assert wrong[-1].reward == 0.0
    assert "score_error" not in wrong[-1].info
    unread = await alone(ReasoningGymEnv("prime_factorization"), ["none of them"], seed=3)
    assert unread[-1].reward == 0.0
    assert unread[-1].info["score_error"].startswith("ValueError: ")


async def test_an_episode_is_over_after_its_answer() -> None:
    env = ReasoningGymEnv("chain_sum")
    with pytest.raises(EnvError, match="reset it first"):
        env.step({"agent": "1"})
    assert len(await alone(env, ["1", "2"])) == 2


async def test_the_seed_picks_the_question_and_the_key_names_it() -> None:
    keys: dict[str, set[str]] = {}
    for seed in range(12):
        env = ReasoningGymEnv("chain_sum", size=4)
        question, _ = env.env_reset(seed=seed)
        keys.setdefault(str(env.task_key()), set()).add(question)
    assert len(keys) == 4
    assert all(len(questions) == 1 for questions in keys.values())
    others = {ReasoningGymEnv("chain_sum", **kw).env_reset(seed=1)[1]["task"] for kw in VARIANTS}
    assert len(others) == len(VARIANTS)


VARIANTS: list[dict[str, Any]] = [
    {}, {"dataset_seed": 1}, {"level": 0}, {"level": 2}, {"level": {"num_terms": 1}},
    {"config": {"max_terms": 3}}, {"index": 3},
]  # fmt: skip


async def test_questions_at_the_same_time_are_the_same_and_leave_the_generators_alone() -> None:
    before = random.getstate(), str(np.random.get_state())

    async def one(task: str, seed: int) -> str:
        env = build_env(EnvSpec("reasoning_gym", {"task": task}))
        return (await alone(env, [], seed=seed))[0].obs

    # pool_matrix seeds NumPy's generator.
    tasks = [
        (task, seed) for seed in (1, 2) for task in ("pool_matrix", "chain_sum", "mini_sudoku")
    ]
    together = await asyncio.gather(*(one(*task) for task in tasks * 2))
    assert together[: len(tasks)] == together[len(tasks) :]
    assert together[: len(tasks)] == [await one(*task) for task in tasks]
    assert (random.getstate(), str(np.random.get_state())) == before


async def test_a_mix_of_tasks_is_scored_by_the_task_of_each_question() -> None:
    parts: list[dict[str, Any]] = [
        {"name": name, "weight": 1, "config": {}} for name in ("chain_sum", "leg_counting")
    ]
    seen = set()
    for index in range(8):
        env = ReasoningGymEnv("composite", config={"datasets": parts}, index=index)
        question, _ = env.env_reset()
        target = env._entry["answer"]
        seen.add("legs" in question)
        assert env.env_step(target).reward == 1.0
    assert seen == {True, False}


def test_levels_are_those_of_the_task_and_rise() -> None:
    def digits(level: Any) -> int:
        env = ReasoningGymEnv("chain_sum", level=level)
        return sum(c.isdigit() for s in range(10) for c in env.env_reset(seed=s)[0])

    assert digits(0) < digits(3) < digits(6)
    assert digits(0) < digits({"num_digits": 4}) < digits({"num_digits": 4, "num_terms": 4})


async def test_a_curriculum_moves_on_to_the_next_level_once_this_one_is_solved() -> None:
    can_add = False

    def answer(call: ScriptedCall) -> str:
        question = call.text.partition("problem: ")[2].partition("<|im_end|>")[0]
        return summed(f"problem: {question}") if can_add else "?"

    engine = RolloutEngine(runtime=scripted_runtime(answer))

    def level(number: int) -> FixedMix:
        spec = EnvSpec("reasoning_gym", {"task": "chain_sum", "level": number})
        request = RolloutRequest(spec, ProtocolSpec("single_agent", {}))
        return FixedMix({f"level {number}": (request, 1.0)})

    stages = Stages([Stage(level(0), solve_rate=0.5, window=4), Stage(level(3))])
    reached = []
    for can_add in (False, True, True):
        rollouts = await engine.generate_rollouts(stages.next_requests(4))
        assert {r.total_reward for r in rollouts} == {float(can_add)}
        reached.append({str(r.task_key).partition("/")[0] for r in rollouts})
        stages.report(rollouts)
    assert reached == [{"chain_sum@0"}, {"chain_sum@0"}, {"chain_sum@3"}]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"task": "chain_sum", "level": -1}, "levels begin at 0"),
        ({"task": "chain_sum", "level": {"depth": 1}}, "its attributes are .'num_terms'"),
        ({"task": "acre", "level": 1}, "has no levels"),
        ({"task": "chain_sum", "config": {"depth": 1}}, "cannot make 'chain_sum'"),
        ({"task": "composite"}, "cannot make 'composite'"),
        ({"task": "chain_sum", "index": 5, "size": 5}, "index 5 of a task with size=5"),
        ({"task": "chain_sum", "template": "?"}, "no place for"),
    ],
)
def test_what_cannot_be_made_is_refused_in_a_sentence(arguments: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ReasoningGymEnv(**arguments)


def test_an_unknown_task_names_those_that_are_near() -> None:
    with pytest.raises(UnknownNameError, match="'chain_sum'"):
        ReasoningGymEnv("chainsum")
