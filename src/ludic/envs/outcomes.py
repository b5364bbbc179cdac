"""Holding an environment to its contract: what it returned is checked before anybody uses it."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from ludic.errors import EnvError, SerializationError
from ludic.plumbing.records import json_copy
from ludic.plumbing.text import clean_text
from ludic.types import AgentID, Info, Obs, StepOutcome

T = TypeVar("T")

_LARGEST_REWARD = 1e300
"""So that the rewards of no episode add up to infinity."""


class _Broken(Exception):
    """What the environment gave an agent, and what it should give instead."""


def checked_opening(
    name: str, agent_ids: Sequence[AgentID], result: Any
) -> dict[AgentID, tuple[Obs, Info]]:
    """What `reset` returned, if it is `{agent: (obs, info)}` for known agents: a copy, in text that
    can be stored."""
    for agent in agent_ids:
        if not isinstance(agent, str) or clean_text(agent) != agent:
            raise EnvError(
                f"environment {name}: agent_ids names {agent!r}, {_kind(agent)}; name agents in "
                "text that UTF-8 can hold"
            )
    if len(set(agent_ids)) != len(agent_ids):
        raise EnvError(
            f"environment {name}: agent_ids names an agent twice: {list(agent_ids)}; name each once"
        )
    says = f"environment {name}: reset"
    openings = _for_agents(says, agent_ids, result, "(obs, info)", _opening)
    if not openings:
        raise EnvError(f"{says} returned nothing; return an observation for at least one agent")
    return openings


def checked_outcomes(
    name: str,
    where: str,
    agent_ids: Sequence[AgentID],
    ended: Collection[AgentID],
    acted: Collection[AgentID],
    result: Any,
) -> dict[AgentID, StepOutcome]:
    """What `step` returned, if it is a sound outcome for each agent that acted, and for no agent
    that is unknown or had ended. Numbers of other libraries become floats and bools; facts are
    copied, since the environment may change its own, and text can be stored."""
    says = f"environment {name}: {where}"
    outcomes = _for_agents(says, agent_ids, result, "StepOutcome", _outcome)
    for agent in acted:
        if agent not in outcomes:
            raise EnvError(
                f"{says} returned no outcome for agent {agent!r}, which acted; return a "
                "StepOutcome for every agent that acted, with reward 0.0 if need be"
            )
    for agent in outcomes:
        if agent in ended:
            raise EnvError(
                f"{says} returned an outcome for agent {agent!r}, whose episode had ended; give "
                "an agent its last reward together with its ending"
            )
    return outcomes


def _for_agents(
    says: str, agent_ids: Sequence[AgentID], result: Any, wanted: str, read: Callable[[Any], T]
) -> dict[AgentID, T]:
    """What `read` makes of each agent's part of the result."""
    if type(result) is not dict and not isinstance(result, Mapping):
        raise EnvError(f"{says} returned {_kind(result)}; return {{agent_id: {wanted}}}")
    parts: dict[AgentID, T] = {}
    for agent, part in result.items():
        if agent not in agent_ids:
            raise EnvError(
                f"{says} answered for agent {agent!r}, which is not one of its agents "
                f"{list(agent_ids)}; answer only for agents in agent_ids"
            )
        try:
            parts[agent] = read(part)
        except _Broken as broken:
            raise EnvError(f"{says} gave agent {agent!r} {broken}") from broken.__cause__
    return parts


def _opening(opening: Any) -> tuple[Obs, Info]:
    if not (isinstance(opening, tuple) and len(opening) == 2):
        raise _Broken(f"{_kind(opening)}; give it (obs, info)")
    return _told(*opening)


def _told(obs: Any, info: Any) -> tuple[Obs, Info]:
    if not isinstance(obs, str):
        raise _Broken(f"an observation that is {_kind(obs)}; observations are text: give a str")
    if type(info) is not dict and not isinstance(info, Mapping):
        raise _Broken(f"an info that is {_kind(info)}; give a dict")
    try:
        return clean_text(obs), json_copy(info, "info") if info else {}
    except SerializationError as exc:
        raise _Broken(
            f"facts that could not be stored: {exc}; give plain numbers, strings, lists and dicts"
        ) from exc


def _outcome(outcome: Any) -> StepOutcome:
    if not isinstance(outcome, StepOutcome):
        raise _Broken(f"{_kind(outcome)}; give a StepOutcome")
    obs, info = _told(outcome.obs, outcome.info)
    terminated, truncated = _flag(outcome, "terminated"), _flag(outcome, "truncated")
    if terminated and truncated:
        raise _Broken(
            "an outcome that is both terminated and truncated; an episode that is over was not "
            "cut: set truncated only if terminated is not"
        )
    components = outcome.reward_components or {}
    if type(components) is not dict and not isinstance(components, Mapping):
        raise _Broken(
            f"reward_components that are {_kind(components)}; give a mapping of names to numbers"
        )
    floats: dict[str, float] = {}
    for part, value in components.items():
        if not isinstance(part, str):
            raise _Broken(f"a reward component named {part!r}, {_kind(part)}; name it in text")
        floats[clean_text(part)] = _number(f"reward component {part!r}", value)
    return StepOutcome(
        obs,
        _number("reward", outcome.reward),
        terminated=terminated,
        truncated=truncated,
        info=info,
        reward_components=floats,
    )


def _flag(outcome: StepOutcome, name: str) -> bool:
    value: Any = getattr(outcome, name)
    # NumPy's bool is not a subclass of bool, and common here; anything else is a mistake.
    if type(value) is bool or (type(value).__module__, type(value).__name__) in _NUMPY_BOOLS:
        return bool(value)
    raise _Broken(f"{name}={value!r}; give True or False")


_NUMPY_BOOLS = (("numpy", "bool"), ("numpy", "bool_"))


def _number(what: str, value: Any) -> float:
    if type(value) is not float and not isinstance(value, numbers.Real):
        raise _Broken(f"the {what} {value!r}, which is {_kind(value)}; give a float")
    number = float(value)
    if not math.isfinite(number):
        raise _Broken(
            f"the {what} {number}; a reward must be finite: look for a division by zero or an "
            "overflow"
        )
    if abs(number) > _LARGEST_REWARD:
        raise _Broken(
            f"the {what} {number:g}; the sum of an episode's rewards must be a float, so each is "
            f"at most {_LARGEST_REWARD:g}: scale them down"
        )
    return number


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
