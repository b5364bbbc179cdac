"""A report counts every episode, says what went wrong with it, and survives a file."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ludic.errors import ConfigError, DataError
from ludic.eval import (
    EpisodeResult,
    EvalReport,
    Headline,
    compare,
    headline_of,
    proportion,
    report_table,
    reward_above,
)
from ludic.types import (
    AgentStep,
    EnvironmentStep,
    FinishReason,
    Rollout,
    TokenTrace,
    TruncationReason,
)


def episode(seed: int, success: bool = False, **facts: object) -> EpisodeResult:
    values = {"env_seed": seed, "task_key": None, "reward": float(success), "success": success}
    return EpisodeResult(**{**values, **facts})  # type: ignore[arg-type]


def call(turn: int, tokens: int, finish: FinishReason = FinishReason.STOP) -> AgentStep:
    trace = TokenTrace((1,), tuple(range(tokens)))
    message = {"role": "assistant", "content": "x"}
    return AgentStep(turn, (), message, finish, trace)  # type: ignore[arg-type]


def test_a_rollout_is_read_for_all_that_a_report_says() -> None:
    rollout = Rollout(
        id="r",
        env_seed=7,
        steps=(
            call(0, 5, FinishReason.LENGTH),
            EnvironmentStep(
                0, (0,), "o", None, "o", -0.1, stepped=False, info={"parse_error": True}
            ),
            call(1, 3),
            EnvironmentStep(
                1,
                (2,),
                "o",
                "a",
                "end",
                1.0,
                truncated=True,
                truncation_reason=TruncationReason.MAX_STEPS,
                info={"result": "win"},
            ),
        ),
    )
    found = EpisodeResult.of(rollout, reward_above())
    assert found == EpisodeResult(
        env_seed=7,
        task_key=None,
        reward=0.9,
        success=True,
        outcome="win",
        turns=2,
        tokens=8,
        parse_failures=1,
        cut_completions=1,
        truncation="max_steps",
    )


def test_an_episode_that_failed_is_no_success_whatever_it_earned() -> None:
    steps = (call(0, 1), EnvironmentStep(0, (0,), "o", "a", "o", 5.0))
    found = EpisodeResult.of(Rollout(id="r", steps=steps, error="EnvError: gone"), reward_above())
    assert not found.success
    assert found.error == "EnvError: gone"


def test_every_rate_has_all_episodes_in_its_denominator() -> None:
    report = EvalReport(
        "mixed",
        (
            episode(0, True, outcome="win"),
            episode(1, outcome="loss", parse_failures=2),
            episode(2, truncation="max_steps", cut_completions=1),
            episode(3, error="EnvError: gone"),
        ),
    )
    rates = report.rates()
    expected = {
        "success": 0.25,
        "outcome/win": 0.25,
        "outcome/loss": 0.25,
        "no_outcome": 0.5,
        "parse_failure": 0.25,
        "cut_completion": 0.25,
        "truncated": 0.25,
        "error": 0.25,
    }
    assert {name: rate.value for name, rate in rates.items()} == expected
    assert all(rate.n == 4 for rate in rates.values())
    assert report.metrics()["eval/episodes"] == 4


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.floats(-5, 5)), max_size=30))
def test_a_report_is_the_same_after_json(rows: list[tuple[int, bool, float]]) -> None:
    report = EvalReport("r", tuple(episode(s, ok, reward=reward) for s, ok, reward in rows))
    assert EvalReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report


def test_pass_at_k_is_over_tasks_with_their_samples() -> None:
    results = [episode(0, True), episode(0), episode(1), episode(1)]
    report = EvalReport("r", tuple(results))
    assert report.pass_at(1).value == pytest.approx(0.25)
    assert report.pass_at(2).value == pytest.approx(0.5)
    assert report.pass_at(2).n == 2
    with pytest.raises(ConfigError, match="samples per task"):
        report.pass_at(3)


def test_two_seats_of_one_episode_are_not_two_samples_of_a_task() -> None:
    report = two_seats(4, {0, 1})
    assert report.pass_at(1).value == 0.5
    assert report.pass_at(1).n == 4
    with pytest.raises(ConfigError, match="task 0 has 1: raise"):
        report.pass_at(2)


def test_a_task_key_goes_before_the_seed() -> None:
    results = (episode(0, True, task_key="sum"), episode(1, task_key="sum"))
    assert EvalReport("r", results).pass_at(2).value == 1.0


@pytest.mark.parametrize(
    ("good", "bad"), [("correct", "wrong"), ("success", "failed"), ("won", "no_compile")]
)
def test_the_ending_that_counts_is_one_that_came_before_one_that_others_have(
    good: str, bad: str
) -> None:
    report = EvalReport("r", (episode(0, outcome=good), episode(1, outcome=bad)))
    assert (report.headline.outcome, report.headline.of(report).value) == (good, 0.5)


def test_tasks_of_two_environments_are_two_whatever_they_are_called() -> None:
    results = [
        episode(0, env == "gsm8k", task_key=f"train#{n}", env=env, episode_id=f"{env}{n}{copy}")
        for env in ("gsm8k", "math")
        for n in range(4)
        for copy in range(2)
    ]
    report = EvalReport("r", tuple(results))
    assert (report.pass_at(2).value, report.pass_at(2).n) == (0.5, 8)
    assert report.success.low == pytest.approx(proportion(4, 8).low)


@pytest.mark.parametrize("named", [True, False])
def test_intervals_count_tasks_and_not_their_samples(named: bool) -> None:
    once = EvalReport("once", tuple(episode(s, s % 2 == 0) for s in range(10)))
    often = EvalReport(
        "often",
        tuple(
            episode(
                100 * copy + s if named else s,
                s % 2 == 0,
                task_key=f"task {s}" if named else None,
                episode_id=f"{s}-{copy}",
            )
            for s in range(10)
            for copy in range(8)
        ),
    )
    assert often.success.n == 80
    for name in ("success", "reward"):
        few, many = getattr(once, name), getattr(often, name)
        assert (many.low, many.high) == pytest.approx((few.low, few.high))
    worse = EvalReport("worse", tuple(replace(e, success=False) for e in often.episodes))
    assert compare(often, worse)["success"].p_value == pytest.approx(1 / 32)  # of five tasks


def test_both_seats_of_a_game_that_one_of_them_wins_are_no_coin_flips() -> None:
    both = (
        episode(seed, (seat == "X") == (seed % 2 == 0), agent_id=seat, episode_id=f"e{seed}")
        for seed in range(30)
        for seat in "XO"
    )
    report = EvalReport("game", tuple(both))
    assert (report.success.low, report.success.high) == pytest.approx((0.5, 0.5))
    assert report.by_role()["X"].success.low < 0.4


def test_rewards_that_are_too_large_to_average_are_named() -> None:
    report = EvalReport("r", (episode(0, reward=1e308), episode(1, reward=1e308)))
    with pytest.raises(DataError, match=r"1e\+308 cannot be averaged"):
        report.reward  # noqa: B018


def test_a_comparison_pairs_by_seed_whatever_the_order() -> None:
    a = EvalReport("a", tuple(episode(s) for s in range(8)))
    b = EvalReport("b", tuple(episode(s, s > 1) for s in reversed(range(8))))
    found = compare(a, b)
    assert found["success"].difference.value == pytest.approx(0.75)
    # Six pairs differ, all one way: 2 of 64 sign patterns are as extreme, and count half.
    assert found["success"].p_value == pytest.approx(1 / 64)
    assert found["reward"].difference.value == pytest.approx(0.75)
    mirrored = compare(b, a)
    assert mirrored["success"].difference.value == pytest.approx(-0.75)
    assert mirrored["success"].p_value == found["success"].p_value


def test_samples_of_one_task_are_paired_in_their_order() -> None:
    a = EvalReport("a", (episode(0, True), episode(0)))
    b = EvalReport("b", (episode(0), episode(0, True)))
    assert compare(a, b)["success"].difference.value == 0.0


def test_reports_on_other_seeds_are_refused() -> None:
    a = EvalReport("a", (episode(0), episode(1)))
    b = EvalReport("b", (episode(0), episode(2)))
    with pytest.raises(ConfigError, match="2 episodes have no partner"):
        compare(a, b)


def test_the_table_has_a_column_per_report_and_zero_where_an_outcome_never_came() -> None:
    a = EvalReport("first", (episode(0, True, outcome="win"),))
    b = EvalReport("second", (episode(0, outcome="loss"),))
    console = Console(file=io.StringIO(), width=120)
    console.print(report_table([a, b]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    rows = {line.split("  ")[0].strip(): line for line in text.splitlines()}
    assert "first (n=1)" in text
    assert "second (n=1)" in text
    assert "100.0%" in rows["win"]
    assert "0.0%" in rows["win"]
    assert "mean reward" in rows


def test_a_report_without_episodes_knows_nothing() -> None:
    empty = EvalReport("none", ())
    assert math.isnan(empty.success.value)
    assert (empty.success.low, empty.success.high) == (0.0, 1.0)


def two_seats(episodes: int, won: set[int], *, ids: bool = True) -> EvalReport:
    """A game of X and O on each seed. X wins those in `won`, O and everybody else loses."""
    return EvalReport(
        "game",
        tuple(
            episode(
                seed,
                seed in won,
                outcome="win" if seed in won else "loss",
                **({"agent_id": seat, "episode_id": f"e{seed}"} if ids else {}),
            )
            for seed in range(episodes)
            for seat in "XO"
        ),
    )


@pytest.mark.parametrize("ids", [True, False], ids=["new", "old"])
def test_the_seats_of_one_episode_are_one_observation(ids: bool) -> None:
    """Both seats of a game end together here, so that the second one says nothing new."""
    both = two_seats(300, set(range(120)), ids=ids)
    one = EvalReport("one", tuple(episode(s, s < 120) for s in range(300)))
    assert (both.success, both.success.n) == (one.success, 300)
    assert both.reward == one.reward
    assert both.metrics()["eval/episodes"] == 300
    better = two_seats(300, set(range(8, 137)), ids=ids)
    found = compare(both, better)["success"]
    assert found.difference.n == 300
    alone = EvalReport("one", tuple(episode(s, 8 <= s < 137) for s in range(300)))
    assert found.p_value == compare(one, alone)["success"].p_value > 0.05


def test_every_role_has_its_own_row_and_its_outcomes_add_up_to_one() -> None:
    results = [
        episode(seed, seat == winner, outcome="win" if seat == winner else "loss",
                agent_id=seat, episode_id=f"e{seed}")
        for seed, winner in enumerate("XXXO")
        for seat in "XO"
    ]  # fmt: skip
    report = EvalReport("game", tuple(results))
    for role, wins in {"X": 0.75, "O": 0.25}.items():
        alone = report.by_role()[role]
        outcomes = {n: r for n, r in alone.rates().items() if n.startswith("outcome/")}
        assert sum(rate.value for rate in outcomes.values()) == 1.0
        assert (alone.outcome("win").value, alone.outcome("win").n) == (wins, 4)
        assert report.metrics()[f"eval/{role}/outcome/win"] == wins
        assert report.to_dict()["roles"][role]["rates"]["success"]["value"] == wins
    console = Console(file=io.StringIO(), width=120)
    console.print(report_table([report]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    rows = {line.split("  ")[0].strip(): line for line in text.splitlines()}
    assert "(n=4)" in text
    assert "75.0%" in rows["X: win"]
    assert "25.0%" in rows["O: win"]
    assert {"X/success", "O/success", "success"} <= compare(report, report).keys()


def test_a_report_from_before_roles_were_kept_can_be_read_and_compared_with_a_new_one() -> None:
    new = two_seats(6, {0, 1})
    data = json.loads(json.dumps(new.to_dict()))
    del data["roles"]
    for row in data["episodes"]:
        del row["agent_id"], row["episode_id"]
    old = EvalReport.from_dict(data)
    assert old.success == new.success
    assert compare(old, new)["success"].difference.value == 0.0


@pytest.mark.parametrize("others", ["right", "wrong"])
def test_a_report_from_before_endings_were_named_is_compared_by_reward(others: str) -> None:
    rewards = (1.0, 1.0, 0.1)  # the last is for its form alone, and counted as a success
    new = EvalReport(
        "new",
        tuple(
            episode(seed, reward == 1, reward=reward, outcome="right" if reward == 1 else others)
            for seed, reward in enumerate(rewards)
        ),
    )
    old = before_endings_led(replace(e, outcome=None, success=e.reward > 0) for e in new.episodes)
    assert new.headline == Headline("outcome", "right")
    assert headline_of([old, new]) == headline_of([new, old]) == Headline("reward")
    assert compare(old, new).keys() == {"reward"}
    assert compare(old, new)["reward"].difference.value == 0
    assert "success" not in _text(old, new)


def test_a_report_from_before_that_has_endings_is_compared_by_them() -> None:
    new = EvalReport("new", (episode(0, True, outcome="win"), episode(1, outcome="loss")))
    old, untrained = before_endings_led(new.episodes), before_endings_led([episode(0), episode(1)])
    assert headline_of([untrained, old, new]) == Headline("outcome", "win")
    assert headline_of([untrained, new], ["win", "loss"]) == Headline("outcome", "win")
    assert compare(old, new).keys() == {"outcome/win", "reward"}


def before_endings_led(episodes: Iterable[EpisodeResult]) -> EvalReport:
    """A report as it was read and written before an ending could lead it."""
    data = json.loads(json.dumps(EvalReport("old", tuple(episodes)).to_dict()))
    for name in ("headline", "outcomes", "success_is"):
        del data[name]
    return EvalReport.from_dict(data)


def _text(*reports: EvalReport) -> str:
    shown = io.StringIO()
    Console(file=shown, width=120).print(report_table(reports))
    return shown.getvalue()
