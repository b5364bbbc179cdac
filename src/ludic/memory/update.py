"""What training takes: the state of the optimizer, and the largest micro-batch.

The formulas follow what autograd keeps of a decoder layer, in transformers or fused, each line with
the tensors that it counts; tests compare them with the tensors that are alive on a CPU, and
`python -m benchmarks.memory` with the peaks of a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ludic.memory.shape import Adapter, ModelShape
from ludic.plumbing.llama_layers import FAMILIES
from ludic.plumbing.precision import Precision

CHUNK_LOGITS = {"cuda": 2**29, "cpu": 2**24}
"""How many logits the head makes at once at most: 2 GiB in float32 on a GPU, 64 MiB on a CPU."""
_TILE, _MULTIPROCESSORS = (128, 256), 132
"""What one multiprocessor of a GPU computes of a product at once, and how many a Hopper has."""
STREAM_BYTES = 1 << 30
"""What a step with the optimizer's state on the host takes of the device for pieces of it."""
_ROOM_PER_CHUNK = {"cuda": 4, "cpu": 12}
"""Bytes for each of these logits, beside the gradient: on a GPU a kernel reads them once; torch
alone also keeps their log-softmax and its exponential."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How a model is trained; `tokens` are those of the largest micro-batch, all of them actions.

    `optimizer_device` is where masters and moments are. `whole_logits`: the loss asks for them.
    `keep_logits`: of so many tokens they stay for the backward pass.
    """

    tokens: int
    precision: Precision
    device: Literal["cuda", "cpu"] = "cuda"
    adapter: Adapter | None = None
    checkpointing: bool = False
    optimizer_device: Literal["cuda", "cpu"] = "cuda"
    fused_layers: bool = True
    whole_logits: bool = False
    keep_logits: int = 0
    ranks: int = 1

    @property
    def weight_item(self) -> int:
        """Bytes of a weight."""
        return 2 if self.precision == "bfloat16" else 4

    @property
    def item(self) -> int:
        """Bytes of what products take and give."""
        return 2 if self.precision in ("bfloat16", "mixed") else 4

    def fuses(self, shape: ModelShape) -> bool:
        """Whether layers run as `ludic.training.update.fused_layers` has them."""
        suits = self.device == "cuda" and self.precision == "bfloat16"
        rotates = shape.head_dim & (shape.head_dim - 1) == 0
        return self.fused_layers and suits and rotates and shape.family in FAMILIES

    def sums_products(self, shape: ModelShape) -> bool:
        """Whether gradients of the layers' matrices go to their sums without being made before."""
        return self.fuses(shape) and self.ranks == 1

    def trained(self, shape: ModelShape) -> int:
        """How many parameters are trained."""
        if shape.trained is not None:
            return shape.trained
        return shape.parameters if self.adapter is None else shape.adapter_parameters(self.adapter)

    def wants_input_of(self, *linears: str) -> bool:
        """Whether one of these has a weight that is trained, whose gradient needs its input."""
        return self.adapter is None or any(map(self.adapter.covers, linears))


def chunk_tokens(vocab: int, hidden: int, device: str) -> int:
    """How many tokens' logits are made at once: up to a limit, and on a GPU so many that the
    gradient for their hidden states, the smallest of the head's products, occupies all of it."""
    (rows, columns), on_gpu = _TILE, device == "cuda"
    blocks = CHUNK_LOGITS["cuda" if on_gpu else "cpu"] // vocab // rows
    tiles = -(-hidden // columns)
    if on_gpu and (waves := blocks * tiles // _MULTIPROCESSORS):
        blocks = waves * _MULTIPROCESSORS // tiles
    return max(blocks * rows, 32)


def state_bytes(shape: ModelShape, how: Training) -> dict[str, int]:
    """What stays from one update to the next, of one rank: the weights, and for each trained one
    its gradient and what the optimizer keeps of it."""
    trained, wide = how.trained(shape), how.weight_item == 4
    state = {
        "weights": shape.parameters * how.weight_item,
        "adapter": trained * how.weight_item if how.adapter else 0,
        # In float32, so that those of micro-batches add up: on the device in any case.
        "gradients": 4 * trained,
        # Two moments in float32; and a float32 master of each weight that is not one.
        "masters and moments": 0 if _offloads(how) else (8 if wide else 12) * trained,
    }
    return {name: -(-size // how.ranks) for name, size in state.items()}


def host_bytes(shape: ModelShape, how: Training) -> int:
    """What the optimizer keeps in the host's memory: masters and moments."""
    return 12 * how.trained(shape) // how.ranks if _offloads(how) else 0


def pass_bytes(shape: ModelShape, how: Training) -> dict[str, int]:
    """What the passes over one micro-batch take at their peak, beside the state."""
    tokens, kinds = how.tokens, _kept_by_layer(shape, how)
    backward = _backward_bytes(shape, how)
    if how.checkpointing:
        stream = tokens * shape.layers * shape.hidden * how.weight_item
        kept = {"activations: inputs of layers": stream}
        backward += tokens * sum(kinds.values())  # a layer is computed again before its turn
    else:
        kept = {
            f"activations: {kind}": shape.layers * tokens * size for kind, size in kinds.items()
        }
    kept["activations: outside the layers"] = tokens * _kept_outside(shape, how)
    if how.precision == "mixed":  # autocast keeps a rounded copy of every matrix for the pass
        layers = 1 if how.checkpointing else shape.layers
        kept["rounded weights"] = 2 * layers * shape.layer_matrices
    if how.ranks > 1:  # gathered: what is outside the layers, this layer and the next
        width = how.weight_item * (2 if how.adapter is None else 1)  # with their gradients
        kept["gathered weights"] = width * (shape.outside_layers + 2 * shape.layer_matrices)
    kept["head's chunk, or a layer's backward pass"] = max(
        _head_bytes(shape, how), backward, _end_bytes(shape, how, kept)
    )
    return kept


def _offloads(how: Training) -> bool:
    return how.optimizer_device == "cpu" and how.device == "cuda"


def _kept_by_layer(shape: ModelShape, how: Training) -> dict[str, int]:
    """What a layer keeps of a token for its backward pass, in bytes."""
    hidden, queries, keys, inner = shape.hidden, shape.queries, shape.keys, shape.inner
    full, item, mixed = how.adapter is None, how.item, how.precision == "mixed"
    fused = how.fuses(shape)
    # A norm: its input in float32 and, for its own weight, that input normalised.
    norm = 4 + (how.weight_item if full else 0)
    # Fused: its input alone, and a number for the row.
    norms = 2 * (item * hidden + 4) if fused else 2 * norm * hidden
    attention = item * (queries + 2 * keys)  # what the kernel was given
    attention += item * queries + 4 * shape.heads  # what it gave (o_proj's input), and log-sums
    if shape.qk_norm:
        attention += norm * (queries + keys)
    mlp = 2 * item * inner  # gate and up
    if not fused:  # gate after its SiLU, and the product with up
        mlp += item * inner * (2 if how.wants_input_of("down_proj") else 1)
    # The input of the projections: one tensor for all, unless autocast rounds it for each.
    for kind in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        inputs = sum(map(how.wants_input_of, kind)) if mixed else how.wants_input_of(*kind)
        size = item * hidden * int(inputs)
        attention, mlp = (attention + size, mlp) if "q_proj" in kind else (attention, mlp + size)
    kept = {"norms": norms, "attention": attention, "MLP": mlp}
    if how.adapter is not None:  # between its two matrices
        covered = sum(map(how.adapter.covers, shape.linears))
        kept["adapter"] = item * how.adapter.rank * covered
    return kept


def _kept_outside(shape: ModelShape, how: Training) -> int:
    """Of a token: embedded, after the last norm, and picked for the head; rotary sines and
    cosines; the ids."""
    norm = (4 + (how.weight_item if how.adapter is None else 0)) * shape.hidden
    picked = how.item * shape.hidden
    logits = 12 * shape.vocab if how.whole_logits else 0  # scaled, softmax, gradient
    return norm + 2 * picked + 2 * how.item * shape.head_dim + 16 + logits


def _head_bytes(shape: ModelShape, how: Training) -> int:
    """The backward pass of one chunk of logits: they and those that are kept, their gradient and
    that of their input; and, where it is trained, the head's own gradient in float32, to which a
    GPU adds a chunk's, while a CPU has both."""
    chunk = chunk_tokens(shape.vocab, shape.hidden, how.device)
    rows = min(how.tokens, chunk)
    size = rows * shape.vocab * _ROOM_PER_CHUNK[how.device]
    size += 4 * shape.vocab * (min(how.tokens, how.keep_logits + chunk) - rows)
    if how.item == 2:
        size += rows * shape.vocab * 2
    matrix = shape.vocab * shape.hidden
    if how.precision == "mixed":
        size += 2 * matrix
    if how.adapter is None:
        size += 4 * matrix * (2 if how.tokens > chunk and how.device == "cpu" else 1)
    return size + how.tokens * how.item * shape.hidden


def _backward_bytes(shape: ModelShape, how: Training) -> int:
    """In the MLP of a layer: the gradients of gate and up, of the stream twice, and of a matrix
    that is not added up at once; fused, the product of gate and up once more."""
    wide = 3 if how.fuses(shape) else 2
    per_token = wide * how.item * shape.inner + 2 * how.weight_item * shape.hidden
    made = how.adapter is None and not how.sums_products(shape)
    matrix = shape.hidden * shape.inner if made else 0
    return how.tokens * per_token + how.weight_item * matrix


def _end_bytes(shape: ModelShape, how: Training, kept: dict[str, int]) -> int:
    """Where all activations are gone again, the gradients that have not been added up yet, or what
    the step takes: on a CPU two more numbers for each of the largest matrix, on a GPU pieces of a
    state that is on the host."""
    matrix = shape.vocab * shape.hidden if how.adapter is None else 0
    made = how.trained(shape) // how.ranks
    if how.sums_products(shape):
        made = shape.outside_layers if how.adapter is None else 0
    narrow = how.weight_item * (made if how.weight_item == 2 else 0)
    step = 8 * matrix if how.device == "cpu" else min(STREAM_BYTES, host_bytes(shape, how))
    return max(narrow + how.weight_item * matrix, step) - sum(kept.values())
