"""The parts of a causal language model that trainer and engine have to tell apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING, Any

from ludic.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn


def base_causal_lm(model: nn.Module) -> nn.Module:
    """The causal LM inside compile and PEFT wrappers, or `model` itself; adapters stay in place."""
    from torch import nn

    inner: Any = model
    while True:
        if isinstance(compiled := getattr(inner, "_orig_mod", None), nn.Module):
            inner = compiled
        elif hasattr(inner, "get_base_model"):
            inner = inner.get_base_model()
        else:
            return inner  # type: ignore[no-any-return]


def head_of(causal: nn.Module) -> nn.Module:
    """The module that turns hidden states into logits."""
    find: Any = getattr(causal, "get_output_embeddings", None)
    head = None if find is None else find()
    if head is None:
        raise ConfigError(
            f"{type(causal).__name__} has no output embeddings: it is not a language model"
        )
    return head  # type: ignore[no-any-return]


def vocabulary_size(causal: nn.Module) -> int:
    """How many logits the head computes."""
    weight: Any = head_of(causal).weight
    return int(weight.shape[0])


def text_config(model: nn.Module) -> Any:
    """The configuration of the language model, which a larger one may hold; None without one."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def config_facts(causal: nn.Module) -> dict[str, Any]:
    """The configuration of a model, or of the language model in it, by name; empty without one.

    As a dict: some attributes of a configuration whose layers differ raise when they are read.
    """
    config = text_config(causal)
    return config.to_dict() if config is not None else {}


def backbone_of(causal: nn.Module) -> nn.Module:
    """The module that turns ids into hidden states."""
    prefix = getattr(causal, "base_model_prefix", "")
    backbone = getattr(causal, prefix, None) if prefix else None
    if backbone is None or backbone is causal:
        raise ConfigError(
            f"{type(causal).__name__} cannot be split into backbone and head: it has no member "
            f"named by base_model_prefix={prefix!r}"
        )
    return backbone  # type: ignore[no-any-return]


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The backbone's blocks: its longest list of modules."""
    from torch import nn

    causal = base_causal_lm(model)
    lists = [m for m in backbone_of(causal).modules() if isinstance(m, nn.ModuleList)]
    if not lists:
        raise ConfigError(f"{type(causal).__name__} has no list of layers")
    return max(lists, key=len)


def active_dropout(model: nn.Module, but: str | None = None) -> str | None:
    """The name of a module that would drop units as it is now, or None. Modules inside one that is
    called `but` do not count."""
    return Dropouts(model).active(but)


def may_drop(model: nn.Module) -> bool:
    """Whether `active_dropout` could ever find one: whether it is worth asking again later."""
    return any(p > 0 for m in model.modules() for _, p in _probabilities(m))


class Dropouts:
    """Those modules of a model that can have a probability of dropping units, 0 or more: to ask
    again and again, since looking at all the modules of a large adapter takes 10 ms. Whether they
    are still the same modules is seen in a tenth of that."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._list()

    def _list(self) -> None:
        self._all = _modules_below(self._model)
        self._modules = [(n, m) for n, m in self._model.named_modules() if _can_drop(m)]

    def active(self, but: str | None = None) -> str | None:
        """The first that would drop units as it is now. Those inside `but` do not count."""
        there = _modules_below(self._model)
        if len(there) != len(self._all) or not all(map(is_, there, self._all)):
            self._list()
        for name, module in self._modules:
            if not module.training or (but is not None and but in name.split(".")):
                continue
            for attribute, p in _probabilities(module):
                if p > 0:
                    return f"{name} (p={p})" if attribute == "p" else f"{name}.{attribute} ({p})"
        return None


def _modules_below(model: nn.Module) -> list[nn.Module]:
    """All modules, one that is shared as often as it is there: quicker than `modules`."""
    found = [model]
    for module in found:
        if children := module._modules:
            found += [child for child in children.values() if child is not None]
    return found


def _can_drop(module: nn.Module) -> bool:
    return any(_probabilities(module)) or any("drop" in name for name in vars(module))


def _probabilities(module: nn.Module) -> Iterator[tuple[str, float]]:
    """The attributes that hold one, and it: `p` of a dropout layer, or a number that the module
    hands to a function itself, as in `attention_dropout`, `dropout` or `layerdrop`."""
    from torch import nn

    if isinstance(module, nn.modules.dropout._DropoutNd):
        yield "p", module.p
        return
    for name, value in vars(module).items():
        if isinstance(value, float) and "drop" in name:
            yield name, value


@dataclass(frozen=True, slots=True)
class LogitRule:
    """What a model family does to the head's output before the softmax."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        logits = logits * self.scale if self.scale != 1.0 else logits
        if self.softcap is not None:
            logits = (logits / self.softcap).tanh() * self.softcap
        return logits


_MULTIPLIERS = ("logit_scale", "output_multiplier", "lm_head_multiplier")
_SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


def logit_rule(facts: Mapping[str, Any]) -> LogitRule:
    """What the family does to its logits, as far as its configuration says; `check_split` sees
    whether that is all."""
    family = facts.get("model_type") or ""
    scale = float(facts.get("logits_scaling") or 1.0)
    if not family.startswith("hyperclovax"):  # the others divide by it
        scale = 1.0 / scale
    if family != "mpt":  # which has the field and never looks at it
        for name in _MULTIPLIERS:
            scale *= float(facts.get(name) or 1.0)
    caps = [facts[name] for name in _SOFT_CAPS if facts.get(name)]
    return LogitRule(scale, float(caps[0]) if caps else None)
