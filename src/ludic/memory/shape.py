"""How large a decoder is, from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Targets: TypeAlias = tuple[str, ...] | Literal["all-linear"]

PLAIN_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3", "smollm3"})
"""Whose parameters are those that `ModelShape` counts; others are counted once they are loaded."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter; targets are named by the ends of their modules' names."""

    rank: int
    targets: Targets = "all-linear"

    def covers(self, linear: str) -> bool:
        """Whether this linear layer has an adapter."""
        return self.targets == "all-linear" or any(
            linear == target.rpartition(".")[2] for target in self.targets
        )


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder whose layers are alike: attention, a gated MLP and two norms."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    tied: bool = True
    family: str = ""
    positions: int | None = None
    counted: int | None = None
    """Its parameters, where they were counted; else they follow from the sizes."""
    trained: int | None = None
    """How many of them, an adapter's included, are trained, where that was counted."""

    @staticmethod
    def of(facts: Mapping[str, Any]) -> ModelShape | None:
        """Reads a configuration; None if it does not say how large the model is."""
        names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
        sizes = [facts.get(name) for name in names]
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            return None
        layers, hidden, heads, vocab = (int(size) for size in sizes if size)
        kv_heads = facts.get("num_key_value_heads") or heads
        head_dim = facts.get("head_dim") or hidden // heads
        inner = facts.get("intermediate_size") or 4 * hidden
        if not all(isinstance(size, int) for size in (kv_heads, head_dim, inner)):
            return None  # they differ from layer to layer
        return ModelShape(
            *(layers, hidden, heads, kv_heads, head_dim, inner, vocab),
            tied=bool(facts.get("tie_word_embeddings", True)),
            family=str(facts.get("model_type", "")),
            positions=facts.get("max_position_embeddings") or None,
        )

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Each matrix of a layer: how many numbers it takes and gives for a token."""
        hidden, queries, keys = self.hidden, self.queries, self.keys
        return {
            "q_proj": (hidden, queries),
            "k_proj": (hidden, keys),
            "v_proj": (hidden, keys),
            "o_proj": (queries, hidden),
            "gate_proj": (hidden, self.inner),
            "up_proj": (hidden, self.inner),
            "down_proj": (self.inner, hidden),
        }

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normed."""
        return self.family == "qwen3"

    @property
    def queries(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def layer_matrices(self) -> int:
        """The parameters of a layer's matrices."""
        return sum(taken * given for taken, given in self.linears.values())

    @property
    def outside_layers(self) -> int:
        """The parameters of embedding and head."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """All of them, without an adapter. Biases, a ten-thousandth, are left out."""
        if self.counted is not None:
            return self.counted
        norms = (2 * self.layers + 1) * self.hidden
        return self.layers * self.layer_matrices + norms + self.outside_layers

    def adapter_parameters(self, adapter: Adapter) -> int:
        """Two matrices of the adapter's rank for each that it covers."""
        covered = (size for name, size in self.linears.items() if adapter.covers(name))
        return self.layers * adapter.rank * sum(taken + given for taken, given in covered)

    @property
    def kv_numbers(self) -> int:
        """What a token keeps for sampling: a key and a value in every layer."""
        return 2 * self.layers * self.keys
