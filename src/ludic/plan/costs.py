"""Seconds of a decode step, a pass over samples, a publish: from a model's sizes and a profile."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from ludic.memory.shape import Adapter, ModelShape
from ludic.plan.profile import Profile

CROWD = 128
"""Rows from which on a decode step's products take longer: they fill the tiles of its kernels."""
_ITEM = 2


@dataclass(frozen=True, slots=True)
class Costs:
    """What a model costs on a machine."""

    profile: Profile
    shape: ModelShape
    adapter: Adapter | None = None

    def decode_features(self, rows: float, cached: float, gpus: int = 1) -> dict[str, float]:
        """What a decode step depends on: `cached` tokens of keys and values in all its rows. On
        several GPUs, tensors are split."""
        shape = self.shape
        used = shape.layers * shape.layer_matrices + shape.vocab * shape.hidden
        adapted = self.adapter is not None
        return {
            "decode_s": 1.0,
            "decode_layer_s": shape.layers,
            "decode_weight_s": _ITEM * used / gpus,
            "decode_row_s": 2 * used * rows / gpus,
            "decode_crowd_s": 2 * used * max(rows - CROWD, 0) / gpus,
            "decode_width_s": rows * shape.layers * shape.hidden / gpus,
            "decode_cache_s": _ITEM * shape.kv_numbers * cached / gpus,
            "decode_adapter_layer_s": shape.layers if adapted else 0.0,
            "decode_adapter_s": _ITEM * used / gpus if adapted else 0.0,
        }

    def decode_s(
        self, rows: float, cached: float = 0.0, gpus: int = 1, *, server: bool = False
    ) -> float:
        """One decode step, in the process or of a vLLM `server`, whose host works beside it."""
        if rows <= 0:
            return 0.0
        features = self.decode_features(rows, cached, gpus)
        seconds = sum(self.profile[name] * size for name, size in features.items())
        if gpus > 1:  # two sums over the GPUs in every layer
            moved = 2 * rows * self.shape.hidden * _ITEM / (1e9 * self.profile["link_gb_s"])
            seconds += self.shape.layers * (2 * self.profile["latency_s"] + moved)
        return max(seconds, rows * self.profile["server_token_s"]) if server else seconds

    def cached_token_s(self, gpus: int = 1) -> float:
        """What one more token of keys and values adds to a decode step."""
        return self.profile["decode_cache_s"] * _ITEM * self.shape.kv_numbers / gpus

    def prompt_s(self, tokens: float, context: float, gpus: int = 1) -> float:
        """So many tokens of prompts, each of `context`: a third of forward and backward."""
        return self.pass_s(tokens, passes=0, context=context) / 3 / gpus

    def token_flops(self, context: float) -> float:
        """Operations of a token, forward and backward: 6 for each weight, 4 if it is frozen, and
        attention to half of `context`."""
        shape = self.shape
        weights = shape.layers * shape.layer_matrices + shape.vocab * shape.hidden
        return (4 if self.adapter else 6) * weights + 6 * shape.layers * shape.queries * context

    def pass_features(
        self, tokens: float, *, context: float, again: bool = False
    ) -> dict[str, float]:
        """What forward and backward over `tokens` depend on, in sequences of `context` tokens.
        `again`: activations are recomputed."""
        shape, more = self.shape, 4 / 3 if again else 1.0
        elements = tokens * shape.layers * (6 * shape.hidden + 3 * shape.inner) * more
        return {
            "pass_flop_s": tokens * self.token_flops(context) * more,
            "pass_element_s": elements,
            "pass_adapter_s": tokens * shape.layers * more if self.adapter else 0.0,
        }

    def pass_s(self, tokens: float, *, passes: int, context: float, again: bool = False) -> float:
        """Forward and backward over `tokens` in so many passes. A layer of a small pass takes as
        long as the starts of its kernels."""
        features = self.pass_features(tokens, context=context, again=again)
        working = sum(self.profile[name] * size for name, size in features.items())
        return max(working, passes * self.shape.layers * self.profile["pass_layer_s"])

    def update_s(
        self,
        tokens: float,
        longest: float,
        *,
        budget: int,
        context: float,
        ranks: int = 1,
        again: bool = False,
        steps: int = 1,
    ) -> float:
        """An update over `tokens`: passes of at most `budget` tokens, weights gathered and
        gradients scattered beside them, the optimizer. It has so many `steps`, for each of which
        all ranks wait for the one with the `longest` sequence."""
        each = max(tokens / ranks, steps * longest if ranks > 1 else longest)
        passes = max(steps, ceil(each / budget))
        computing = self.pass_s(each, passes=passes, context=context, again=again)
        trained = self.trained
        optimizer = steps * 30 * trained / ranks / (1e12 * max(self.profile["hbm_tb_s"], 1e-6))
        return max(computing, passes * self.collective_s(ranks)) + optimizer

    @property
    def trained(self) -> int:
        """How many parameters are trained."""
        shape = self.shape
        return shape.adapter_parameters(self.adapter) if self.adapter else shape.parameters

    def collective_s(self, ranks: int) -> float:
        """FSDP2's traffic of one pass: weights gathered for forward and for backward, gradients
        scattered in float32. Within a node by its links, beyond it by the network."""
        if ranks == 1:
            return 0.0
        size = 2 * _ITEM * self.shape.parameters + 4 * self.trained
        waits = 3 * self.shape.layers * self.profile["latency_s"] * log2(ranks)
        return size * (ranks - 1) / ranks / (1e9 * self.bandwidth(ranks)) + waits

    def bandwidth(self, devices: int) -> float:
        """GB/s of each of so many devices: the slower of links and network beyond one node."""
        link, network = self.profile["link_gb_s"], self.profile["network_gb_s"]
        return link if devices <= self.profile["gpus_per_node"] else min(link, network)

    @property
    def published_bytes(self) -> int:
        """What servers get: all weights, or the adapter alone."""
        return _ITEM * (self.trained if self.adapter else self.shape.parameters)

    def publish_s(self, servers: int, devices: int) -> float:
        """New weights to all servers: each passes on what it has got."""
        if servers == 0:
            return 0.0
        size = self.published_bytes
        sending = size / (1e9 * self.bandwidth(devices)) + log2(servers) * self.profile["latency_s"]
        return self.profile["publish_s"] + size * self.profile["publish_byte_s"] + sending

    def handed_over_s(self) -> tuple[float, float]:
        """New weights to actors on the trainer's own GPU, by a file in the host's memory: how long
        the trainer waits for its copy, and how long it then takes until they have it."""
        size = self.published_bytes
        return size * self.profile["copy_byte_s"], size * self.profile["file_byte_s"]

    @property
    def pause_s(self) -> float:
        """How long servers do not sample for it."""
        return self.profile["pause_s"] + self.published_bytes * self.profile["pause_byte_s"]

    @property
    def checkpoint_s(self) -> float:
        """How long the trainer waits for a checkpoint: weights, masters and moments."""
        size = _ITEM * self.shape.parameters + 12 * self.trained
        return self.profile["checkpoint_byte_s"] * size
