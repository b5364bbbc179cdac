"""The estimated policy gradient against the exact one, through the whole library.

A tiny model plays an environment of at most two turns, one token each, whose expected return can
be enumerated. Rollouts come from the real engine, sampler and chat template; the gradient goes
through the real merge, packing, log-probs and losses. With `Constant` aggregation REINFORCE and
RLOO estimate the gradient of the expected return, and GRPO without std (G − 1)/G of it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from ludic.envs import SingleAgentEnv
from ludic.inference import HFChatTemplate, InferenceSpec, LocalChatClient, SamplingConfig
from ludic.inference.client import TokenCompletionRequest
from ludic.inference.tiny import TINY_VOCAB_SIZE, tiny_model, tiny_tokenizer
from ludic.interaction import Runtime
from ludic.rollouts import (
    EnvSpec,
    GRPORequestStrategy,
    ProtocolSpec,
    RolloutEngine,
    RolloutRequest,
)
from ludic.saw import batch_from_rollouts
from ludic.seeding import derive_seed
from ludic.training import (
    Constant,
    GroupNormalizedReturn,
    RLAlgorithm,
    make_dr_grpo,
    make_reinforce,
)
from ludic.training.credit_assignment.returns import role_groups, rollout_return, spread
from ludic.training.loss import ReinforceLoss
from ludic.training.update.packing import lay_out, pack
from ludic.training.update.planning import plan_micro_batches
from ludic.training.update.policy import Policy
from ludic.types import (
    Action,
    ChatResponse,
    FinishReason,
    Info,
    Obs,
    Rollout,
    RolloutStepKey,
    StepOutcome,
    TokenTrace,
)

pytestmark = pytest.mark.integration

GROUP = 4
GROUPS_PER_BATCH = 8
LENGTH = 3.0
OBSERVATIONS = ("Choose.", "Pick one, now.")


class TwoChoices(SingleAgentEnv):
    """Some first answers end the episode, others lead to a second question."""

    blocking: ClassVar[bool] = False

    def env_reset(self, *, seed: int | None = None) -> tuple[Obs, Info]:
        self._first: int | None = None
        self._obs = OBSERVATIONS[(seed or 0) % 2]
        return self._obs, {}

    def env_step(self, action: Action) -> StepOutcome:
        kind = sum(map(ord, action)) % 3
        if self._first is None:
            self._first = kind
            return StepOutcome("And now?", 0.5 * (kind == 1), terminated=kind == 0)
        return StepOutcome("Over.", float(kind == self._first), terminated=True)

    def env_current_obs(self) -> Obs:
        return self._obs


class Forced:
    """A client that answers with the tokens it is told: for walking the tree of all episodes."""

    max_context_tokens = None

    def __init__(self) -> None:
        self.tokens: list[int] = []

    async def complete_tokens(self, request: TokenCompletionRequest) -> ChatResponse:
        trace = TokenTrace(request.prompt_token_ids, (self.tokens.pop(0),), (0.0,))
        return ChatResponse(trace, FinishReason.STOP)

    async def sync_weights(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError


@cache
def template() -> HFChatTemplate:
    return HFChatTemplate(tiny_tokenizer())


def model() -> Any:
    """A tiny policy with preferences: one that is all but uniform is mostly noise."""
    policy = tiny_model(
        seed=11, hidden_size=16, layers=1, heads=2, kv_heads=1, initializer_range=0.02
    )
    with torch.no_grad():
        policy.get_input_embeddings().weight.mul_(10)
    return policy


def make_engine(client: Any) -> RolloutEngine:
    return RolloutEngine(
        {"two_choices": TwoChoices}, runtime=Runtime(client, template(), "tiny"), seed=5
    )


def ask(number: int) -> RolloutRequest:
    # Every id stops: an answer is one token, and none of them counts as cut.
    sampling = SamplingConfig(max_tokens=2, stop_token_ids=tuple(range(TINY_VOCAB_SIZE)))
    return RolloutRequest(
        EnvSpec("two_choices"),
        ProtocolSpec("single_agent", {"parser": "text"}),
        env_seed=number % 2,
        sampling_seed=derive_seed(0, "group", number),
        inference=InferenceSpec(sampling),
    )


@dataclass(frozen=True)
class Tree:
    """All episodes of one environment seed: prompts and rewards by tokens.

    `second_prompts` and `states` are for first tokens after which the episode goes on;
    `second_rewards` has, per state, the reward of every second token.
    """

    first_prompt: tuple[int, ...]
    first_rewards: tuple[float, ...]
    second_prompts: Mapping[int, tuple[int, ...]]
    states: Mapping[int, float]
    second_rewards: Mapping[float, tuple[float, ...]]


async def walk(seed: int) -> Tree:
    """Plays every first token, and every second token from each state of the environment."""
    client = Forced()
    engine = make_engine(client)

    async def play(*tokens: int) -> Rollout:
        client.tokens = [*tokens]
        (rollout,) = await engine.generate_rollouts([ask(seed)], 2, 1)
        assert rollout.error is None
        return rollout

    first = [await play(token, 0) for token in range(TINY_VOCAB_SIZE)]
    rewards = tuple(next(iter(r.turns())).reward for r in first)
    going_on = [t for t, r in enumerate(first) if len(r.agent_steps) == 2]
    # The first reward tells the states apart that go on: right, wrong, or not read at all.
    states = {token: rewards[token] for token in going_on}
    second: dict[float, tuple[float, ...]] = {}
    for token, state in states.items():
        if state not in second:
            found = [await play(token, other) for other in range(TINY_VOCAB_SIZE)]
            second[state] = tuple(list(r.turns())[1].reward for r in found)
    return Tree(
        _prompt(first[0], 0), rewards, {t: _prompt(first[t], 1) for t in going_on}, states, second
    )


def _prompt(rollout: Rollout, call: int) -> tuple[int, ...]:
    trace = rollout.agent_steps[call].trace
    assert trace is not None
    return trace.prompt_token_ids


def expected_return(policy: Any, tree: Tree) -> Tensor:
    """Σ over all episodes of probability times return, with plain forward passes in float64."""
    first = _distributions(policy, [tree.first_prompt])[0]
    value = first @ torch.tensor(tree.first_rewards, dtype=torch.float64)
    by_length: dict[int, list[int]] = {}
    for token, prompt in tree.second_prompts.items():
        by_length.setdefault(len(prompt), []).append(token)
    for tokens in by_length.values():
        second = _distributions(policy, [tree.second_prompts[t] for t in tokens])
        rewards = torch.tensor(
            [tree.second_rewards[tree.states[t]] for t in tokens], dtype=torch.float64
        )
        value = value + (first[tokens] * (second * rewards).sum(1)).sum()
    return value


def _distributions(policy: Any, prompts: Sequence[Sequence[int]]) -> Tensor:
    logits: Tensor = policy(input_ids=torch.tensor(prompts)).logits[:, -1]
    return logits.softmax(-1)


def flat_gradient(module: Any) -> Tensor:
    return torch.cat([p.grad.double().flatten() for p in module.parameters()])


@dataclass(frozen=True, eq=False)
class World:
    """Rollouts, and the exact gradient of what they estimate."""

    rollouts: list[Rollout]
    gradient: Tensor
    value: float


async def sample(groups: int) -> list[Rollout]:
    async with LocalChatClient(model(), tiny_tokenizer()) as client:
        requests = GRPORequestStrategy(GROUP).expand([ask(n) for n in range(groups)])
        return await make_engine(client).generate_rollouts(requests, 2, 64)


@pytest.fixture(
    scope="module",
    params=[768, pytest.param(4096, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
    ids=lambda groups: f"{groups}_groups",
)
def world(request: pytest.FixtureRequest) -> World:
    trees = [asyncio.run(walk(seed)) for seed in range(2)]
    exact = model().double()
    value = sum(expected_return(exact, tree) for tree in trees) / len(trees)
    assert isinstance(value, Tensor)
    value.backward()  # type: ignore[no-untyped-call]
    return World(asyncio.run(sample(request.param)), flat_gradient(exact), value.item())


def batch_gradient(policy: Policy, rollouts: Sequence[Rollout], algorithm: RLAlgorithm) -> Tensor:
    """What one update would follow, by the trainer's own arithmetic: −L · d loss."""
    batch = algorithm.prepare(batch_from_rollouts(rollouts, algorithm.credit_assigner))
    layout = lay_out(batch)
    (plan,) = plan_micro_batches(layout, micro_token_budget=2048, scope=algorithm.loss.scope)
    policy.zero_grad()
    for members in filter(None, plan):
        micro = pack(layout, members)
        loss, _ = algorithm.loss.compute(policy.score(micro), micro.loss)
        loss.backward()  # type: ignore[no-untyped-call]
    return -LENGTH * flat_gradient(policy.model)


class LeaveOneOut:
    """RLOO's credit: R minus the mean of the group's others."""

    group_size = GROUP

    def compute(self, rollouts: Sequence[Rollout]) -> Mapping[RolloutStepKey, float]:
        returns = [rollout_return(r) for r in rollouts]
        weights = [0.0] * len(rollouts)
        for members in role_groups(rollouts, GROUP):
            total = sum(returns[m] for m in members)
            for m in members:
                weights[m] = returns[m] - (total - returns[m]) / (GROUP - 1)
        return spread(rollouts, weights)


ALGORITHMS = {
    "reinforce": (make_reinforce(aggregation=Constant(LENGTH)), 1.0),
    "rloo": (RLAlgorithm("rloo", LeaveOneOut(), ReinforceLoss(aggregation=Constant(LENGTH))), 1.0),
    "dr_grpo": (make_dr_grpo(GROUP, max_completion_tokens=LENGTH), (GROUP - 1) / GROUP),
}


def directions(gradient: Tensor) -> Tensor:
    """The gradient's own direction, and random ones to look for what should not be there."""
    generator = torch.Generator().manual_seed(0)
    others = torch.randn(12, gradient.numel(), generator=generator, dtype=torch.float64)
    return torch.nn.functional.normalize(torch.cat([gradient[None], others]), dim=1)


@cache
def estimates(world: World, name: str) -> tuple[Tensor, Tensor]:
    """Mean and standard error of the estimated gradient along each direction."""
    algorithm, _ = ALGORITHMS[name]
    policy, along = Policy(model()), directions(world.gradient)
    size = GROUP * GROUPS_PER_BATCH
    found = torch.stack(
        [
            along @ batch_gradient(policy, world.rollouts[start : start + size], algorithm)
            for start in range(0, len(world.rollouts), size)
        ]
    )
    return found.mean(0), found.std(0) / math.sqrt(len(found))


def test_the_rollouts_vary_in_length_and_fail_to_parse_now_and_then(world: World) -> None:
    lengths = {rollout.num_tokens for rollout in world.rollouts}
    failures = sum(not s.stepped for r in world.rollouts for s in r.env_steps)
    assert lengths == {1, 2}
    assert failures > 0
    mean = sum(r.total_reward for r in world.rollouts) / len(world.rollouts)
    deviation = math.sqrt(sum((r.total_reward - mean) ** 2 for r in world.rollouts))
    assert abs(mean - world.value) < 4 * deviation / len(world.rollouts)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_estimate_agrees_with_the_exact_gradient_within_its_confidence_interval(
    name: str, world: World
) -> None:
    _, share = ALGORITHMS[name]
    mean, error = estimates(world, name)
    exact = directions(world.gradient) @ world.gradient
    # Thirteen directions at four standard errors: one in a thousand honest estimates would fail,
    # and the seeds are fixed.
    assert ((mean - share * exact).abs() / error).max() < 4.0
    # The test can tell: the interval is far smaller than the gradient.
    assert error[0] < 0.06 * exact[0]


def test_the_interval_tells_the_group_baseline_from_the_whole_gradient(world: World) -> None:
    mean, error = estimates(world, "dr_grpo")
    exact = world.gradient.norm()
    assert exact - mean[0] > 4 * error[0]
    # Without std, a group's own mean in the baseline costs exactly that share of RLOO's estimate.
    rloo, _ = estimates(world, "rloo")
    torch.testing.assert_close(mean, rloo * (GROUP - 1) / GROUP, rtol=1e-3, atol=1e-5)
    assert ALGORITHMS["dr_grpo"][0].credit_assigner == GroupNormalizedReturn(GROUP)
