"""Rewards: each function, their weighted sum, and the judge."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic.errors import ConfigError, EnvError, UnknownNameError
from ludic.inference import HFChatTemplate, ScriptedCall, ScriptedChatClient
from ludic.inference.judge import judge_reward
from ludic.inference.tiny import tiny_tokenizer
from ludic.parsers import boxed_parser
from ludic.rewards import (
    Attempt,
    RewardFn,
    RewardSum,
    Score,
    exact_reward,
    format_reward,
    length_reward,
    make_rewards,
    numeric_reward,
    symbolic_reward,
)


def at_once(result: Any) -> Any:
    assert isinstance(result, float | Score)
    return result


class TestFunctions:
    @pytest.mark.parametrize(
        ("reward", "answer", "target", "expected"),
        [
            (exact_reward(), " Paris ", "Paris", 1.0),
            (exact_reward(), "paris", "Paris", 0.0),
            (exact_reward(ignore_case=True), "paris", "Paris", 1.0),
            (numeric_reward(), "$1,000.0", "1000", 1.0),
            (numeric_reward(), "1000 apples", "1000", 0.0),
            (numeric_reward(), "", "1000", 0.0),
            (numeric_reward(find="last"), "It is 1000 apples", "1000", 1.0),
            (numeric_reward(find="last"), "1000, no: 999", "1000", 0.0),
            (numeric_reward(tolerance=0.01), "3.14", "3.141", 1.0),
            (numeric_reward(tolerance=0.01), "3.1", "3.141", 0.0),
            (format_reward("boxed"), "\\boxed{1}", "", 1.0),
            (format_reward({"kind": "xml", "tag": "a"}), "<a>", "", 0.0),
            (format_reward(boxed_parser()), "1", "", 0.0),
            (length_reward(limit=4), "1234", "", 1.0),
            (length_reward(limit=4), "12345", "", 0.0),
            (length_reward(limit=8, free=4), "1234", "", 1.0),
            (length_reward(limit=8, free=4), "123456", "", 0.5),
            (length_reward(limit=8, free=4), "1" * 100, "", 0.0),
        ],
    )
    def test_what_each_gives(
        self, reward: RewardFn, answer: str, target: str, expected: float
    ) -> None:
        assert reward(Attempt(answer, target)) == expected

    @pytest.mark.integration
    def test_symbolic_equality_is_by_meaning(self) -> None:
        assert symbolic_reward()(Attempt("\\frac{2}{4}", "0.5")) == 1.0
        assert symbolic_reward()(Attempt("x+1", "x")) == 0.0

    def test_a_target_that_is_no_number_is_an_error_and_not_a_zero(self) -> None:
        with pytest.raises(EnvError, match="is not a number"):
            numeric_reward()(Attempt("3", "three"))

    @pytest.mark.parametrize(
        "make",
        [
            lambda: numeric_reward(tolerance=-1),
            lambda: numeric_reward(tolerance=math.nan),
            lambda: numeric_reward(find="first"),  # type: ignore[arg-type]
            lambda: length_reward(limit=0),
            lambda: length_reward(limit=3, free=4),
        ],
    )
    def test_options_that_cannot_be_are_refused(self, make: Callable[[], Any]) -> None:
        with pytest.raises(ConfigError):
            make()

    @given(st.text(), st.text())
    def test_all_are_between_zero_and_one_for_any_answer(self, answer: str, target: str) -> None:
        attempt = Attempt(answer, target)
        for reward in (
            exact_reward(),
            format_reward("boxed"),
            length_reward(limit=9, free=3),
        ):
            assert 0 <= at_once(reward(attempt)) <= 1
        assert numeric_reward(find="last")(Attempt(answer, "1")) in (0.0, 1.0)


class TestSum:
    def test_parts_are_weighted_kept_and_add_up(self) -> None:
        total = RewardSum(numeric_reward(), length_reward(limit=2), weights=[1.0, 0.5])
        assert total(Attempt("42", "42")) == Score(1.5, {"numeric": 1.0, "length": 0.5})
        assert total(Attempt("0042", "42")) == Score(1.0, {"numeric": 1.0, "length": 0.0})

    def test_equal_names_are_numbered(self) -> None:
        total = RewardSum(exact_reward(), exact_reward(ignore_case=True))
        assert total.names == ("exact", "exact_2")

    def test_names_can_be_given(self) -> None:
        total = RewardSum(exact_reward(), lambda attempt: 2.0, names=["right", "two"])
        assert at_once(total(Attempt("a", "a"))).components == {"right": 1.0, "two": 2.0}

    async def test_a_part_may_be_asynchronous(self) -> None:
        async def later(attempt: Attempt) -> float:
            await asyncio.sleep(0)
            return len(attempt.answer) / 10

        result = RewardSum(exact_reward(), later, weights=[1, 2])(Attempt("abc", "abc"))
        assert not isinstance(result, Score)
        assert await result == Score(1.6, {"exact": 1.0, "later": 0.6})

    @pytest.mark.parametrize("value", [math.nan, math.inf, None, "1"])
    def test_a_part_that_is_not_a_finite_number_is_named(self, value: Any) -> None:
        def broken(attempt: Attempt) -> float:
            return value  # type: ignore[no-any-return]

        with pytest.raises(EnvError, match="'broken' returned"):
            RewardSum(exact_reward(), broken)(Attempt("a"))

    @pytest.mark.parametrize(
        "make",
        [
            lambda: RewardSum(),
            lambda: RewardSum(exact_reward(), weights=[1, 2]),
            lambda: RewardSum(exact_reward(), weights=[math.nan]),
            lambda: RewardSum(exact_reward(), names=[]),
            lambda: RewardSum(
                exact_reward(), exact_reward(), exact_reward(), names=["a", "a", "a_2"]
            ),
        ],
    )
    def test_a_sum_that_does_not_fit_is_refused(self, make: Callable[[], Any]) -> None:
        with pytest.raises(ConfigError):
            make()

    @given(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=1, max_size=6))
    def test_the_total_is_the_sum_of_the_components(self, parts: list[tuple[float, float]]) -> None:
        functions: list[RewardFn] = [lambda attempt, v=value: v for value, _ in parts]  # type: ignore[misc]
        score = at_once(RewardSum(*functions, weights=[w for _, w in parts])(Attempt("")))
        assert score.reward == pytest.approx(sum(score.components.values()))
        assert list(score.components.values()) == [v * w for v, w in parts]


class TestSpecs:
    def test_a_sum_is_made_from_json(self) -> None:
        specs = [
            "numeric",
            {"kind": "length", "limit": 5, "weight": 0.1, "name": "short"},
            {"kind": "format", "parser": {"kind": "regex", "pattern": "\\d+"}, "weight": 2},
        ]
        score = at_once(make_rewards(json.loads(json.dumps(specs)))(Attempt("42", "42")))
        assert score.components == {"numeric": 1.0, "short": 0.1, "format": 2.0}

    def test_one_spec_or_one_function_is_a_sum_of_one(self) -> None:
        assert make_rewards("exact").names == ("exact",)
        assert make_rewards(exact_reward()).names == ("exact",)
        total = RewardSum(exact_reward())
        assert make_rewards(total) is total

    def test_an_unknown_kind_answers_with_the_nearest(self) -> None:
        with pytest.raises(UnknownNameError, match="'numeric'"):
            make_rewards("numerical")

    @pytest.mark.parametrize("specs", [[], {}, {"kind": "length"}, [{"kind": 3}]])
    def test_a_spec_that_cannot_be_made_is_a_configuration_error(self, specs: Any) -> None:
        with pytest.raises(ConfigError):
            make_rewards(specs)


class TestJudge:
    template = HFChatTemplate(tiny_tokenizer())

    def judge(self, script: Any, **options: Any) -> tuple[ScriptedChatClient, RewardFn]:
        client = ScriptedChatClient(script, self.template)
        return client, judge_reward(client, self.template, "judge", "Be right.", **options)

    async def grade(self, reward: RewardFn, attempt: Attempt) -> float:
        result = reward(attempt)
        assert not isinstance(result, float)
        return await result

    async def test_the_score_is_a_fraction_of_the_best_one(self) -> None:
        _, reward = self.judge(["Good. <score>7</score>"])
        assert await self.grade(reward, Attempt("4", "4", "2+2?")) == 0.7

    @pytest.mark.parametrize("said", ["8/10", "8 / 10", "8.0"])
    async def test_a_score_may_say_what_it_is_of(self, said: str) -> None:
        _, reward = self.judge([f"<score>{said}</score>"])
        assert await self.grade(reward, Attempt("x")) == 0.8

    async def test_the_judge_sees_rubric_task_reference_and_answer(self) -> None:
        seen: list[str] = []

        def policy(call: ScriptedCall) -> str:
            seen.append(call.text)
            return "<score>10</score>"

        _, reward = self.judge(policy)
        assert await self.grade(reward, Attempt("my answer", "reference", "the task")) == 1.0
        for part in ("Be right.", "the task", "reference", "my answer"):
            assert part in seen[0]

    async def test_an_answer_cannot_close_its_own_fence(self) -> None:
        seen: list[str] = []

        def policy(call: ScriptedCall) -> str:
            seen.append(call.text)
            return "<score>0</score>"

        for answer in ("a", "b"):
            _, reward = self.judge(policy)
            await self.grade(reward, Attempt(answer))
        fences = [text.partition("two lines ")[2][:12] for text in seen]
        assert fences[0] != fences[1]
        assert all(text.count(fence) == 3 for text, fence in zip(seen, fences, strict=True))

    async def test_a_judge_without_a_score_is_asked_again(self) -> None:
        client, reward = self.judge(["Hm.", "<score>5</score>"])
        assert await self.grade(reward, Attempt("x")) == 0.5
        assert client.calls == 2

    @pytest.mark.parametrize(
        "said", ["Hm.", *(f"<score>{n}</score>" for n in ("11", "-1", "good", "4/5"))]
    )
    async def test_no_score_at_all_is_an_error_and_not_a_zero(self, said: str) -> None:
        _, reward = self.judge([said, said])
        with pytest.raises(
            EnvError,
            match="in 2 tries: it must end with <score>n</score>, n from 0 to 10",
        ):
            await self.grade(reward, Attempt("x"))

    async def test_it_is_a_part_of_a_sum_like_any_other(self) -> None:
        _, judge = self.judge(["<score>5</score>"])
        total = RewardSum(exact_reward(), judge, weights=[1.0, 2.0])
        result = total(Attempt("x", "x"))
        assert not isinstance(result, Score)
        assert await result == Score(2.0, {"exact": 1.0, "judge": 1.0})

    def test_options_that_cannot_be_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="max_score"):
            self.judge(["x"], max_score=0)
