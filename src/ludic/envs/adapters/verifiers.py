"""Environments of verifiers 0.3: their turns, tools and rubrics, with Ludic's loop and tokens."""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Literal

from ludic.envs.adapters import load_package, plain, refuse_stored
from ludic.envs.dataset_rows import DatasetRows
from ludic.envs.single_agent_env import SingleAgentEnv
from ludic.errors import ConfigError, EnvError
from ludic.types import Action, Info, Obs, StepOutcome
from ludic.workers.threads import BackgroundLoop

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.S)
_CUT = ("max_turns_reached", "prompt_too_long", "timeout_reached")
_CLEANUP_S = 30.0

# What verifiers runs, rewards and tools included, blocks this loop at most, and never the run's.
_loop = BackgroundLoop("verifiers")


@dataclass(eq=False, repr=False)
class VerifiersEnv(SingleAgentEnv):
    """An environment of the 0.3 line of verifiers by its `id`, as `vf.load_environment` takes it.

    One row of its dataset is one episode; the seed picks it. The agent's action is the assistant's
    message, so the agent's parser should take the whole answer ("text"): the environment and its
    rubric have parsers of their own. The reward is the rubric's, given with the ending, and its
    components are the weighted reward functions; unweighted metrics are in `info["metrics"]`.

    An episode that reaches the environment's `max_turns`, or its `timeout_seconds`, is truncated,
    and scored all the same; one with a single turn by design ends. An error of the environment
    costs the episode.

    Tools are shown in the system prompt, and called in the text as
    `<tool_call>{"name": …, "arguments": {…}}</tool_call>`; the environment runs them.

    Args:
        id: The environment's name; its module must be importable.
        args: Arguments of its `load_environment`.
        split: "train" for its dataset, "eval" for its evaluation dataset.
        index: Always this row, whatever the seed.
        limit: Use only the first `limit` rows.
    """

    id: str
    _: KW_ONLY
    args: Mapping[str, Any] | None = None
    split: Literal["train", "eval"] = "train"
    index: int | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        id, index = self.id, self.index
        if self.split not in ("train", "eval"):
            raise ConfigError(f"split={self.split!r}: must be 'train' or 'eval'")
        if id.replace("-", "_").rpartition("/")[2] not in sys.modules:
            refuse_stored(f"the environment {id!r} of verifiers", "import its module first")
        self._vf = load_package("verifiers", "verifiers")
        with _loading:
            self._env = _loaded(id, json.dumps(dict(self.args or {}), sort_keys=True))
        self._data = DatasetRows(id, self._rows())
        total = self._data.count(self.limit)
        if not total or (index is not None and not 0 <= index < total):
            raise ConfigError(f"{id} has {total} rows; none can be taken ({index=})")
        self._state: Any = None
        self._prompt: list[Any] = []
        self._obs, self._system = "", ""
        self._key: str | None = None

    def _rows(self) -> Any:
        try:
            env = self._env
            return env.get_dataset() if self.split == "train" else env.get_eval_dataset()
        except ValueError as error:
            raise ConfigError(f"{self.id} has no rows to {self.split} on: {error}") from error

    async def env_reset(self, *, seed: int | None = None) -> tuple[Obs, Info]:
        index = self._data.pick(seed, self.index, self.limit)
        row = dict(self._data.rows[index])
        self._key = f"{self.id}#{row.get('example_id', index)}"
        self._prompt = await _loop.run(self._begin(row))
        system = [message for message in self._prompt if message.role == "system"]
        shown = [message for message in self._prompt if message.role != "system"]
        tools = self._state.get("tool_defs") or []
        self._system = "\n\n".join(
            filter(None, [*(_text_of(m, self.id) for m in system), _tools_text(tools)])
        )
        self._obs = _as_text(shown, self.id)
        return self._obs, {"task": self._key}

    async def env_step(self, action: Action) -> StepOutcome:
        return await _loop.run(self._answer(action))

    def env_current_obs(self) -> Obs:
        return self._obs

    def suggested_sysprompt(self, agent_id: str) -> str | None:
        return self._system

    def task_key(self) -> str | None:
        return self._key

    def close(self) -> None:
        if not self._over:
            self._over = True
            _loop.call(
                self._env.cleanup(self._state), timeout_s=_CLEANUP_S, what=f"cleanup of {self.id}"
            )

    async def _begin(self, row: Mapping[str, Any]) -> list[Any]:
        state = await self._env.init_state(row, _stub_client(), "ludic")
        state["timing"].generation.start = time.time()
        self._state = (await self._env.setup_state(state)) or state
        if await self._env.is_completed(self._state):
            raise EnvError(f"{self.id} was over before it began: {self._ended_by()}")
        return self._messages(await self._env.get_prompt_messages(self._state))

    async def _answer(self, action: str) -> StepOutcome:
        env, state = self._env, self._state
        response = self._response(action, bool(state.get("tool_defs")))
        await env.add_model_response(state, self._prompt, response)
        before = [*self._prompt, *state["trajectory"][-1]["completion"]]
        limit = getattr(env, "timeout_seconds", None)
        if limit and time.time() - state["timing"].generation.start > limit:
            env.mark_timed_out(state)
            return await self._ending()
        if not await env.is_completed(state):
            try:
                self._prompt = self._messages(await env.get_prompt_messages(state))
            except self._vf.Error as error:
                state["error"] = error
            if state.get("error") is None and state.get("final_env_response") is None:
                grew = self._prompt[: len(before)] == before
                self._obs = _as_text(self._prompt[len(before) :] if grew else self._prompt, self.id)
                return StepOutcome(self._obs, 0.0)
            await env.is_completed(state)  # notes why
        return await self._ending()

    async def _ending(self) -> StepOutcome:
        self._over = True
        env, state = self._env, self._state
        await env.cleanup(state)
        if state.get("error") is not None:
            raise EnvError(f"{self.id} failed: {state['error']!r}")
        await env.rubric.score_rollout(state)
        await env.rubric.cleanup(state)
        cut = self._ended_by() in _CUT and getattr(env, "max_turns", 0) != 1
        final = state.get("final_env_response")
        self._obs = _as_text(self._messages(final), self.id) if final else ""
        metrics = {str(name): float(value) for name, value in (state["metrics"] or {}).items()}
        weights: dict[str, float] = dict(
            zip(env.rubric._get_reward_func_names(), env.rubric._get_reward_weights(), strict=True)
        )
        return StepOutcome(
            self._obs,
            float(state["reward"]),
            terminated=not cut,
            truncated=cut,
            info={"stopped_by": self._ended_by(), "metrics": plain(metrics)},
            reward_components={
                name: weights[name] * value for name, value in metrics.items() if weights.get(name)
            },
        )

    def _messages(self, raw: Any) -> list[Any]:
        """Environments may give messages as dicts, or as one text."""
        return list(self._vf.utils.message_utils.normalize_messages(raw))

    def _ended_by(self) -> str:
        return str(self._state.get("stop_condition") or "")

    def _response(self, action: str, has_tools: bool) -> Any:
        types = self._vf.types
        calls = _calls_in(action, types) if has_tools else []
        message = types.ResponseMessage(
            content=_CALL.sub("", action).strip() if calls else action,
            tool_calls=calls or None,
            finish_reason="tool_calls" if calls else "stop",
            is_truncated=False,
        )
        return types.Response(id="", created=0, model="ludic", message=message)


_loading = threading.Lock()


@lru_cache(maxsize=16)
def _loaded(id: str, args: str) -> Any:
    """The environment. It keeps its episodes apart itself, so all of them share it."""
    vf = load_package("verifiers", "verifiers")
    if not hasattr(vf, "load_environment"):
        raise ConfigError(
            f"verifiers {vf.__version__} no longer has the environments of the 0.3 line: run "
            "`pip install -e '.[verifiers]'` in your clone of Ludic, which takes one that has"
        )
    # An environment takes over Ctrl-C when it is made, which is not its business here, and which
    # only the main thread could do.
    load_package("verifiers.envs.environment", "verifiers").signal = _no_signals
    logging.getLogger("verifiers").setLevel(logging.ERROR)
    try:
        env = vf.load_environment(id, **json.loads(args))
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"verifiers cannot load {id!r}: {error}") from error
    if not isinstance(env, vf.MultiTurnEnv):
        raise ConfigError(
            f"{id} is a {type(env).__name__}, which has no turns of its own: name the environments "
            "that it is made of, each as an [[env]]"
        )
    if env.rubric.has_group_rewards:
        raise ConfigError(
            f"{id} rewards episodes by comparing a group of them, which is not possible here: each "
            "episode has its own reward"
        )
    return env


_no_signals = SimpleNamespace(SIGINT=0, SIGTERM=0, default_int_handler=None, signal=lambda *_: None)
"""Stands for the module `signal`, and does nothing."""


@lru_cache(maxsize=1)
def _stub_client() -> Any:
    """A client that is never asked: Ludic samples the answers."""
    vf = load_package("verifiers", "verifiers")

    def never(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise EnvError("this environment asks a model by itself, which Ludic has no client for")

    methods = dict.fromkeys(vf.Client.__abstractmethods__, never)
    return type("LudicSamples", (vf.Client,), methods)(None)


def _calls_in(text: str, types: Any) -> list[Any]:
    """The tool calls in the text. What is not JSON is passed on for the environment to refuse."""
    calls: list[Any] = []
    for number, raw in enumerate(_CALL.findall(text)):
        try:
            decoded = json.loads(raw)
            name, arguments = str(decoded["name"]), json.dumps(decoded.get("arguments") or {})
        except (ValueError, TypeError, KeyError):
            name, arguments = "unreadable", raw
        calls.append(types.ToolCall(id=f"call_{number}", name=name, arguments=arguments))
    return calls


def _tools_text(tools: Sequence[Any]) -> str:
    if not tools:
        return ""
    keys = ("name", "description", "parameters")
    shown = "\n".join(json.dumps({key: getattr(tool, key) for key in keys}) for tool in tools)
    return (
        f"You may call these tools:\n<tools>\n{shown}\n</tools>\n"
        'Call one by writing <tool_call>{"name": "...", "arguments": {...}}</tool_call>.'
    )


def _as_text(messages: Sequence[Any], id: str) -> str:
    """One message as it is; several with the names of those who speak."""
    if all(message.role == "tool" for message in messages):
        return "\n".join(f"<tool_response>{_text_of(m, id)}</tool_response>" for m in messages)
    if len(messages) == 1:
        return _text_of(messages[0], id)
    return "\n\n".join(f"{message.role}: {_text_of(message, id)}" for message in messages)


def _text_of(message: Any, id: str) -> str:
    content = message.content
    if content is None or isinstance(content, str):
        return content or ""
    parts = [p if isinstance(p, dict) else p.model_dump() for p in content]
    if any(part.get("type") != "text" for part in parts):
        raise EnvError(f"{id} shows more than text, which its agent could not see")
    return "".join(str(part["text"]) for part in parts)
