"""Evaluators play held-out seeds, judge whom they are told to, and repeat themselves."""

from __future__ import annotations

import re
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from ludic.envs.tic_tac_toe import TwoPlayerTicTacToeEnv
from ludic.eval import Evaluator, RolloutEvaluator, eval_requests, proportion, run_eval
from ludic.inference import HFChatTemplate, ScriptedChatClient
from ludic.inference.scripted_client import ScriptedCall
from ludic.inference.tiny import tiny_tokenizer
from ludic.interaction import Runtime
from ludic.rollouts import RolloutEngine, RolloutRequest
from ludic.rollouts.engine import Progress
from ludic.types import EnvSpec, ProtocolSpec

PARSER = {"parser": {"kind": "xml", "tag": "move"}}
ONE = RolloutRequest(EnvSpec("tic_tac_toe"), ProtocolSpec("single_agent", PARSER))
TWO = RolloutRequest(EnvSpec("tic_tac_toe_two_player"), ProtocolSpec("multi_agent", PARSER))


def random_move(call: ScriptedCall) -> str:
    free = re.findall("[ABC][123]", call.text.rpartition("Free:")[2])
    return f"<move>{Random(call.request.sampling.seed).choice(free)}</move>"


def engine(script: object = random_move) -> RolloutEngine:
    template = HFChatTemplate(tiny_tokenizer())
    client = ScriptedChatClient(script, template)  # type: ignore[arg-type]
    return RolloutEngine(runtime=Runtime(client, template, "script"))


def test_requests_have_seeds_of_their_own_and_samples_of_a_task_share_the_environments() -> None:
    requests = eval_requests(ONE, 12, seed=4, samples_per_task=3)
    assert len({r.sampling_seed for r in requests}) == 12
    assert len({r.env_seed for r in requests}) == 4
    assert [r.env_seed for r in requests[:3]] == [requests[0].env_seed] * 3
    assert eval_requests(ONE, 12, seed=4, samples_per_task=3) == requests
    assert not {r.env_seed for r in requests} & {r.env_seed for r in eval_requests(ONE, 12, seed=5)}


async def test_an_evaluation_repeats_itself_at_any_concurrency() -> None:
    def play(concurrency: int) -> object:
        return run_eval(
            engine(), ONE, episodes=10, max_steps=9, seed=1, concurrency=concurrency, name="e"
        )

    first = await play(1)  # type: ignore[misc]
    assert await play(10) == first  # type: ignore[misc]
    assert len(first.episodes) == 10
    assert {e.outcome for e in first.episodes} <= {"win", "draw", "loss"}


async def test_what_does_not_parse_or_end_stays_in_the_denominator() -> None:
    report = await run_eval(
        engine(lambda call: "no"), ONE, episodes=5, max_steps=2, outcomes=["win"]
    )
    assert report.success.value == 0.0
    assert report.rates()["parse_failure"].value == 1.0
    assert report.rates()["truncated"].value == 1.0
    assert all(e.truncation == "max_steps" for e in report.episodes)


async def test_a_bar_says_how_far_the_evaluation_is(capsys: pytest.CaptureFixture[str]) -> None:
    await run_eval(engine(), TWO, episodes=3, max_steps=9, name="held out")
    printed = capsys.readouterr()
    assert "held out" in printed.err
    assert "3/3" in printed.err
    assert not printed.out
    seen: list[int] = []
    await run_eval(
        engine(), TWO, episodes=3, max_steps=9, on_progress=lambda p: seen.append(p.finished)
    )
    assert seen[-1] == 3
    assert not capsys.readouterr().err


async def test_accuracy_is_the_other_name_of_success() -> None:
    report = await run_eval(engine(), TWO, episodes=3, max_steps=9)
    figures = report.metrics()
    assert figures["eval/accuracy"] == figures["eval/success"] == report.success.value
    assert figures["eval/X/accuracy"] == figures["eval/X/success"]


async def test_success_is_the_ending_that_counts_in_each_environment() -> None:
    rows = [{"question": "2+2?", "answer": "4"}]
    question = RolloutRequest(EnvSpec("dataset_qa", {"rows": rows}), ONE.protocol)
    requests = [
        replace(request, meta={"env": env})
        for env, template in (("game", ONE), ("question", question))
        for request in eval_requests(template, 6, seed=0)
    ]

    def script(call: ScriptedCall) -> str:
        return random_move(call) if "Free:" in call.text else "<move>4</move>"

    report = await RolloutEvaluator(engine(script), requests, max_steps=9).evaluate()
    won = report.envs()["game"].outcome("win").value
    assert report.envs()["game"].success.value == won
    assert report.envs()["question"].success.value == 1.0
    assert report.success.value == pytest.approx((won + 1) / 2)


async def test_a_seat_can_be_judged_alone() -> None:
    requests = eval_requests(TWO, 6, seed=0)
    both = RolloutEvaluator(engine(), requests, max_steps=9)
    only_x = RolloutEvaluator(engine(), requests, max_steps=9, agent_id="X")
    report = await both.evaluate()
    assert len(report.episodes) == 12
    assert {role: alone.success.n for role, alone in report.by_role().items()} == {"X": 6, "O": 6}
    assert report.success.n == 6
    assert (await only_x.evaluate()).episodes == report.by_role()["X"].episodes


async def test_an_episode_that_failed_before_anybody_sat_down_counts_for_every_seat() -> None:
    made = iter(range(100))

    def game() -> TwoPlayerTicTacToeEnv:
        if next(made) == 1:
            raise RuntimeError("no board")
        return TwoPlayerTicTacToeEnv()

    def playing(**options: Any) -> RolloutEvaluator:
        broken = engine()
        broken = RolloutEngine({"game": game}, runtime=broken.runtime)
        requests = [replace(r, env=EnvSpec("game")) for r in eval_requests(TWO, 4, seed=0)]
        return RolloutEvaluator(broken, requests, max_steps=9, concurrency=1, **options)

    report = await playing().evaluate()
    assert {role: a.rates()["error"] for role, a in report.by_role().items()} == {
        "X": proportion(1, 4),
        "O": proportion(1, 4),
    }
    made = iter(range(100))
    assert (await playing(agent_id="O").evaluate()).rates()["error"] == proportion(1, 4)


async def test_success_is_what_the_caller_says_it_is() -> None:
    report = await run_eval(
        engine(), ONE, episodes=8, max_steps=9, success=lambda rollout: rollout.total_reward >= 0
    )
    assert report.success.value == report.outcome("win").value + report.outcome("draw").value


async def test_progress_is_told_up_to_the_last_episode() -> None:
    seen: list[Progress] = []
    evaluator: Evaluator = RolloutEvaluator(
        engine(), eval_requests(ONE, 4, seed=0), max_steps=9, on_progress=seen.append
    )
    await evaluator.evaluate()
    assert (seen[-1].finished, seen[-1].total) == (4, 4)
