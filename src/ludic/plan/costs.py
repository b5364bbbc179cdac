"""Seconds of a decode step, a pass over samples, a publish: from a model's sizes and a profile."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from ludic.memory.shape import Adapter, ModelShape
from ludic.plan.profile import Profile

CROWD = 128
"""Rows from which on a decode step's products take longer: they fill the tiles of its kernels."""
REPLAYED = 1e11
"""Parameters times tokens, for each layer, up to which the trainer replays a pass as a graph."""
_ITEM = 2
_STREAMED = 12
"""Bytes of a parameter that an optimizer on the host sends to the device, and gets back at the same
time: its master and two moments."""
_STEPPED = 30
"""Bytes of a parameter that an optimizer on the device reads and writes."""
_ADDED = 10
"""Bytes of a parameter that adding up gradients reads and writes in every pass."""


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
            "pass_adapter_s": tokens * shape.layers * shape.hidden * more if self.adapter else 0.0,
        }

    def pass_s(self, tokens: float, *, passes: int, context: float, again: bool = False) -> float:
        """Forward and backward over `tokens` in this many passes. A small pass takes as long as the
        starts of its kernels: from a graph, or one by one from the host."""
        features = self.pass_features(tokens, context=context, again=again)
        working = sum(self.profile[name] * size for name, size in features.items())
        return max(working, passes * self.started_s(tokens / max(passes, 1)))

    def started_s(self, tokens: float) -> float:
        """The starts of the kernels of one pass, however little they have to do."""
        profile, shape = self.profile, self.shape
        if tokens * shape.parameters <= REPLAYED * shape.layers:
            return shape.layers * profile["pass_layer_s"]
        more = profile["pass_launch_adapter_s"] if self.adapter else 0.0
        return shape.layers * (profile["pass_launch_s"] + more)

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
        together: float = 0.0,
        on_host: bool = False,
    ) -> float:
        """An update over `tokens`: passes of at most `budget` tokens, weights gathered and
        gradients scattered beside them, the optimizer. It has so many `steps`, for each of which
        all ranks wait for the one with the `longest` sequence. `together` and `on_host`: see
        `passes_of` and `optimizer_s`."""
        each = max(tokens / ranks, steps * longest if ranks > 1 else longest)
        passes = max(steps, passes_of(each, budget, 0.0 if ranks > 1 else together))
        computing = self.pass_s(each, passes=passes, context=context, again=again)
        computing += passes * _ADDED * self.trained / ranks / self._memory_s
        moving = passes * self.collective_s(ranks)
        return max(computing, moving) + steps * self.optimizer_s(ranks, on_host=on_host)

    def optimizer_s(self, ranks: int = 1, *, on_host: bool = False) -> float:
        """One step of the optimizer. `on_host`: masters and moments are in the host's memory, and
        go through the device and back, both ways at the same time."""
        each = self.trained / ranks
        stepping = _STEPPED * each / self._memory_s
        if not on_host:
            return stepping
        return max(stepping, _STREAMED * each / (1e9 * self.profile["host_gb_s"]))

    @property
    def _memory_s(self) -> float:
        """Bytes of the device's memory in a second."""
        return 1e12 * max(self.profile["hbm_tb_s"], 1e-6)

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
        """GB/s of each of these devices: beyond one node, the slower of links and network."""
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


def passes_of(tokens: float, budget: int, together: float = 0.0) -> int:
    """How many passes of at most `budget` tokens an update takes on one rank. Groups of `together`
    tokens share a prompt, and are not divided where one fits: the rest of a pass stays empty."""
    if not 0 < together <= budget:
        return max(1, ceil(tokens / budget))
    groups = max(1, ceil(tokens / together - 1e-9))
    return ceil(groups / int(budget // together))
