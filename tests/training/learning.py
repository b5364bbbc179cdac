"""Tiny worlds, a tiny model that knows their words, and a loop that learns them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from ludic.distributed.local import LocalPolicyPublisher
from ludic.envs import LudicEnv, SingleAgentEnv
from ludic.envs.key_door import KeyDoorEnv
from ludic.inference.hf_chat_template import HFChatTemplate
from ludic.inference.local import LocalChatClient
from ludic.inference.sampling import InferenceSpec, SamplingConfig
from ludic.inference.tiny import tiny_model, tiny_tokenizer
from ludic.interaction.base import Runtime
from ludic.rollouts import EnvSpec, ProtocolSpec, RolloutEngine, RolloutRequest
from ludic.seeding import derive_seed
from ludic.training.algorithm import RLAlgorithm
from ludic.training.algorithms.sft import make_sft
from ludic.training.batching.offline_batch_source import OfflineBatchSource
from ludic.training.batching.rollout_batch_source import RolloutBatchSource
from ludic.training.config import TrainerConfig
from ludic.training.trainer import Trainer
from ludic.types import Action, Info, Obs, StepOutcome

COLOURS = ("red", "green", "blue", "white")


class ColourBandit(SingleAgentEnv):
    """A bandit with context: each of four lamps has one lever that pays 1, and one that pays 0.5."""

    blocking: ClassVar[bool] = False

    def env_reset(self, *, seed: int | None = None) -> tuple[Obs, Info]:
        self._lamp = Random(seed).randrange(len(COLOURS))
        return self.env_current_obs(), {}

    def env_current_obs(self) -> Obs:
        return COLOURS[self._lamp]

    def env_step(self, action: Action) -> StepOutcome:
        pays = {COLOURS[self._lamp - 1]: 1.0, COLOURS[self._lamp - 2]: 0.5}
        return StepOutcome("", pays.get(action.strip(), 0.0), terminated=True)


@dataclass(frozen=True)
class World:
    """An environment, the words of its language, and the return of the best policy."""

    name: str
    make: Callable[[], LudicEnv[Any, Any, Any]]
    words: tuple[str, ...]
    actions: tuple[str, ...]
    seeds: tuple[int, ...]
    best: float
    max_steps: int


def bandit() -> World:
    return World("bandit", ColourBandit, COLOURS, COLOURS, tuple(range(16)), 1.0, 1)


def key_door() -> World:
    """The smallest key-and-door worlds, seen whole; their shortest ways are 3 to 6 steps long."""
    directions = ("north", "south", "west", "east")
    phrases = (
        "You have no key.",
        "You have the key.",
        "You took the key.",
        "The door is locked.",
        "You cannot go there.",
        "That is no direction.",
        *(f"You went {d}." for d in directions),
    )
    make = lambda: KeyDoorEnv(width=3, height=2, wall_density=0.0, max_steps=12)  # noqa: E731
    seeds = (0, 1, 2, 3)
    best = sum(make().optimal_return(s) for s in seeds) / len(seeds)
    return World("key_door", make, (*phrases, *directions), directions, seeds, best, 12)


@dataclass
class Outcome:
    """Mean return of each step's rollouts."""

    returns: list[float] = field(default_factory=list)

    def last(self, count: int = 5) -> float:
        tail = self.returns[-count:]
        return sum(tail) / len(tail)


async def learn(
    world: World,
    algo: RLAlgorithm,
    folder: Path,
    *,
    steps: int,
    episodes: int = 32,
    learning_rate: float = 3e-3,
    seed: int = 0,
) -> Outcome:
    """Teaches a random model the words, then lets it learn the world by itself."""
    tokenizer = tiny_tokenizer(world.words)
    template = HFChatTemplate(tokenizer)
    model = tiny_model(seed=seed, vocab_size=len(tokenizer))
    await _teach_words(model, template, world, folder / "words")
    spec = InferenceSpec(SamplingConfig(max_tokens=3))
    group = algo.group_size or 1
    async with LocalChatClient(model, tokenizer, max_slots=episodes) as client:
        engine = RolloutEngine(
            {world.name: world.make}, runtime=Runtime(client, template, "tiny", spec), seed=seed
        )

        def requests(step: int) -> list[RolloutRequest]:
            return [
                RolloutRequest(
                    env=EnvSpec(world.name),
                    protocol=ProtocolSpec("single_agent", {"parser": "text", "system_prompt": ""}),
                    env_seed=world.seeds[(step * (episodes // group) + i) % len(world.seeds)],
                    sampling_seed=derive_seed(seed, "sampling", step, i),
                )
                for i in range(episodes // group)
            ]

        trainer = Trainer(
            model=model,
            algo=algo,
            batch_source=RolloutBatchSource(
                engine=engine,
                request_fn=requests,
                algorithm=algo,
                max_steps=world.max_steps,
                concurrency=episodes,
            ),
            publisher=LocalPolicyPublisher(client),
            cfg=TrainerConfig(
                learning_rate=learning_rate,
                max_seq_len=1024,
                micro_token_budget=4096,
                run_dir=folder,
            ),
        )
        await trainer.train(steps)
        trainer.close()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return Outcome([_mean_return(line) for line in lines])


def _mean_return(line: dict[str, Any]) -> float:
    return float(line["train/reward_mean"])


async def _teach_words(
    model: Any, template: HFChatTemplate, world: World, folder: Path, steps: int = 30
) -> None:
    """SFT on random actions: the model learns to speak, not what to say."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": observation},
                {"role": "assistant", "content": action},
            ]
        }
        for observation in _observations(world)
        for action in world.actions
    ]
    algo = make_sft()
    trainer = Trainer(
        model=model,
        algo=algo,
        batch_source=OfflineBatchSource(
            rows, chat_template=template, algorithm=algo, batch_size=len(rows)
        ),
        cfg=TrainerConfig(
            learning_rate=3e-3, max_seq_len=1024, micro_token_budget=4096, run_dir=folder
        ),
    )
    await trainer.train(steps)
    trainer.close()


def _observations(world: World) -> Sequence[str]:
    env, seen = world.make(), set()
    for seed in world.seeds:
        obs, _ = env.env_reset(seed=seed)  # type: ignore[attr-defined]
        seen.add(obs)
    return sorted(seen)
