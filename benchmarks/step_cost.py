"""What one step of an episode costs the library itself: `python -m benchmarks.step_cost`.

256 Tic-Tac-Toe episodes run at the same time on one event loop and one core. A scripted client
plays legal moves; prompts are rendered with SmolLM2's real tokenizer and chat template. Counted is
the processor time of everything, from the environment's reset to the finished rollouts, less what
the client itself spends on tokenising (a real backend samples ids, it does not encode text).

Run `python -m tools.smollm2` once before. `--profile` prints where the time goes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from ludic.envs.tic_tac_toe import TicTacToeEnv
from ludic.inference import HFChatTemplate, ScriptedCall, ScriptedChatClient, load_tokenizer
from ludic.interaction import RunSpec, Runtime
from ludic.registry import make_protocol
from ludic.seeding import derive_seed
from ludic.types import Rollout
from tools import smollm2

PROTOCOL = {"parser": {"kind": "xml", "tag": "move"}}


class TimedCodec:
    """The client's tokeniser, with a clock on it."""

    def __init__(self, codec: Any) -> None:
        self._codec = codec
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codec, name)

    def encode(self, text: str) -> list[int]:
        started = time.thread_time()
        ids: list[int] = self._codec.encode(text)
        self.seconds += time.thread_time() - started
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        started = time.thread_time()
        text: str = self._codec.decode(ids)
        self.seconds += time.thread_time() - started
        return text


@dataclass(frozen=True, slots=True)
class Cost:
    """One pass over all the episodes."""

    steps: int
    model_calls: int
    prompt_tokens: int
    cpu_s: float
    wall_s: float
    tokenize_s: float

    @property
    def us_per_step(self) -> float:
        return (self.cpu_s - self.tokenize_s) / self.steps * 1e6


def choose_move(call: ScriptedCall) -> str:
    """A free cell, picked by the request's seed from the list that ends the observation."""
    free = call.tail(48).rpartition("Free: ")[2].partition("<")[0].split()
    seed = call.request.sampling.seed or 0
    return f"I look for a free cell and take it. <move>{free[seed % len(free)]}</move>"


async def run_episodes(runtime: Runtime, episodes: int) -> list[Rollout]:
    """All episodes at the same time, each with its own environment, agent and seeds."""

    async def one(index: int) -> list[Rollout]:
        protocol = make_protocol("single_agent", runtime, **PROTOCOL)
        spec = RunSpec(
            f"episode-{index}",
            env_seed=derive_seed(0, "env", index),
            sampling_seed=derive_seed(0, "sampling", index),
        )
        rollouts: list[Rollout] = await protocol.run(
            TicTacToeEnv(opponent="random", mark="random"), spec
        )
        return rollouts

    results = await asyncio.gather(*map(one, range(episodes)))
    return [rollout for rollouts in results for rollout in rollouts]


def measure(template: HFChatTemplate, episodes: int) -> Cost:
    """One pass; checks that the episodes were played to their end, with extended prompts."""
    codec = TimedCodec(template.codec)
    tokens: Any = SimpleNamespace(codec=codec, end_token_id=template.end_token_id)
    client = ScriptedChatClient(choose_move, tokens)
    runtime = Runtime(client, template, "scripted")
    wall, cpu = time.perf_counter(), time.process_time()
    rollouts = asyncio.run(run_episodes(runtime, episodes))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    calls = [step for rollout in rollouts for step in rollout.agent_steps]
    broken = [r for r in rollouts if r.error or not r.terminated]
    if broken:
        raise RuntimeError(f"{broken[0].id} was not played to its end: {broken[0].error}")
    forks = [step.fork for step in calls if step.fork]
    if forks:
        raise RuntimeError(f"{len(forks)} prompts were not extensions: {forks[0]}")
    return Cost(
        steps=sum(len(r.env_steps) for r in rollouts),
        model_calls=len(calls),
        prompt_tokens=sum(len(s.trace.prompt_token_ids) for s in calls if s.trace),
        cpu_s=cpu,
        wall_s=wall,
        tokenize_s=codec.seconds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="print a profile of one pass")
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    tokenizer = load_tokenizer(str(smollm2.path()))
    measure(HFChatTemplate(tokenizer), 8)
    if args.profile:
        profile(HFChatTemplate(tokenizer), args.episodes)
    # A template object per pass: each begins with empty caches.
    costs = [measure(HFChatTemplate(tokenizer), args.episodes) for _ in range(args.repeats)]
    for cost in costs:
        print(
            f"{cost.steps} steps, {cost.prompt_tokens} prompt tokens: {cost.us_per_step:.1f} us of "
            f"processor time a step, and {cost.tokenize_s / cost.steps * 1e6:.1f} us of the "
            f"client's tokenising; {cost.wall_s / cost.steps * 1e6:.1f} us on the clock"
        )
    figures = {
        "benchmark": "step_cost",
        "us_per_step": round(statistics.median(c.us_per_step for c in costs), 1),
        "us_per_step_best": round(min(c.us_per_step for c in costs), 1),
        "us_per_step_worst": round(max(c.us_per_step for c in costs), 1),
        "client_tokenize_us_per_step": round(
            statistics.median(c.tokenize_s / c.steps * 1e6 for c in costs), 1
        ),
        "episodes": args.episodes,
        "steps": costs[0].steps,
        "model_calls": costs[0].model_calls,
        "prompt_tokens": costs[0].prompt_tokens,
        "repeats": args.repeats,
    }
    print(json.dumps(figures))


def profile(template: HFChatTemplate, episodes: int) -> None:
    """Prints the functions that take the most time."""
    import cProfile
    import pstats

    recorder = cProfile.Profile()
    recorder.enable()
    measure(template, episodes)
    recorder.disable()
    pstats.Stats(recorder).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
