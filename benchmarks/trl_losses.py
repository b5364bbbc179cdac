"""Ludic's losses beside TRL's, on the same tensors: values and gradients, in float64.

Runs TRL's own `GRPOTrainer._compute_loss` on a trainer that was never set up, but has every
attribute that the method reads, so that nothing of it is copied here. Needs TRL, whose own
dependencies are not wanted: `pip install --no-deps 'trl==1.16.*'`. The last line is JSON.

    python -m benchmarks.trl_losses
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ludic.errors import LudicError
from ludic.saw.items import BatchCounts
from ludic.training import (
    CISPOLoss,
    CompositeLoss,
    Constant,
    GroupNormalizedReturn,
    SAPOLoss,
    SequenceClippedSurrogateLoss,
    TokenClippedSurrogateLoss,
    TokenKLLoss,
    TokenMean,
)
from ludic.training.types import Loss, LossBatch, TokenLogProbs
from ludic.types import AgentStep, EnvironmentStep, FinishReason, Message, Rollout

NEEDS = ("trl",)
MAX_LENGTH = 12
BETA = 0.04


@dataclass(frozen=True)
class Tensors:
    """Padded rows, as TRL takes them: one completion each, in groups of four."""

    logps: Tensor
    old_logps: Tensor
    ref_logps: Tensor
    advantages: Tensor
    mask: Tensor

    @staticmethod
    def random(seed: int, rows: int = 8, drift: float = 0.3) -> Tensors:
        g = torch.Generator().manual_seed(seed)

        def noise() -> Tensor:
            return torch.randn(rows, MAX_LENGTH, generator=g, dtype=torch.float64)

        logps = -noise().abs() - 0.1
        lengths = torch.randint(1, MAX_LENGTH + 1, (rows, 1), generator=g)
        return Tensors(
            logps=logps,
            old_logps=logps + drift * noise(),
            ref_logps=logps + drift * noise(),
            advantages=torch.randn(rows, generator=g, dtype=torch.float64),
            mask=(torch.arange(MAX_LENGTH)[None] < lengths).to(torch.float64),
        )

    def rows(self, start: int, end: int) -> Tensors:
        return Tensors(*(getattr(self, f)[start:end] for f in self.__dataclass_fields__))


@dataclass(frozen=True)
class Result:
    """A loss and its gradient by the padded log-probs."""

    value: float
    gradient: Tensor


def trl_loss(
    tensors: Tensors, *, batch_tokens: float | None = None, accumulation: int = 1, **settings: Any
) -> Result:
    """What TRL computes, with `settings` over the defaults of its configuration."""
    try:
        from trl.trainer.grpo_config import GRPOConfig
        from trl.trainer.grpo_trainer import GRPOTrainer
    except ImportError as exc:
        raise LudicError("TRL is missing: pip install --no-deps 'trl==1.16.*'") from exc
    defaults = {k: f.default for k, f in GRPOConfig.__dataclass_fields__.items()}
    args = SimpleNamespace(**{**defaults, "steps_per_generation": accumulation, **settings})
    logps = tensors.logps.clone().requires_grad_()
    scores = (logps, torch.zeros_like(logps), None)

    def same(value: Tensor, **_: Any) -> Tensor:
        return value

    trainer = object.__new__(GRPOTrainer)
    attributes: dict[str, Any] = {
        "args": args,
        "loss_type": args.loss_type,
        "beta": args.beta,
        "epsilon_low": args.epsilon,
        "epsilon_high": args.epsilon if args.epsilon_high is None else args.epsilon_high,
        "importance_sampling_level": args.importance_sampling_level,
        "max_completion_length": MAX_LENGTH,
        "off_policy_mask_threshold": None,
        "top_entropy_quantile": 1.0,
        "use_vllm": False,
        "aux_loss_enabled": False,
        "_entropy_bonus_enabled": False,
        "current_gradient_accumulation_steps": accumulation,
        "model": SimpleNamespace(training=True),
        "accelerator": SimpleNamespace(num_processes=1, gather=same, reduce=same),
        "_metrics": {"train": defaultdict(list)},
        "_get_per_token_logps_and_entropies": lambda *a, **k: scores,
    }
    for name, value in attributes.items():
        object.__setattr__(trainer, name, value)
    ids = torch.zeros(tensors.mask.shape, dtype=torch.int64)
    loss = trainer._compute_loss(
        None,
        {
            "prompt_ids": ids[:, :1],
            "prompt_mask": ids[:, :1] + 1,
            "completion_ids": ids,
            "completion_mask": tensors.mask,
            "advantages": tensors.advantages,
            "old_per_token_logps": tensors.old_logps,
            "ref_per_token_logps": tensors.ref_logps,
            "num_items_in_batch": torch.tensor(batch_tokens or float(tensors.mask.sum())),
        },
    )
    (gradient,) = torch.autograd.grad(loss, logps)
    return Result(float(loss.detach()), gradient)


def ludic_loss(tensors: Tensors, loss: Loss) -> Result:
    """What Ludic computes: the same tokens without their padding, one turn per row."""
    rows, _ = tensors.mask.shape
    places = tensors.mask.bool()
    logps = tensors.logps.clone().requires_grad_()
    row_of = torch.arange(rows)[:, None].expand_as(places)[places]
    lengths = places.sum(1)
    batch = LossBatch(
        weights=tensors.advantages[row_of],
        turn_ids=row_of,
        rollout_ids=row_of,
        group_ids=row_of // 4,
        turn_lengths=lengths,
        rollout_lengths=lengths,
        group_lengths=lengths.view(-1, 4).sum(1),
        counts=BatchCounts(int(lengths.sum()), rows, rows, rows // 4),
        behavior_logprobs=tensors.old_logps[places],
        reference_logprobs=tensors.ref_logps[places],
    )
    value, _ = loss.compute(TokenLogProbs(logps[places]), batch)
    (gradient,) = torch.autograd.grad(value, logps)
    return Result(float(value.detach()), gradient)


def with_plain_kl(loss: Any) -> Loss:
    """GRPO's KL as in its paper, and in TRL with `use_bias_correction_kl=False`: no ratio."""
    kl = TokenKLLoss(estimator="k3", importance=False, aggregation=loss.aggregation)
    return CompositeLoss((1.0, loss), (BETA, kl))


GRPO = TokenClippedSurrogateLoss()
DR_GRPO = TokenClippedSurrogateLoss(aggregation=Constant(MAX_LENGTH))
CISPO = CISPOLoss(cap=1.3)
SAPO = SAPOLoss()
GSPO = SequenceClippedSurrogateLoss()
PLAIN_KL = {"beta": BETA, "use_bias_correction_kl": False}
GSPO_SETTINGS = {
    "loss_type": "grpo",
    "importance_sampling_level": "sequence",
    "epsilon": 3e-4,
    "epsilon_high": 4e-4,
}

SAME: dict[str, tuple[dict[str, Any], Loss]] = {
    "grpo": ({"loss_type": "grpo"}, GRPO),
    "grpo_kl": ({"loss_type": "grpo", **PLAIN_KL}, with_plain_kl(GRPO)),
    "dapo": (
        {"loss_type": "dapo", "epsilon_high": 0.28},
        TokenClippedSurrogateLoss(clip=(0.8, 1.28), aggregation=TokenMean()),
    ),
    "dr_grpo": ({"loss_type": "dr_grpo"}, DR_GRPO),
    "dr_grpo_kl": ({"loss_type": "dr_grpo", **PLAIN_KL}, with_plain_kl(DR_GRPO)),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.3}, CISPO),
    "cispo_kl": ({"loss_type": "cispo", "epsilon_high": 1.3, **PLAIN_KL}, with_plain_kl(CISPO)),
    "sapo": ({"loss_type": "sapo"}, SAPO),
    "gspo": (GSPO_SETTINGS, GSPO),
}
"""What must be equal to rounding."""


def _own_kl(loss: Any) -> Loss:
    return CompositeLoss((1.0, loss), (BETA, TokenKLLoss(aggregation=loss.aggregation)))


DIFFERENT: dict[str, tuple[dict[str, Any], Loss]] = {
    "KL with sg(ρ) here, without ρ there": ({"loss_type": "grpo", **PLAIN_KL}, _own_kl(GRPO)),
    "KL with sg(ρ) here, with ρ's gradient there (default)": (
        {"loss_type": "grpo", "beta": BETA},
        _own_kl(GRPO),
    ),
}
"""What differs by choice; docs/algorithms.md says why."""


def difference(theirs: Result, ours: Result) -> tuple[float, float]:
    """The largest difference of the values and of the gradients."""
    gap = (theirs.gradient - ours.gradient).abs().max()
    return abs(theirs.value - ours.value), float(gap)


def compare(cases: dict[str, tuple[dict[str, Any], Loss]], seeds: int = 20) -> dict[str, Any]:
    """Per case, the worst difference over random batches."""
    found = {}
    for name, (settings, loss) in cases.items():
        gaps = [
            difference(trl_loss(tensors, **settings), ludic_loss(tensors, loss))
            for tensors in map(Tensors.random, range(seeds))
        ]
        found[name] = {
            "value": max(value for value, _ in gaps),
            "gradient": max(gradient for _, gradient in gaps),
        }
    return found


def compare_accumulated(seeds: int = 20) -> dict[str, float]:
    """TRL over two micro-batches of four rows against one loss of ours over all eight."""
    found: dict[str, float] = {}
    for name, (settings, loss) in SAME.items():
        worst = 0.0
        for tensors in map(Tensors.random, range(seeds)):
            tokens = float(tensors.mask.sum())
            parts = [
                trl_loss(tensors.rows(*bounds), batch_tokens=tokens, accumulation=2, **settings)
                for bounds in ((0, 4), (4, 8))
            ]
            theirs = Result(
                sum(part.value for part in parts), torch.cat([part.gradient for part in parts])
            )
            worst = max(worst, *difference(theirs, ludic_loss(tensors, loss)))
        found[name] = worst
    return found


def compare_advantages(seeds: int = 20) -> float:
    """GRPO's advantages, ours against TRL's std and the same formula."""
    from trl.trainer.utils import nanstd

    worst = 0.0
    for seed in range(seeds):
        rewards = torch.randn(4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        theirs = (rewards - rewards.mean()) / (nanstd(rewards) + 1e-4)
        rollouts = [_rollout(str(i), reward) for i, reward in enumerate(rewards.tolist())]
        ours = GroupNormalizedReturn(4, normalize_adv=True).compute(rollouts)
        worst = max(worst, *(abs(ours[str(i), 0] - float(a)) for i, a in enumerate(theirs)))
    return worst


def _rollout(name: str, reward: float) -> Rollout:
    said = Message(role="assistant", content="")
    steps = (
        AgentStep(0, (), said, FinishReason.STOP),
        EnvironmentStep(0, (0,), "", "", "", reward),
    )
    return Rollout(name, steps, group_id="group")


def main() -> None:
    """Prints the comparison."""
    same, different = compare(SAME), compare(DIFFERENT)
    for title, found in (("the same on both sides", same), ("different by choice", different)):
        print(f"{title} (largest difference over 20 random batches):")
        for name, gap in found.items():
            print(f"  {name:55s} value {gap['value']:.1e}   gradient {gap['gradient']:.1e}")
    accumulated = compare_accumulated()
    print("two accumulated micro-batches of TRL against one of ours:")
    for name, worst in accumulated.items():
        print(f"  {name:55s} {worst:.1e}")
    advantages = compare_advantages()
    print(f"GRPO's advantages: {advantages:.1e}")
    gaps = {"same": same, "different_by_choice": different, "accumulated": accumulated}
    print(json.dumps(gaps | {"advantages": advantages}))


if __name__ == "__main__":
    main()
