"""Holding an environment to its contract: what it returned is checked before anybody uses it."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from ludic.errors import EnvError, SerializationError
from ludic.types import AgentID, Info, Obs, StepOutcome, check_json


def checked_opening(
    name: str, agent_ids: Sequence[AgentID], result: Any
) -> dict[AgentID, tuple[Obs, Info]]:
    """What `reset` returned, if it is `{agent: (obs, info)}` for known agents."""
    if len(set(agent_ids)) != len(agent_ids):
        _broken(name, f"agent_ids names an agent twice: {list(agent_ids)}", "name each once")
    if not isinstance(result, Mapping):
        _broken(name, f"reset returned {_kind(result)}", "return {agent_id: (obs, info)}")
    if not result:
        _broken(name, "reset returned nothing", "return an observation for at least one agent")
    for agent, opening in result.items():
        if agent not in agent_ids:
            _unknown(name, "reset", agent, agent_ids)
        if not (isinstance(opening, tuple) and len(opening) == 2):
            _broken(name, f"reset gave agent {agent!r} {_kind(opening)}", "give it (obs, info)")
        _check_text(name, "reset", agent, opening[0])
        _check_info(name, "reset", agent, opening[1])
    return dict(result)


def checked_outcomes(
    name: str,
    where: str,
    agent_ids: Sequence[AgentID],
    ended: Collection[AgentID],
    acted: Collection[AgentID],
    result: Any,
) -> Mapping[AgentID, StepOutcome]:
    """What `step` returned, if it is a sound outcome for each agent that acted, and for no agent
    that is unknown or had ended. Numbers of other libraries become floats and bools."""
    if not isinstance(result, Mapping):
        _broken(name, f"{where} returned {_kind(result)}", "return {agent_id: StepOutcome}")
    for agent in acted:
        if agent not in result:
            _broken(
                name,
                f"{where} returned no outcome for agent {agent!r}, which acted",
                "return a StepOutcome for every agent that acted, with reward 0.0 if need be",
            )
    plain: dict[AgentID, StepOutcome] | None = None
    for agent, outcome in result.items():
        if agent not in agent_ids:
            _unknown(name, where, agent, agent_ids)
        if agent in ended:
            _broken(
                name,
                f"{where} returned an outcome for agent {agent!r}, whose episode had ended",
                "give an agent its last reward together with its ending",
            )
        if not isinstance(outcome, StepOutcome):
            _broken(name, f"{where} gave agent {agent!r} {_kind(outcome)}", "give a StepOutcome")
        sound = _checked(name, where, agent, outcome)
        if sound is not outcome:
            plain = plain if plain is not None else dict(result)
            plain[agent] = sound
    return result if plain is None else plain


def _checked(name: str, where: str, agent: AgentID, outcome: StepOutcome) -> StepOutcome:
    _check_text(name, where, agent, outcome.obs)
    _check_info(name, where, agent, outcome.info)
    changes: dict[str, Any] = {}
    if type(outcome.reward) is not float or not math.isfinite(outcome.reward):
        changes["reward"] = _number(name, where, agent, "reward", outcome.reward)
    for flag in ("terminated", "truncated"):
        value = getattr(outcome, flag)
        if type(value) is not bool:
            changes[flag] = _flag(name, where, agent, flag, value)
    if outcome.terminated and outcome.truncated:
        _broken(
            name,
            f"{where} says that agent {agent!r} is both terminated and truncated",
            "an episode that is over was not cut: set truncated only if terminated is not",
        )
    if outcome.reward_components:
        if not isinstance(outcome.reward_components, Mapping):
            _broken(
                name,
                f"{where} gave agent {agent!r} reward_components that are "
                f"{_kind(outcome.reward_components)}",
                "give a mapping of names to numbers",
            )
        for part, value in outcome.reward_components.items():
            if type(value) is not float or not math.isfinite(value):
                parts = changes.setdefault("reward_components", dict(outcome.reward_components))
                parts[part] = _number(name, where, agent, f"reward component {part!r}", value)
    return dataclasses.replace(outcome, **changes) if changes else outcome


def _number(name: str, where: str, agent: AgentID, what: str, value: Any) -> float:
    if not isinstance(value, numbers.Real):
        _broken(
            name,
            f"{where} gave agent {agent!r} the {what} {value!r}, which is {_kind(value)}",
            "give a float",
        )
    number = float(value)
    if not math.isfinite(number):
        _broken(
            name,
            f"{where} gave agent {agent!r} the {what} {number}",
            "a reward must be finite: look for a division by zero or an overflow",
        )
    return number


def _flag(name: str, where: str, agent: AgentID, flag: str, value: Any) -> bool:
    # NumPy's bool is no subclass of bool, and common in environments; anything else is a mistake.
    if type(value).__name__ not in ("bool_", "bool") or type(value).__module__ != "numpy":
        _broken(name, f"{where} gave agent {agent!r} {flag}={value!r}", "give True or False")
    return bool(value)


def _check_text(name: str, where: str, agent: AgentID, obs: Any) -> None:
    if not isinstance(obs, str):
        _broken(
            name,
            f"{where} gave agent {agent!r} an observation that is {_kind(obs)}",
            "observations are text: give a str",
        )


def _check_info(name: str, where: str, agent: AgentID, info: Any) -> None:
    if not isinstance(info, Mapping):
        _broken(name, f"{where} gave agent {agent!r} an info that is {_kind(info)}", "give a dict")
    try:
        check_json(info, "info")
    except SerializationError as exc:
        _broken(
            name,
            f"{where} gave agent {agent!r} facts that could not be stored: {exc}",
            "give plain numbers, strings, lists and dicts",
        )


def _unknown(name: str, where: str, agent: Any, agent_ids: Sequence[AgentID]) -> NoReturn:
    _broken(
        name,
        f"{where} answered for agent {agent!r}, which is none of its agents {list(agent_ids)}",
        "answer only for agents in agent_ids",
    )


def _broken(name: str, what: str, todo: str) -> NoReturn:
    raise EnvError(f"environment {name}: {what}; {todo}")


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
