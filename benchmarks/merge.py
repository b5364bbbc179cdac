"""From 1,024 rollouts of 8 turns to a packed batch: `python -m benchmarks.merge`.

The rollouts have the shape of an agent's dialogues: a system prompt and a task (300 to 500 tokens),
then turns of an answer (100 to 200 tokens) and an observation (40 to 120 tokens), each prompt
beginning with everything before it. As in an agent's memory, a prompt shares its token objects with
the call before it; `reread_rollouts_per_s` is for rollouts that were read from a file, where every
prompt has objects of its own and comparing them costs more.

Timed is the way from rollouts with credit to tensors laid end to end. The plain loop makes one row
per turn, token by token, as one would write it first; `unmerged` is this library without merging.
All are checked to hold the same action tokens with the same weights.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ludic.saw import build_items, make_batch
from ludic.training.update.packing import lay_out, pack
from ludic.types import (
    AgentStep,
    EnvironmentStep,
    FinishReason,
    Rollout,
    RolloutStepKey,
    Step,
    TokenTrace,
    VersionSpan,
    from_json,
    to_json,
)

VOCABULARY = 50_000
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


@dataclass(frozen=True, slots=True)
class Packed:
    """What all ways come to: tokens end to end, and facts about the actions among them."""

    input_ids: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor
    logprobs: torch.Tensor


def make_rollouts(count: int, turns: int, seed: int = 0) -> list[Rollout]:
    """Dialogues whose prompts grow turn by turn."""
    draw = np.random.default_rng(seed)
    return [make_rollout(f"rollout-{i}", f"group-{i // 8}", turns, draw) for i in range(count)]


def reread(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The same rollouts as they come from a file."""
    return [from_json(Rollout, to_json(rollout)) for rollout in rollouts]


def make_rollout(name: str, group: str, turns: int, draw: np.random.Generator) -> Rollout:
    def tokens(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw.integers(0, VOCABULARY, draw.integers(low, high)).tolist())

    history = tokens(300, 500)
    steps: list[Step] = []
    for turn in range(turns):
        answer = tokens(100, 200)
        trace = TokenTrace(
            history,
            answer,
            tuple((-draw.exponential(size=len(answer))).tolist()),
            (VersionSpan(0, len(answer), 0),),
        )
        message = {"role": "assistant", "content": ""}
        steps.append(
            AgentStep(turn, (), message, FinishReason.STOP, trace, sampling=SAMPLING)  # type: ignore[arg-type]
        )
        steps.append(EnvironmentStep(turn, (len(steps) - 1,), "", "", "", float(draw.normal())))
        history = (*history, *answer, *tokens(40, 120))
    return Rollout(name, tuple(steps), episode_id=name, group_id=group)


def with_library(
    rollouts: Sequence[Rollout], credit: Mapping[RolloutStepKey, float], merge: bool
) -> Packed:
    """Build, count, lay out and pack, as the trainer does."""
    layout = lay_out(make_batch(build_items(rollouts, credit, merge=merge)))
    packed = pack(layout, range(len(layout.items)))
    assert packed.loss.behavior_logprobs is not None
    return Packed(
        packed.input_ids, packed.target_ids, packed.loss.weights, packed.loss.behavior_logprobs
    )


def with_plain_loop(rollouts: Sequence[Rollout], credit: Mapping[RolloutStepKey, float]) -> Packed:
    """One row per turn, token by token."""
    input_ids: list[int] = []
    targets: list[int] = []
    weights: list[float] = []
    logprobs: list[float] = []
    for rollout in rollouts:
        for turn in rollout.turns():
            for step in turn.agent_steps:
                trace = step.trace
                assert trace is not None
                assert trace.completion_logprobs is not None
                for token in trace.prompt_token_ids:
                    input_ids.append(token)
                for token, logprob in zip(
                    trace.completion_token_ids, trace.completion_logprobs, strict=True
                ):
                    input_ids.append(token)
                    targets.append(token)
                    weights.append(credit[rollout.id, turn.index])
                    logprobs.append(logprob)
    return Packed(
        torch.tensor(input_ids),
        torch.tensor(targets),
        torch.tensor(weights, dtype=torch.float32),
        torch.tensor(logprobs, dtype=torch.float32),
    )


def timed(work: Callable[[], Packed], repeats: int) -> tuple[Packed, float]:
    """The result, and the least processor time of several runs: what the work costs by itself."""
    best = float("inf")
    for _ in range(repeats):
        started = time.process_time()
        result = work()
        best = min(best, time.process_time() - started)
    return result, best


def same_actions(a: Packed, b: Packed) -> bool:
    """Whether both hold the same action tokens in the same order, with the same facts."""
    return all(
        torch.equal(getattr(a, name), getattr(b, name))
        for name in ("targets", "weights", "logprobs")
    )


def run(count: int, turns: int, repeats: int) -> dict[str, Any]:
    """The figures."""
    rollouts = make_rollouts(count, turns)
    credit = {(r.id, t.index): t.reward for r in rollouts for t in r.turns()}
    merged, merged_s = timed(lambda: with_library(rollouts, credit, merge=True), repeats)
    unmerged, unmerged_s = timed(lambda: with_library(rollouts, credit, merge=False), repeats)
    plain, plain_s = timed(lambda: with_plain_loop(rollouts, credit), repeats)
    stored = reread(rollouts)
    again, again_s = timed(lambda: with_library(stored, credit, merge=True), repeats)
    if not all(same_actions(merged, other) for other in (unmerged, plain, again)):
        raise SystemExit("these ways do not hold the same action tokens")
    return {
        "rollouts": count,
        "turns": turns,
        "rollouts_per_s": round(count / merged_s, 1),
        "reread_rollouts_per_s": round(count / again_s, 1),
        "unmerged_rollouts_per_s": round(count / unmerged_s, 1),
        "plain_loop_rollouts_per_s": round(count / plain_s, 1),
        "speedup_over_plain_loop": round(plain_s / merged_s, 2),
        "tokens_before": plain.input_ids.numel(),
        "tokens_after": merged.input_ids.numel(),
        "fewer_tokens": round(plain.input_ids.numel() / merged.input_ids.numel(), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--rollouts", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    figures = run(args.rollouts, args.turns, args.repeats)
    for name, value in figures.items():
        print(f"{name:28} {value}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
