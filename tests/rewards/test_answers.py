"""Numbers are read exactly or not at all; mathematics is compared by meaning, in bounded time."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic.rewards.answers import (
    _Verifiers,
    last_number,
    read_number,
    same_mathematics,
)
from ludic.workers.child_process import ChildError
from tests.envs.waiting import eventually


class TestNumbers:
    @pytest.mark.parametrize(
        ("text", "number"),
        [
            ("72", Fraction(72)),
            (" 72. ", Fraction(72)),
            ("-3", Fraction(-3)),
            ("+3", Fraction(3)),
            ("1,234,567.50", Fraction(2469135, 2)),
            ("$18.00", Fraction(18)),
            ("\\$18", Fraction(18)),
            ("$18$", Fraction(18)),
            ("-$5", Fraction(-5)),
            ("$-5", Fraction(-5)),
            ("50%", Fraction(50)),
            ("50\\%", Fraction(50)),
            ("3/4", Fraction(3, 4)),
            ("-3 / 4", Fraction(-3, 4)),
            ("\\frac{3}{4}", Fraction(3, 4)),
            ("-\\dfrac{3}{4}", Fraction(-3, 4)),
            ("1{,}234", Fraction(1234)),
            (".5", Fraction(1, 2)),
            ("1e3", Fraction(1000)),
            ("2.5E-1", Fraction(1, 4)),
            ("0.1", Fraction(1, 10)),
            ("007", Fraction(7)),
        ],
    )
    def test_a_number_is_read_exactly(self, text: str, number: Fraction) -> None:
        assert read_number(text) == number

    @pytest.mark.parametrize(
        "text",
        [
            *("", " ", "abc", "72 apples", "about 72", "72 or 73", "1,23", "12,3456", "1.2.3"),
            *("1/0", "--3", "5 million", "5k", "0x10", "1_000", "nan", "inf", "1e9999", "9" * 101),
            *("$$", "%", "-", ".", "1/2/3", "\\frac{1}{0}", "3 4"),
            *("2\\frac{1}{2}", "\\frac{1}{2}3", "2 1/2"),
        ],
    )
    def test_what_is_not_wholly_a_number_is_none(self, text: str) -> None:
        assert read_number(text) is None

    @given(st.integers(-(10**30), 10**30))
    def test_every_integer_is_read_with_and_without_commas(self, number: int) -> None:
        assert read_number(str(number)) == number
        assert read_number(f"{number:,}") == number

    @given(st.decimals(-(10**9), 10**9, places=4))
    def test_every_decimal_is_read_exactly(self, number: object) -> None:
        assert read_number(f"{number:f}") == Fraction(str(number))

    @given(st.text())
    def test_any_text_is_a_number_or_none(self, text: str) -> None:
        assert read_number(text) is None or any(c.isdigit() for c in text)
        assert last_number(text) is None or any(c.isdigit() for c in text)

    @pytest.mark.parametrize(
        ("text", "number"),
        [
            ("12 + 3 = 15", 15),
            ("It costs $1,234.50.", Fraction(2469, 2)),
            ("first 3, then -4", -4),
            ("the answer is 3/4", Fraction(3, 4)),
            ("first 3, then −4", -4),
            ("so \\boxed{-\\frac{3}{4}}", Fraction(-3, 4)),
            ("It costs $1{,}234$.", 1234),
            ("the 72nd of 80 people", 80),
            ("no number", None),
            ("A1", None),
            ("7 " + " " * 100_000, None),
            ("-" * 100_000, None),
            ("9" * 100_000, None),
        ],
    )
    def test_the_last_number_of_a_text(self, text: str, number: Fraction | None) -> None:
        assert last_number(text) == number


@pytest.mark.integration
class TestMathematics:
    @pytest.mark.parametrize(
        ("answer", "target"),
        [
            ("\\frac{1}{2}", "0.5"),
            ("\\dfrac12", "\\frac{1}{2}"),
            ("2^{10}", "1024"),
            ("x+1", "1+x"),
            ("(x+1)^2", "x^2+2x+1"),
            ("\\sqrt{8}", "2\\sqrt{2}"),
            ("\\{2, 1\\}", "\\{1, 2\\}"),
            ("\\left(3, \\frac{\\pi}{2}\\right)", "(3,\\pi/2)"),
            ("\\text{East}", "east"),
            ("$18.00", "18"),
            ("x = 5", "5"),
            ("\\frac{5}{2}", "2\\frac{1}{2}"),
            ("10 000", "10000"),
            ("x = 1 , y = 2", "x=1,y=2"),
            (" " + "x" * 2000, "x" * 2000),
        ],
    )
    def test_other_spellings_of_the_same_are_equal(self, answer: str, target: str) -> None:
        assert same_mathematics(answer, target)

    @pytest.mark.parametrize(
        ("answer", "target"),
        [
            ("", "1"),
            ("1", "2"),
            ("x+2", "x+1"),
            ("[1,2]", "(1,2)"),
            ("(2,1)", "(1,2)"),
            ("1 or 2", "1"),
            ("tsae", "east"),
            ("1} \\boxed{2", "2"),
            ("\\boxed{1}\\boxed{2}", "2"),
            ("1$ $2", "2"),
            ("}{", "1"),
            ("\\frac{1}{", "1"),
            ("\x00", "1"),
            ("x" * 2000, "x" * 2001),
            ("not 5", "5"),
            ("2\\frac{1}{2}", "21/2"),
            ("2 1/2", "21/2"),
            ("1 2", "12"),
        ],
    )
    def test_what_is_not_the_same_is_not_equal(self, answer: str, target: str) -> None:
        assert not same_mathematics(answer, target)

    def test_an_answer_that_would_take_for_ever_is_wrong_and_the_next_is_judged_again(self) -> None:
        assert not same_mathematics("9^{9^{9^{9}}}", "x+1", timeout_s=0.5)
        assert same_mathematics("y+1", "1+y")

    async def test_an_answer_is_judged_while_another_takes_for_ever(self) -> None:
        verifiers = _Verifiers(2)
        with ThreadPoolExecutor(2) as threads:
            stuck = threads.submit(verifiers.same, "9^{9^{9^{9}}}", "x+1", 600.0)
            try:
                await eventually(lambda: verifiers.idle.qsize() == 1)
                judged = threads.submit(verifiers.same, "y+1", "1+y", 60.0)
                assert await asyncio.wrap_future(judged)
                assert not stuck.done()
                await eventually(lambda: len(verifiers.started) == 2, 120)
            finally:
                verifiers.stop()
            with pytest.raises(ChildError):
                stuck.result(60)
        assert verifiers.idle.qsize() == 2
