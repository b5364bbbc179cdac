"""Tiny worlds, a tiny model that knows their words, and a loop that learns them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from ludic.agents.base_agent import CUT_FEEDBACK
from ludic.distributed.local import LocalPolicyPublisher
from ludic.envs import LudicEnv, SingleAgentEnv
from ludic.envs.key_door import KeyDoorEnv
from ludic.inference.local import LocalChatClient
from ludic.inference.sampling import InferenceSpec, SamplingConfig
from ludic.inference.templates.hf import HFChatTemplate
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
    """Four levers: one pays 1, the others 0.5, 0.2 and nothing."""

    blocking: ClassVar[bool] = False
    pays: ClassVar[dict[str, float]] = dict(zip(COLOURS, (0.2, 0.5, 1.0, 0.0), strict=True))

    def env_reset(self, *, seed: int | None = None) -> tuple[Obs, Info]:
        return self.env_current_obs(), {}

    def env_current_obs(self) -> Obs:
        return "Pull."

    def env_step(self, action: Action) -> StepOutcome:
        return StepOutcome("", self.pays.get(action.strip(), 0.0), terminated=True)


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
    return World("bandit", ColourBandit, COLOURS, COLOURS, (0,), 1.0, 1)


def key_door() -> World:
    """One small key-and-door world, whose shortest way is 4 steps long."""
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

    def make() -> KeyDoorEnv:
        return KeyDoorEnv(width=3, height=2, wall_density=0.0, max_steps=8)

    seed = next(s for s in range(100) if len(make().level(s).shortest_solution() or ()) == 4)
    best = make().optimal_return(seed)
    return World("key_door", make, (*phrases, *directions), directions, (seed,), best, 8)


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
    tokenizer = tiny_tokenizer((*world.words, "user\n", "assistant\n", CUT_FEEDBACK))
    template = HFChatTemplate(tokenizer)
    model = lively_model(seed, len(tokenizer))
    await teach_words(model, template, world, folder / "words")
    spec = InferenceSpec(SamplingConfig(max_tokens=3))
    group = algo.group_size or 1
    # Saying nothing that can be read must cost more than a wrong step, or it is the better policy.
    parser = {
        "kind": "regex",
        "pattern": f"^({'|'.join(world.actions)})$",
        "error_reward": -0.2,
        "feedback": "?",
    }
    async with LocalChatClient(
        model, tokenizer, max_slots=episodes, max_context_tokens=256
    ) as client:
        engine = RolloutEngine(
            {world.name: world.make}, runtime=Runtime(client, template, "tiny", spec), seed=seed
        )

        def requests(step: int) -> list[RolloutRequest]:
            return [
                RolloutRequest(
                    env=EnvSpec(world.name),
                    protocol=ProtocolSpec("single_agent", {"parser": parser, "system_prompt": "."}),
                    task_key=world.name,
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


def lively_model(seed: int, vocab_size: int) -> Any:
    """A tiny model whose random answers depend on what it reads: the usual initialisation is so
    small that for many steps it could only learn one answer for everything."""
    import torch

    model = tiny_model(seed=seed, vocab_size=vocab_size, initializer_range=0.02)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model


async def teach_words(
    model: Any, template: HFChatTemplate, world: World, folder: Path, steps: int = 40
) -> None:
    """SFT on random walks: the model learns to speak, not what to say."""
    algo = make_sft()
    trainer = Trainer(
        model=model,
        algo=algo,
        batch_source=OfflineBatchSource(
            _random_walks(world, 32), chat_template=template, algorithm=algo, batch_size=8
        ),
        cfg=TrainerConfig(
            learning_rate=3e-3, max_seq_len=1024, micro_token_budget=4096, run_dir=folder
        ),
    )
    await trainer.train(steps)
    trainer.close()


def _random_walks(world: World, count: int) -> Sequence[dict[str, Any]]:
    env, rng, rows = world.make(), Random(0), []
    for walk in range(count):
        obs, _ = env.env_reset(seed=world.seeds[walk % len(world.seeds)])  # type: ignore[attr-defined]
        messages = [{"role": "system", "content": "."}]
        for _ in range(world.max_steps):
            action = rng.choice(world.actions)
            messages += [{"role": "user", "content": obs}, {"role": "assistant", "content": action}]
            outcome = env.env_step(action)  # type: ignore[attr-defined]
            if outcome.terminated or outcome.truncated:
                break
            obs = outcome.obs
        rows.append({"messages": messages})
    return rows
