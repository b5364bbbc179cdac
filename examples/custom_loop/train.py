"""The training loop written out by hand: Ludic's rollouts and credit, your own update.

A `RolloutEngine` plays, a credit assigner weighs every turn, the rest is plain PyTorch.
"""

import argparse
import asyncio
from random import Random

import torch
from torch.nn.utils.rnn import pad_sequence

import ludic
from ludic.inference import HFChatTemplate, InferenceSpec, LocalChatClient, SamplingConfig
from ludic.inference.tiny import tiny_model, tiny_tokenizer
from ludic.interaction import Runtime
from ludic.rollouts import GRPORequestStrategy, RolloutEngine, RolloutRequest
from ludic.saw import SAWBatch, batch_from_rollouts
from ludic.training import GroupNormalizedReturn
from ludic.types import Info, Obs


class Echo(ludic.SingleAgentEnv):
    """Say the letter that is shown. Any of the four letters is worth a little."""

    blocking = False

    def env_reset(self, *, seed: int | None = None) -> tuple[Obs, Info]:
        self.letter = Random(seed).choice("ABCD")
        return self.letter, {}

    def env_current_obs(self) -> Obs:
        return self.letter

    def env_step(self, action: str) -> ludic.StepOutcome:
        reward = 1.0 if action == self.letter else 0.1 * (action in ("A", "B", "C", "D"))
        return ludic.StepOutcome("", reward, terminated=True)


def loss_of(model: torch.nn.Module, batch: SAWBatch) -> torch.Tensor:
    """The policy gradient with an entropy bonus, as a mean over the sampled tokens."""
    ids = pad_sequence([torch.from_numpy(i.input_ids) for i in batch.items], batch_first=True)
    mask = pad_sequence([torch.from_numpy(i.action_mask) for i in batch.items], batch_first=True)
    weights = torch.tensor([item.weight for item in batch.items])[:, None]
    logps: torch.Tensor = model(input_ids=ids[:, :-1]).logits.log_softmax(-1)
    objective = weights * logps.gather(2, ids[:, 1:, None])[..., 0]
    objective -= 0.1 * (logps.exp() * logps).sum(-1)
    return -(objective * mask[:, 1:]).sum() / batch.counts.tokens


async def train(steps: int, groups: int = 8, group_size: int = 16, lr: float = 3e-3) -> list[float]:
    """Trains a random model, and returns the mean reward of every update."""
    tokenizer = tiny_tokenizer(["user\n", "assistant\n"])
    model = tiny_model(seed=0, vocab_size=len(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    task = RolloutRequest(ludic.EnvSpec("echo"), ludic.ProtocolSpec("single_agent"))
    strategy, credit = GRPORequestStrategy(group_size), GroupNormalizedReturn(group_size)
    one_token = SamplingConfig(max_tokens=1, stop_token_ids=tuple(range(len(tokenizer))))
    rewards = []
    async with LocalChatClient(model, tokenizer, max_context_tokens=32) as client:
        runtime = Runtime(client, HFChatTemplate(tokenizer), "tiny", InferenceSpec(one_token))
        engine = RolloutEngine({"echo": Echo}, runtime=runtime)
        for step in range(steps):
            requests = strategy.expand([task] * groups, prefix=f"{step}-")
            rollouts = await engine.generate_rollouts(requests, max_steps=1, prefix=f"step-{step}")
            batch = batch_from_rollouts(rollouts, credit, merge=False)
            async with client.updating(version=step + 1):  # nobody samples from half an update
                loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
            rewards.append(batch.meta["reward_mean"])
            print(f"update {step + 1}: mean reward {rewards[-1]:.2f}", flush=True)
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=80)
    asyncio.run(train(parser.parse_args().steps))
