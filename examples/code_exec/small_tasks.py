"""Small generated programming tasks: read numbers or words, print an answer.

    python examples/code_exec/small_tasks.py --tasks 3                  # show some, as JSON lines

`SmallTasks` is an environment over them, and `teacher` shows the format of an answer, not its
content. The run files in this folder name both.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from ludic.envs.code_exec import CodeExecEnv

OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}
NAMES = {"+": "sum", "-": "difference", "*": "product"}
HEAD = "a,b=map(int,input().split())\n"


def two_numbers(rng: Random) -> tuple[str, Callable[[str], str], list[str]]:
    """The sum, the difference or the product of two numbers."""
    sign = rng.choice(list(OPERATORS))

    def solve(text: str) -> str:
        return str(OPERATORS[sign](*map(int, text.split())))

    cases = [f"{rng.randint(2, 99)} {rng.randint(2, 99)}" for _ in range(4)]
    return f"Print the {NAMES[sign]} of a and b.", solve, cases


def numbers(rng: Random) -> tuple[str, Callable[[str], str], list[str]]:
    """One figure of a line of numbers."""
    figures: dict[str, Callable[[list[int]], int]] = {
        "largest number": max,
        "sum": sum,
        "greatest common divisor": lambda xs: math.gcd(*xs),
        "number of even numbers": lambda xs: sum(x % 2 == 0 for x in xs),
        "difference of the largest and the smallest number": lambda xs: max(xs) - min(xs),
    }
    what, figure = rng.choice(list(figures.items()))

    def solve(text: str) -> str:
        return str(figure(list(map(int, text.split()))))

    cases = [" ".join(str(rng.randint(1, 60)) for _ in range(rng.randint(2, 8))) for _ in range(6)]
    return f"The input is one line of integers. Print their {what}.", solve, cases


def words(rng: Random) -> tuple[str, Callable[[str], str], list[str]]:
    """One line of words, changed."""
    changes: dict[str, Callable[[list[str]], list[str]]] = {
        "each word reversed, in the same order": lambda ws: [w[::-1] for w in ws],
        "the words sorted": sorted,
        "the words without repetitions, in the order of their first appearance": (
            lambda ws: list(dict.fromkeys(ws))
        ),
        "the words in the opposite order": lambda ws: ws[::-1],
    }
    what, change = rng.choice(list(changes.items()))
    pool = ["oak", "ash", "elm", "fir", "yew", "lime", "pine", "beech"]

    def solve(text: str) -> str:
        return " ".join(change(text.split()))

    cases = [" ".join(rng.choices(pool, k=rng.randint(2, 7))) for _ in range(6)]
    return f"The input is one line of words. Print {what}, separated by spaces.", solve, cases


KINDS = {"two_numbers": two_numbers, "numbers": numbers, "words": words}


def make_rows(tasks: int, seed: int, kinds: list[str]) -> Iterator[dict[str, Any]]:
    """The given number of tasks, alternating between the kinds."""
    rng = Random(seed)
    for index in range(tasks):
        prompt, solve, cases = KINDS[kinds[index % len(kinds)]](rng)
        yield {
            "id": index,
            "prompt": prompt,
            "inputs": [f"{case}\n" for case in cases],
            "outputs": [solve(case) for case in cases],
        }


class SmallTasks(CodeExecEnv):
    """`CodeExecEnv` over generated tasks; the other arguments are those of `CodeExecEnv`."""

    def __init__(
        self,
        *,
        tasks: int = 200,
        tasks_seed: int = 0,
        kinds: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(rows=list(make_rows(tasks, tasks_seed, kinds or list(KINDS))), **kwargs)


def teacher(obs: str, rng: Random) -> str:
    """A program in the right format, with any of the signs."""
    return f"{HEAD}print(a{rng.choice(list(OPERATORS))}b)"


def main() -> None:
    parser = argparse.ArgumentParser(description="Shows some of the tasks.")
    parser.add_argument("--tasks", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    args = parser.parse_args()
    for row in make_rows(args.tasks, args.seed, args.kinds):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
