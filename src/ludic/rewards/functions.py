"""Rewards as functions: small ones, added up with weights.

A reward function takes an `Attempt` and returns a number, at once or as an awaitable. Those made
here return a number from 0 to 1. `RewardSum` adds them up with weights, and keeps every part:

    >>> total = RewardSum(numeric_reward(), length_reward(limit=200), weights=[1.0, 0.1])
    >>> score = total(Attempt(answer="42", target="42.0"))
    >>> score.reward, dict(score.components)
    (1.1, {'numeric': 1.0, 'length': 0.1})
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from ludic.errors import ConfigError, EnvError
from ludic.parsers import Parser, make_parser
from ludic.registry import REWARDS
from ludic.rewards.answers import last_number, read_number, same_mathematics
from ludic.types import EnvironmentStep, Step
from ludic.workers.threads import shared_threads


@dataclass(frozen=True, slots=True)
class Attempt:
    """What is judged: the agent's answer, and what is known about the task."""

    answer: str
    target: str = ""
    question: str = ""
    row: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Score:
    """The total, and the weighted parts that add up to it. `right` says whether the answer is the
    target; None where no part looks at that."""

    reward: float
    components: Mapping[str, float]
    right: bool | None = field(default=None, compare=False)


RewardFn: TypeAlias = Callable[[Attempt], float | Awaitable[float]]


@dataclass(frozen=True, slots=True)
class AnswerCheck:
    """A reward of 1 if the answer is right, else 0."""

    name: str
    is_right: Callable[[Attempt], bool]

    def __call__(self, attempt: Attempt) -> float:
        return float(self.is_right(attempt))


def exact_reward(*, ignore_case: bool = False) -> RewardFn:
    """1 if the answer is the target, white space around them aside."""

    def exact(attempt: Attempt) -> bool:
        answer, target = attempt.answer.strip(), attempt.target.strip()
        if ignore_case:
            answer, target = answer.casefold(), target.casefold()
        return answer == target

    return AnswerCheck("exact", exact)


def numeric_reward(*, tolerance: float = 0.0, find: Literal["whole", "last"] = "whole") -> RewardFn:
    """1 if the answer and the target are the same number, up to `tolerance`, absolutely.

    With `find="whole"` the answer must be a number and nothing else; with "last" its last number
    counts, whatever stands around it.
    """
    if not tolerance >= 0:
        raise ConfigError(f"numeric_reward(tolerance={tolerance!r}): must be >= 0")
    if find not in ("whole", "last"):
        raise ConfigError(f"numeric_reward(find={find!r}): must be 'whole' or 'last'")

    def numeric(attempt: Attempt) -> bool:
        target = _numeric_target(attempt)
        answer = (read_number if find == "whole" else last_number)(attempt.answer)
        return answer is not None and bool(abs(answer - target) <= tolerance)

    return AnswerCheck("numeric", numeric)


def _numeric_target(attempt: Attempt) -> Any:
    target = read_number(attempt.target)
    if target is None:
        raise EnvError(
            f"the numeric reward was given the target {attempt.target[:80]!r}, which is not a "
            "number; use the symbolic or exact reward for this data, or repair the row"
        )
    return target


def symbolic_reward(*, timeout_s: float = 10.0) -> RewardFn:
    """1 if the answer equals the target as mathematics: `\\frac{1}{2}`, `0.5` and `2^{-1}` are
    the same. Blocks for as long as that takes; an answer not settled in time counts as wrong."""

    def symbolic(attempt: Attempt) -> bool:
        return same_mathematics(attempt.answer, attempt.target, timeout_s=timeout_s)

    return AnswerCheck("symbolic", symbolic)


def format_reward(parser: str | Mapping[str, Any] | Sequence[Any] | Parser) -> RewardFn:
    """1 if `parser` (or the parser of that spec) can read the answer."""
    parse = make_parser(parser)

    def format(attempt: Attempt) -> float:
        return float(parse(attempt.answer).action is not None)

    return format


def length_reward(*, limit: int, free: int = 0) -> RewardFn:
    """1 for answers of up to `free` characters, 0 from `limit` on, and a straight line between.

    With `free=0` (the default) there is no slope: 1 up to the limit and 0 beyond.
    """
    if not 0 <= free <= limit or limit < 1:
        raise ConfigError(f"length_reward(limit={limit}, free={free}): needs 0 <= free <= limit")

    def length(attempt: Attempt) -> float:
        size = len(attempt.answer)
        if size <= free:
            return 1.0
        if free == 0 or free == limit:
            return float(size <= limit)
        return max(0.0, (limit - size) / (limit - free))

    return length


class RewardSum:
    """Reward functions added up with weights; each part is kept under its name.

    Names come from the functions (`numeric`, `length`, …) unless given; equal ones are numbered.
    The result is awaitable if a part is.
    """

    def __init__(
        self,
        *functions: RewardFn,
        weights: Iterable[float] | None = None,
        names: Iterable[str] | None = None,
    ) -> None:
        if not functions:
            raise ConfigError("RewardSum needs at least one reward function")
        self._functions = functions
        self._weights = [1.0] * len(functions) if weights is None else [float(w) for w in weights]
        given = [_name(fn) for fn in functions] if names is None else list(names)
        if not len(functions) == len(self._weights) == len(given):
            raise ConfigError(
                f"RewardSum: {len(functions)} functions, {len(self._weights)} weights and "
                f"{len(given)} names; give one of each per function"
            )
        if not all(map(math.isfinite, self._weights)):
            raise ConfigError(f"RewardSum: weights must be finite, not {self._weights}")
        self._names = _distinct(given)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._names)

    def __call__(self, attempt: Attempt) -> Score | Awaitable[Score]:
        values = [function(attempt) for function in self._functions]
        if any(map(inspect.isawaitable, values)):
            return self._later(values)
        return self._score(values)

    async def _later(self, values: Sequence[Any]) -> Score:
        return self._score(await asyncio.gather(*map(_wait, values)))

    def _score(self, values: Sequence[Any]) -> Score:
        components: dict[str, float] = {}
        for name, weight, value in zip(self._names, self._weights, values, strict=True):
            if not isinstance(value, numbers.Real) or not math.isfinite(value):
                raise EnvError(
                    f"the reward function {name!r} returned {value!r}; it must return a finite "
                    "number"
                )
            components[name] = weight * float(value)
        checks = [
            value == 1
            for function, value in zip(self._functions, values, strict=True)
            if isinstance(function, AnswerCheck)
        ]
        try:
            total = math.fsum(components.values())
        except OverflowError:
            raise EnvError(
                f"the reward functions' values add up to more than a float holds: {components}; "
                "scale them down"
            ) from None
        return Score(total, components, all(checks) if checks else None)


async def _wait(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _name(function: RewardFn) -> str:
    if isinstance(function, AnswerCheck):
        return function.name
    return getattr(function, "__name__", type(function).__name__)


def _distinct(names: Sequence[str]) -> list[str]:
    seen: Counter[str] = Counter()
    result = []
    for name in names:
        seen[name] += 1
        result.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    if len(set(result)) != len(result):
        raise ConfigError(f"reward names must differ: {list(names)}")
    return result


RewardSpec: TypeAlias = str | Mapping[str, Any] | RewardFn


def make_rewards(specs: RewardSpec | Sequence[RewardSpec] | RewardSum) -> RewardSum:
    """A `RewardSum` from JSON, for run files.

    One spec or a list of them: `"numeric"`, or `{"kind": "length", "limit": 200, "weight": 0.1,
    "name": "short"}`. Functions (a judge, say, which needs a client) may stand among them.
    """
    if isinstance(specs, RewardSum):
        return specs
    parts = [_make_reward(spec) for spec in _listed(specs)]
    functions = [function for function, _, _ in parts]
    return RewardSum(*functions, weights=[w for _, w, _ in parts], names=[n for *_, n in parts])


def _listed(specs: RewardSpec | Sequence[RewardSpec]) -> Sequence[RewardSpec]:
    return [specs] if isinstance(specs, str | Mapping) or callable(specs) else specs


def _make_reward(spec: RewardSpec) -> tuple[RewardFn, float, str]:
    if callable(spec):
        return spec, 1.0, _name(spec)
    options: dict[str, Any] = {"kind": spec} if isinstance(spec, str) else dict(spec)
    weight, name = options.pop("weight", 1.0), options.pop("name", None)
    function = REWARDS.make_from(options)
    return function, weight, name or _name(function)


Rewards: TypeAlias = RewardSpec | Sequence[RewardSpec] | RewardSum


def rewards_of(specs: Rewards | None) -> RewardSum | None:
    """Reward functions by name or table, as everywhere; one by its place is the function itself."""
    if specs is None or isinstance(specs, RewardSum):
        return specs
    return make_rewards([_by_place(spec) for spec in _listed(specs)])


def _by_place(spec: RewardSpec) -> RewardSpec:
    if isinstance(spec, str) and spec not in REWARDS.names():
        function: RewardFn = REWARDS.get(spec)
        return function
    return spec


async def score(rewards: RewardSum, attempt: Attempt, timeout_s: float | None) -> Score:
    """In a thread, since the functions may block; what they leave to await is awaited here."""
    answer: Any = await shared_threads().run(
        lambda: rewards(attempt), what="a reward", whom="the reward function", timeout_s=timeout_s
    )
    result: Score = await answer if inspect.isawaitable(answer) else answer
    return result


def attempt_of(steps: Sequence[Step]) -> Attempt | None:
    """What an agent's rewards are given: its last action, everything before it, and as `target`
    and `row` what the environment told of the step."""
    acted = [s for s in steps if isinstance(s, EnvironmentStep) and s.action is not None]
    if not acted:
        return None
    *before, last = acted
    dialogue = [part for step in before for part in (step.obs, f"> {step.action}")]
    return Attempt(
        answer=last.action or "",
        target=str(last.info.get("target", "")),
        question="\n\n".join(filter(None, [*dialogue, last.obs])),
        row=last.info,
    )
