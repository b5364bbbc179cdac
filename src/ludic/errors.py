"""The tree of errors. Every message says what was wrong, where, and what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class LudicError(Exception):
    """Base of every error that Ludic raises on purpose."""


class ConfigError(LudicError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class UnknownNameError(LudicError, KeyError):
    """A name that no registry knows; the message lists the nearest ones."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        known = sorted(known)
        near = near_names(name, known, n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(map(repr, near))}?" if near else f"known: {known}"
        super().__init__(f"unknown {kind} {name!r}; {hint}")
        self.kind, self.name, self.near = kind, name, near

    def __str__(self) -> str:
        return str(self.args[0])


class DuplicateNameError(LudicError, ValueError):
    """A name that is registered already."""


class MissingExtraError(LudicError, ImportError):
    """An optional dependency that is not installed; the message names the extra."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"{package!r} is not installed: in your clone of Ludic, run "
            f"`pip install -e '.[{extra}]'` to get it"
        )


class DeadlineError(LudicError, TimeoutError):
    """A wait that ran past its deadline: says for what, on whom, and for how long."""

    def __init__(self, what: str, whom: str, seconds: float) -> None:
        super().__init__(f"waited {seconds:.3g} s for {what} from {whom}; the deadline passed")
        self.what, self.whom, self.seconds = what, whom, seconds


class DataError(LudicError, ValueError):
    """A trace, step or rollout that contradicts itself."""


class SerializationError(LudicError, ValueError):
    """Data that cannot be written, or text that does not hold what it should."""


class SchemaVersionError(SerializationError):
    """A file of a newer schema than this version of Ludic reads."""


class EnvError(LudicError):
    """An environment broke its contract, or raised."""


class NoThreadError(EnvError):
    """Too many worker threads are busy or hang; no more calls are taken."""


class ProtocolError(LudicError):
    """An interaction that cannot go on as configured."""


class AgentError(LudicError):
    """An agent that is put together wrongly."""


class ToolError(LudicError):
    """A tool that cannot be used as declared."""


class TemplateError(LudicError):
    """A chat template that is missing or cannot render what it is given."""


class InferenceError(LudicError):
    """A request that the inference backend could not serve."""


class RequestRejectedError(InferenceError, ValueError):
    """A request that is wrong in itself; retrying it cannot help."""


class EngineClosedError(InferenceError):
    """The backend was shut down while, or before, the request was served."""


class QueueFullError(InferenceError):
    """The backend's bounded queue is full."""


class NotTrainableError(LudicError):
    """Data that must not be trained on: no token ids, no log-probs, or a sampling setting
    whose distribution the trainer cannot reproduce."""


class RolloutError(LudicError):
    """Episodes that failed past the stated limit, or a rollout that is inconsistent."""


class CreditError(LudicError, ValueError):
    """Credit that cannot be assigned: a broken group, a weight that is not finite."""


class BatchError(LudicError, ValueError):
    """A sample or batch that the trainer cannot take."""


class TrainingError(LudicError):
    """A part of the run that broke the trainer's contract with it in the middle of a step."""


class NonFiniteError(LudicError, ArithmeticError):
    """A loss or gradient that is not finite, past the allowed number of times."""


class OutOfMemoryError(LudicError, MemoryError):
    """The device ran out of memory; the message names the setting to lower."""

    on_all_ranks = False
    """Whether ranks that train together have agreed on it, and all raise it."""


class HubError(LudicError):
    """A model that could not be brought to the hub; the message says what is there now."""


class CheckpointError(LudicError):
    """A checkpoint that cannot be written, or does not fit what it is loaded into."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint with a part that is missing, cut or changed."""


class PublishError(LudicError):
    """Weights that did not arrive as they were sent."""


class LaunchError(LudicError):
    """A role that cannot be placed or started: says which, where, and why."""


class PipelineError(LudicError):
    """Actors and trainer over Redis that cannot go on: says what is wrong with which server."""


def near_names(name: str, known: Iterable[str], n: int = 1, cutoff: float = 0.5) -> list[str]:
    """Returns the names that may have been meant, the nearest first: those that `name` is short for
    (`lr`: `learning_rate`; `temp`: `temperature`), and those that are spelled alike."""
    known = list(known)
    meant = [k for k in known if _is_short_for(name.lower(), k)]
    if len(name) < 4:
        cutoff = max(cutoff, 0.6)  # two letters are in many names
    alike = difflib.get_close_matches(name, known, n=n, cutoff=cutoff)
    if alike and difflib.SequenceMatcher(None, name, alike[0]).ratio() >= 0.8:
        meant = [*alike, *meant]  # a slip of the finger
    return list(dict.fromkeys([*meant, *alike]))[:n]


def _is_short_for(short: str, name: str) -> bool:
    words = re.split(r"[_.\- ]", name.lower())
    initials = "".join(word[:1] for word in words)
    return len(short) >= 2 and (short == initials or (len(short) > 2 and name.startswith(short)))


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns "; did you mean …?" with the nearest of `known`, or with all of them if none is
    near; nothing if there are none."""
    known = sorted(known)
    near = near_names(name, known)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; there are: {', '.join(known)}" if known else ""
