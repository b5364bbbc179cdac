"""The peers of the update benchmark: TRL's GRPO loss, and a plain padded loop.

Both take one optimizer step over the same samples. TRL's half is its own code: its padding over
the whole batch, its split into chunks, its fused head, and `GRPOTrainer._compute_loss` called on a
stand-in that has the attributes it reads, so that no dataset, reward or generation is needed.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import types
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ludic.saw.items import SAWBatch, SAWItem


def clipped_loss(logp: Tensor, old: Tensor, weight: Tensor, mask: Tensor, total: int) -> Tensor:
    """PPO's clipped surrogate, averaged over all action tokens of the batch."""
    ratio = (logp - old).exp()
    objective = torch.minimum(ratio * weight, ratio.clamp(0.8, 1.2) * weight)
    return -(objective * mask).sum() / total


def _rows(items: Sequence[SAWItem], device: torch.device) -> dict[str, Tensor]:
    """Right-padded rows, with what the loss needs at the place of each token."""
    longest = max(len(i.input_ids) for i in items)
    rows: dict[str, list[Any]] = {k: [] for k in ("ids", "attend", "act", "weight", "old")}
    for item in items:
        pad = (0, longest - len(item.input_ids))
        act = item.action_mask.astype(bool)
        weight, old = np.zeros(len(act), np.float32), np.zeros(len(act), np.float32)
        given, logps = item.attachments.token_weights, item.attachments.behavior_logprobs
        weight[act] = item.weight if given is None else given
        old[act] = 0.0 if logps is None else logps
        values: list[Any] = [item.input_ids, item.attention_mask, item.action_mask, weight, old]
        for key, value in zip(rows, values, strict=True):
            rows[key].append(np.pad(value, pad))
    return {k: torch.from_numpy(np.stack(v)).to(device) for k, v in rows.items()}


def padded_gradients(model: nn.Module, batch: SAWBatch, rows: int, device: torch.device) -> float:
    """A plain loop: `rows` rows at a time, padded to the longest of them, whole logits."""
    total = 0.0
    for start in range(0, len(batch.items), rows):
        part = _rows(batch.items[start : start + rows], device)
        logits = model(
            input_ids=part["ids"], attention_mask=part["attend"], use_cache=False
        ).logits[:, :-1]
        logps = logits.float().log_softmax(-1)
        logp = logps.gather(2, part["ids"][:, 1:, None]).squeeze(2)
        loss = clipped_loss(
            logp, part["old"][:, 1:], part["weight"][:, 1:], part["act"][:, 1:], batch.counts.tokens
        )
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total


class TRLUpdate:
    """TRL's loss over one row per episode, the other tokens masked, as its multi-turn path does."""

    def __init__(self, model: nn.Module) -> None:
        trainer, utils = _import_trl()
        utils.add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy"))
        self.model, self._utils = model, utils
        accelerator = types.SimpleNamespace(
            autocast=nullcontext, num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
        )
        args = types.SimpleNamespace(
            use_bias_correction_kl=False, delta=None, steps_per_generation=1
        )
        self._self = types.SimpleNamespace(
            model=model,
            accelerator=accelerator,
            args=args,
            aux_loss_enabled=False,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            importance_sampling_level="token",
            beta=0.0,
            loss_type="dapo",
            epsilon_low=0.2,
            epsilon_high=0.2,
            use_vllm=False,
            current_gradient_accumulation_steps=1,
            _entropy_bonus_enabled=False,
            _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        )
        score = trainer._get_per_token_logps_and_entropies
        score = getattr(score, "__wrapped__", score)
        self._self._get_per_token_logps_and_entropies = types.MethodType(score, self._self)
        self._loss = getattr(trainer._compute_loss, "__wrapped__", trainer._compute_loss)

    def inputs(self, batch: SAWBatch, rows: int, device: torch.device) -> list[dict[str, Any]]:
        """Prompts padded left and completions right, over the whole batch, then split in chunks."""
        pad, items = self._utils.pad, batch.items
        prompts, completions, tools, olds, weights = [], [], [], [], []
        for item in items:
            first = int(np.flatnonzero(item.action_mask)[0])
            prompts.append(torch.from_numpy(item.input_ids[:first]))
            completions.append(torch.from_numpy(item.input_ids[first:]))
            tools.append(torch.from_numpy(item.action_mask[first:].astype(np.int64)))
            old = torch.zeros(len(item.input_ids) - first)
            logps = item.attachments.behavior_logprobs
            assert logps is not None
            old[tools[-1].bool()] = torch.from_numpy(logps)
            olds.append(old)
            weights.append(item.turns[0].weight)
        ones = [[torch.ones_like(t) for t in part] for part in (prompts, completions)]
        whole = {
            "prompt_ids": pad(prompts, padding_value=0, padding_side="left"),
            "prompt_mask": pad(ones[0], padding_value=0, padding_side="left"),
            "completion_ids": pad(completions, padding_value=0, padding_side="right"),
            "completion_mask": pad(ones[1], padding_value=0, padding_side="right"),
            "tool_mask": pad(tools, padding_value=1, padding_side="right"),
            "old_per_token_logps": pad(olds, padding_value=0.0, padding_side="right"),
            "advantages": torch.tensor(weights),
            "num_items_in_batch": torch.tensor(float(batch.counts.tokens)),
        }
        chunks = self._utils.split_tensor_dict(whole, max(len(items) // rows, 1))
        return [{k: v.to(device) for k, v in chunk.items()} for chunk in chunks]

    def gradients(self, batch: SAWBatch, rows: int, device: torch.device) -> float:
        """Forward and backward over the batch, `rows` episodes at a time."""
        total = 0.0
        for inputs in self.inputs(batch, rows, device):
            loss = self._loss(self._self, self.model, inputs)
            loss.backward()
            total += float(loss.detach())
        for values in self._self._metrics.values():
            values.clear()
        return total


def _import_trl() -> tuple[Any, Any]:
    """TRL's trainer class and its utilities.

    Packages that TRL imports for data sets and tables, and never touches here, are stood in for
    where the machine does not have them.
    """
    wanted = ("datasets", "pandas", "pyarrow", "psutil")
    missing = {name for name in wanted if importlib.util.find_spec(name) is None}
    if missing:
        sys.meta_path.append(_StandIns(missing))
    from trl.trainer import utils
    from trl.trainer.grpo_trainer import GRPOTrainer

    return GRPOTrainer, utils


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the named packages, and all below them, as modules of empty classes."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.split(".")[0] not in self.names:
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _StandIn(types.ModuleType):
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {})
        setattr(self, name, made)
        return made
