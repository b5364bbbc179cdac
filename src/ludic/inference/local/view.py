"""A second module around the trainer's parameters, with its own mode and attention.

The trainer may run its module in training mode in another thread while the engine samples. So the
engine never calls `eval()` on it or touches its configuration: it builds new module objects around
the same parameter dictionaries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ludic.errors import ConfigError
from ludic.inference.local.attention import ATTENTION_NAME, Layout, layout_in_use
from ludic.inference.local.copies import same_kind, shared_copy
from ludic.plumbing.llama_layers import norm_epsilon
from ludic.plumbing.model_parts import active_dropout, text_config


def check_adapters(model: nn.Module) -> None:
    """Raises `ConfigError` for adapters that put tokens before the prompt: the base model inside
    them would be sampled from without."""
    for module in model.modules():
        for name, config in (getattr(module, "peft_config", None) or {}).items():
            if getattr(config, "is_prompt_learning", False):
                raise ConfigError(
                    f"the PEFT adapter {name!r} is of a prompt-learning kind, which the "
                    "in-process engine does not run: use LoRA, or a vLLM server"
                )


def check_servable(model: nn.Module) -> None:
    """Raises `ConfigError` for a module that cannot be sampled from as it stands."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "device_mesh") or hasattr(parameter.data, "device_mesh"):
            raise ConfigError(
                f"parameter {name!r} is sharded (DTensor, FSDP2): the in-process engine needs the "
                "whole module on one device; sample through a vLLM server instead"
            )
        if parameter.is_meta:
            raise ConfigError(f"parameter {name!r} is on the meta device: it has no values")
    text = text_config(model)
    if text is None or not callable(getattr(model, "get_input_embeddings", None)):
        raise ConfigError(f"{type(model).__name__} is no Hugging Face causal language model")
    if moving := rope_kinds(text) & {"dynamic", "longrope"}:
        raise ConfigError(
            f"rope type {min(moving)!r} makes one sequence's positions depend on the others in its "
            "batch; the in-process engine serves static kinds only"
        )
    if active := active_dropout(model):
        raise ConfigError(
            f"dropout is active in {active}: what is sampled would not be what is trained. Set the "
            "probability to 0, or call model.eval()"
        )


def rope_kinds(config: Any) -> set[str]:
    """The kinds of rotary embedding that a configuration names, for all layers or by their type."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if not isinstance(rope, dict):
        return set()
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    kinds = (part.get("rope_type", part.get("type")) for part in parts)
    return {kind for kind in kinds if isinstance(kind, str)}


class _FusedRMSNorm(nn.Module):
    """Root-mean-square norm in one kernel instead of eight; takes a cloned norm's place."""

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(
            hidden_states, self.weight.shape, self.weight, self.variance_epsilon
        )


class _WideHead(nn.Module):
    """A linear layer whose logits are float32: rounded to bfloat16, a logit of 20 is off by up to
    0.06, and so is the log-prob. Takes a cloned head's place."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.flatten(0, -2)
        if rows.is_cuda:
            logits = torch.mm(rows, self.weight.t(), out_dtype=torch.float32)
        else:
            logits = rows.float() @ self.weight.t().float()
        if self.bias is not None:
            logits += self.bias
        return logits.view(*hidden.shape[:-1], -1)


def _wide_head_of(model: nn.Module) -> nn.Module | None:
    """The head, if it is one matrix in a half type."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    half = type(head) is nn.Linear and head.weight.dtype in (torch.bfloat16, torch.float16)
    return head if half else None


def module_view(
    model: nn.Module,
    *,
    fuse_norms: bool = False,
    stand_in: Callable[[nn.Module], nn.Module | None] = lambda module: None,
) -> Any:
    """New module objects in eval mode over the same parameters, with the engine's attention.

    Parameter and buffer dictionaries are shared, not copied: whatever the trainer writes there,
    in place or by assignment, is what the view computes with. Its logits are float32 also where
    the module's are not. `fuse_norms` saves launches on a
    GPU; it rounds once where the module rounds twice. `stand_in` may return an empty module of
    another class to take a module's place, with all that the module has.
    """

    head = _wide_head_of(model)

    def make(module: nn.Module) -> nn.Module:
        if module is head:
            return _WideHead.__new__(_WideHead)
        # The usual norm, scaled by its weight; other kinds have other names.
        plain = type(module).__name__.endswith("RMSNorm") and norm_epsilon(module) is not None
        if fuse_norms and plain:
            return _FusedRMSNorm.__new__(_FusedRMSNorm)
        return stand_in(module) or same_kind(module)

    def attend_over_slots(config: Any) -> None:
        config._attn_implementation = ATTENTION_NAME

    view = shared_copy(model, attend_over_slots, make)
    for module in view.modules():
        module.training = False
    return view


def device_and_dtype(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Where the module lives and computes; raises when it is spread over devices."""
    devices = {p.device for p in model.parameters()}
    if len(devices) != 1:
        raise ConfigError(f"the module is spread over {sorted(map(str, devices))}: use one device")
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    return devices.pop(), embedding.weight.dtype


class Forward:
    """Calls a `module_view`. `direct` goes past the outermost module, straight to its trunk and its
    head; it is set only where that was seen to give the same bits."""

    def __init__(self, view: Any, device: torch.device, direct: bool = False) -> None:
        self.view, self.device, self.direct = view, device, direct
        # A mask of four dimensions is passed through untouched; the layouts make their own.
        self._no_mask = torch.zeros(1, 1, 1, 1, device=device)
        self._trunk, self._head = view.base_model, view.get_output_embeddings()

    def __call__(
        self, ids: Tensor, positions: Tensor, layout: Layout, keep: Tensor | None = None
    ) -> Tensor:
        """Logits [rows, vocab] for ids and positions [1, rows]; `keep` picks rows."""
        inputs = {
            "input_ids": ids,
            "position_ids": positions,
            "attention_mask": self._no_mask,
            "use_cache": False,
        }
        with layout_in_use(layout):
            if self.direct:
                hidden = self._trunk(**inputs)[0]
                logits = self._head(hidden if keep is None else hidden[:, keep])
            else:
                logits = self.view(**inputs, logits_to_keep=0 if keep is None else keep).logits
        result: Tensor = logits[0]
        return result
