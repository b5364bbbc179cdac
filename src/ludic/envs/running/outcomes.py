"""Holding an environment to its contract: what it returned is checked before anybody uses it."""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ludic.errors import EnvError, SerializationError
from ludic.plumbing.records import changed, json_copy
from ludic.plumbing.text import clean_text
from ludic.types import AgentID, Info, Obs, StepOutcome


class _Broken(Exception):
    """What the environment did, and what it should do instead."""


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
    try:
        if type(result) is not dict and not isinstance(result, Mapping):
            raise _Broken(f"returned {_kind(result)}; return {{agent_id: (obs, info)}}")
        if not result:
            raise _Broken("returned nothing; return an observation for at least one agent")
        openings: dict[AgentID, tuple[Obs, Info]] = {}
        for agent, opening in result.items():
            if agent not in agent_ids:
                raise _unknown(agent, agent_ids)
            if not (isinstance(opening, tuple) and len(opening) == 2):
                raise _Broken(f"gave agent {agent!r} {_kind(opening)}; give it (obs, info)")
            openings[agent] = _told(agent, *opening)
    except _Broken as broken:
        raise EnvError(f"environment {name}: reset {broken}") from None
    return openings


def checked_outcomes(
    name: str,
    where: str,
    agent_ids: Sequence[AgentID],
    ended: Collection[AgentID],
    acted: Collection[AgentID],
    result: Any,
) -> Mapping[AgentID, StepOutcome]:
    """What `step` returned, if it is a sound outcome for each agent that acted, and for no agent
    that is unknown or had ended. Numbers of other libraries become floats and bools; facts are
    copied, since the environment may change its own, and text can be stored."""
    try:
        if type(result) is not dict and not isinstance(result, Mapping):
            raise _Broken(f"returned {_kind(result)}; return {{agent_id: StepOutcome}}")
        for agent in acted:
            if agent not in result:
                raise _Broken(
                    f"returned no outcome for agent {agent!r}, which acted; return a StepOutcome "
                    "for every agent that acted, with reward 0.0 if need be"
                )
        outcomes: dict[AgentID, StepOutcome] = {}
        for agent, outcome in result.items():
            if agent not in agent_ids:
                raise _unknown(agent, agent_ids)
            if agent in ended:
                raise _Broken(
                    f"returned an outcome for agent {agent!r}, whose episode had ended; give an "
                    "agent its last reward together with its ending"
                )
            if not isinstance(outcome, StepOutcome):
                raise _Broken(f"gave agent {agent!r} {_kind(outcome)}; give a StepOutcome")
            outcomes[agent] = _checked(agent, outcome)
    except _Broken as broken:
        raise EnvError(f"environment {name}: {where} {broken}") from None
    return outcomes


def _checked(agent: AgentID, outcome: StepOutcome) -> StepOutcome:
    obs, info = _told(agent, outcome.obs, outcome.info)
    changes: dict[str, Any] = {"obs": obs, "info": info}
    if type(outcome.reward) is not float or not abs(outcome.reward) <= _LARGEST_REWARD:
        changes["reward"] = _number(agent, "reward", outcome.reward)
    for flag, value in (("terminated", outcome.terminated), ("truncated", outcome.truncated)):
        if value is not True and value is not False:
            # NumPy's bool is not a subclass of bool, and common here; anything else is a mistake.
            if type(value).__name__ not in ("bool_", "bool") or type(value).__module__ != "numpy":
                raise _Broken(f"gave agent {agent!r} {flag}={value!r}; give True or False")
            changes[flag] = bool(value)
    if outcome.terminated and outcome.truncated:
        raise _Broken(
            f"says that agent {agent!r} is both terminated and truncated; an episode that is over "
            "was not cut: set truncated only if terminated is not"
        )
    if outcome.reward_components:
        if not isinstance(outcome.reward_components, Mapping):
            raise _Broken(
                f"gave agent {agent!r} reward_components that are "
                f"{_kind(outcome.reward_components)}; give a mapping of names to numbers"
            )
        parts = changes["reward_components"] = {}
        for part, value in outcome.reward_components.items():
            if not isinstance(part, str):
                raise _Broken(
                    f"gave agent {agent!r} a reward component named {part!r}, {_kind(part)}; name "
                    "it in text"
                )
            if type(value) is not float or not abs(value) <= _LARGEST_REWARD:
                value = _number(agent, f"reward component {part!r}", value)
            parts[clean_text(part)] = value
    return changed(outcome, **changes)


_LARGEST_REWARD = 1e300
"""So that the rewards of no episode add up to infinity."""


def _number(agent: AgentID, what: str, value: Any) -> float:
    if not isinstance(value, numbers.Real):
        raise _Broken(
            f"gave agent {agent!r} the {what} {value!r}, which is {_kind(value)}; give a float"
        )
    number = float(value)
    if not math.isfinite(number):
        raise _Broken(
            f"gave agent {agent!r} the {what} {number}; a reward must be finite: look for a "
            "division by zero or an overflow"
        )
    if abs(number) > _LARGEST_REWARD:
        raise _Broken(
            f"gave agent {agent!r} the {what} {number:g}; the sum of an episode's rewards must be "
            f"a float, so each is at most {_LARGEST_REWARD:g}: scale them down"
        )
    return number


def _told(agent: AgentID, obs: Any, info: Any) -> tuple[Obs, Info]:
    """What an agent is told, if it can be stored: cleaned, and a copy."""
    if not isinstance(obs, str):
        raise _Broken(
            f"gave agent {agent!r} an observation that is {_kind(obs)}; observations are text: "
            "give a str"
        )
    if type(info) is not dict and not isinstance(info, Mapping):
        raise _Broken(f"gave agent {agent!r} an info that is {_kind(info)}; give a dict")
    try:
        return clean_text(obs), json_copy(info, "info")
    except SerializationError as exc:
        raise _Broken(
            f"gave agent {agent!r} facts that could not be stored: {exc}; give plain numbers, "
            "strings, lists and dicts"
        ) from exc


def _unknown(agent: Any, agent_ids: Sequence[AgentID]) -> _Broken:
    return _Broken(
        f"answered for agent {agent!r}, which is not one of its agents {list(agent_ids)}; "
        "answer only for agents in agent_ids"
    )


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
