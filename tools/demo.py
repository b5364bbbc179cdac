"""What `make demo` runs.

The main job is to train a small model at Tic-Tac-Toe. Until that command is there, this says so and
shows what is there: a game of Tic-Tac-Toe through the whole way of the data, with a script in the
model's place.
"""

from __future__ import annotations

import asyncio
import re
from random import Random

from ludic.inference import HFChatTemplate, ScriptedChatClient
from ludic.inference.scripted_client import ScriptedCall
from ludic.inference.tiny import tiny_tokenizer
from ludic.interaction import Runtime
from ludic.rollouts import EnvSpec, ProtocolSpec, RolloutEngine, RolloutRequest
from ludic.types import Rollout


def random_move(call: ScriptedCall) -> str:
    """Any free cell, by the request's own seed."""
    free = re.findall("[ABC][123]", call.text.rpartition("Free:")[2])
    return f"<move>{Random(call.request.sampling.seed).choice(free)}</move>"


async def play() -> Rollout:
    """One game against an opponent that plays at random."""
    template = HFChatTemplate(tiny_tokenizer())
    runtime = Runtime(ScriptedChatClient(random_move, template), template, model="script")
    request = RolloutRequest(
        env=EnvSpec("tic_tac_toe", {"opponent": "random"}),
        protocol=ProtocolSpec("single_agent", {"parser": {"kind": "xml", "tag": "move"}}),
        env_seed=3,
        sampling_seed=3,
    )
    rollouts = await RolloutEngine(runtime=runtime).generate_rollouts([request], max_steps=9)
    return rollouts[0]


def main() -> None:
    """Plays, and prints the game."""
    print("Training at Tic-Tac-Toe is not there yet. A game with a script in the model's place:\n")
    rollout = asyncio.run(play())
    print(rollout.env_steps[0].obs)
    for step in rollout.env_steps:
        print(f"\n> {step.action}    reward {step.reward:+.1f}\n{step.next_obs}")
    tokens = sum(len(s.trace.completion_token_ids) for s in rollout.agent_steps if s.trace)
    print(f"\n{len(rollout.env_steps)} moves, {tokens} tokens, return {rollout.total_reward:+.1f}")


if __name__ == "__main__":
    main()
