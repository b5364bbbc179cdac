"""Run folders made by hand: quick to write, and with everything in them that a page can show."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ludic.inference.tiny import tiny_tokenizer
from ludic.rollouts.storage import RolloutWriter
from ludic.rollouts.token_log import TokenLog, UpdateTokens
from ludic.saw.building import build_items
from ludic.types import (
    AgentStep,
    EnvironmentStep,
    EnvSpec,
    FinishReason,
    Fork,
    ForkReason,
    Message,
    Rollout,
    TokenTrace,
    TruncationReason,
    VersionSpan,
)


def ids(text: str) -> tuple[int, ...]:
    """The bytes of a text as ids of the tiny tokenizer."""
    return tuple(tiny_tokenizer().encode(text, add_special_tokens=False))


def rollout(
    name: str,
    said: Sequence[str] = ("I take B2.",),
    *,
    reward: float = 1.0,
    group: str | None = None,
    agent: str = "agent",
    outcome: str | None = "win",
    prompt: str = "Your move?",
    parent: str | None = None,
    parse_error: bool = False,
    truncated: bool = False,
    error: str | None = None,
    tool: bool = False,
) -> Rollout:
    """A turn for every text. `name` is the episode's, and the agent's is added to it."""
    steps: list[AgentStep | EnvironmentStep] = []
    before: tuple[int, ...] = ()
    for turn, text in enumerate(said):
        last = turn == len(said) - 1
        prompt_ids, sampled = before + ids(prompt), ids(text)
        count = len(sampled)
        message: Message = {"role": "assistant", "content": text}
        tools: tuple[Message, ...] = ()
        if tool and turn == 0:
            arguments = {"query": "<b>sum</b>"}
            message["tool_calls"] = [
                {
                    "id": "1",
                    "type": "function",
                    "function": {"name": "look_up", "arguments": arguments},
                }
            ]
            tools = ({"role": "tool", "content": "42", "name": "look_up"},)
        steps.append(
            AgentStep(
                turn,
                ({"role": "user", "content": prompt},),
                message,
                FinishReason.LENGTH if parse_error else FinishReason.STOP,
                TokenTrace(
                    prompt_ids,
                    sampled,
                    tuple(-0.1 * (i % 7) for i in range(count)),
                    (VersionSpan(0, count, 3 + turn),) if count else (),
                ),
                fork=Fork(ForkReason.THINKING_STRIPPED, "the template drops thoughts")
                if turn == 1
                else None,
                tool_messages=tools,
                sampling={"temperature": 1.0},
            )
        )
        before = prompt_ids + sampled
        cut = truncated and last
        info: dict[str, Any] = {"result": outcome} if last and outcome and not cut else {}
        if parse_error:
            info["parse_error"] = True
        steps.append(
            EnvironmentStep(
                turn,
                (len(steps) - 1,),
                prompt,
                None if parse_error else text[:20],
                "Say it again." if parse_error else f"{text[:20]} was heard.",
                reward if last else 0.0,
                terminated=last and not cut,
                truncated=cut,
                truncation_reason=TruncationReason.MAX_STEPS if cut else None,
                stepped=not parse_error,
                reward_components={"env": reward if last else 0.0, "parser": 0.0},
                info=info,
            )
        )
    return Rollout(
        f"{name}/{agent}",
        tuple(steps),
        agent_id=agent,
        episode_id=name,
        group_id=group,
        parent_id=parent,
        env=EnvSpec("words", {"size": 3}),
        env_seed=2**62 + 1,
        error=error,
    )


def training(updates: int = 4, size: int = 4) -> list[Rollout]:
    """Groups of attempts: every second one wins, and one in a group begins otherwise."""
    found = []
    for update in range(updates):
        for attempt in range(size):
            reward = float(attempt % 2)
            said = ["I take B2.", f"Then corner {attempt}."]
            if attempt == size - 1:
                said[0] = "I take an edge."
            found.append(
                rollout(
                    f"step-{update}/{attempt}/0",
                    said,
                    reward=reward,
                    group=f"step-{update}/group-0",
                    outcome="win" if reward else "loss",
                    parse_error=attempt == 2,
                    truncated=update == 1 and attempt == 0,
                )
            )
    return found


def tokens_of(update: int, rollouts: Sequence[Rollout]) -> UpdateTokens:
    """What a trainer would have made of these."""
    credit = {(r.id, t): r.total_reward - 0.5 for r in rollouts for t in range(len(r.steps))}
    items = build_items(rollouts, credit)
    count = sum(item.turns[-1].end for item in items)
    values = np.linspace(0, 1, count, dtype=np.float32)
    return UpdateTokens(update, items, (-0.2 - values / 10).astype(np.float32), values)


def make_run(
    folder: Path,
    rollouts: Sequence[Rollout] | None = None,
    *,
    tokens: bool = True,
    steps: int = 4,
    settings: dict[str, Any] | None = None,
    suffix: str = ".jsonl.zst",
) -> Path:
    """A run folder with rollouts, metrics, settings, and two evaluations."""
    rollouts = training() if rollouts is None else rollouts
    (folder / "rollouts").mkdir(parents=True)
    (folder / "eval").mkdir()
    with RolloutWriter(folder / "rollouts" / f"train{suffix}") as writer:
        for number, each in enumerate(rollouts):
            writer.write(each)
            if number % 5 == 4:
                writer.flush()  # several blocks
    if tokens:
        backend = tiny_tokenizer().backend_tokenizer
        (folder / "rollouts" / "tokenizer.json").write_text(backend.to_str(), encoding="utf-8")
        with TokenLog(folder / "rollouts" / "train.tokens.jsonl.zst") as log:
            for update in range(steps):
                mine = [r for r in rollouts if r.id.startswith(f"step-{update}/") and not r.error]
                if mine:
                    log.write(tokens_of(update + 1, mine))
    config = {
        "schema": 1,
        "run": {"name": folder.name, "seed": 0},
        "model": {"name": "tiny"},
        "env": [{"kind": "words"}],
        "algorithm": {"name": "grpo"},
        "training": {"steps": steps, "learning_rate": 1e-3, **(settings or {})},
    }
    (folder / "run.json").write_text(json.dumps(config))
    add_metrics(folder, range(1, steps + 1))
    for name, bonus in (("before", 0.0), ("after_rl", 1.0)):
        episodes = [
            {"env_seed": i, "task_key": None, "reward": bonus * (i % 3 > 0), "success": i % 3 > 0}
            | {"outcome": "win" if bonus * (i % 3 > 0) else "loss", "episode_id": f"e{i}"}
            for i in range(20)
        ]
        report = {"name": name, "episodes": episodes}
        (folder / "eval" / f"{name}.json").write_text(json.dumps(report))
    return folder


def add_metrics(folder: Path, steps: Sequence[int]) -> None:
    """A line for every step."""
    with (folder / "metrics.jsonl").open("a") as file:
        for step in steps:
            row = {"step": step, "train/step": step, "train/reward_mean": step / 10}
            file.write(json.dumps(row | {"train/loss": 1 / step, "train/entropy": 0.5}) + "\n")
