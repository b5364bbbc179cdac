"""In which numbers a model is kept and computed: one word, the same for trainer and engine.

bfloat16  weights and activations in bfloat16; the optimizer keeps float32 masters
mixed     weights in float32, products in bfloat16 (autocast); the in-process engine samples
          from a bfloat16 copy of the weights
tf32      weights in float32, products in TensorFloat-32 on a GPU that has it
float32   float32 throughout
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from ludic.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn

Precision: TypeAlias = Literal["bfloat16", "mixed", "tf32", "float32"]

DEFAULT_ON_A_GPU: Precision = "bfloat16"
DEFAULT_ON_A_CPU: Precision = "float32"


def default_precision(device_type: str) -> Precision:
    """Returns what a run computes in if it does not say."""
    return DEFAULT_ON_A_CPU if device_type == "cpu" else DEFAULT_ON_A_GPU


def weights_dtype(precision: Precision) -> torch.dtype:
    """Returns the type of the module's own weights."""
    import torch

    return torch.bfloat16 if precision == "bfloat16" else torch.float32


def sampling_dtype(precision: Precision) -> torch.dtype:
    """Returns the type of the weights that are sampled from."""
    import torch

    return torch.bfloat16 if precision in ("bfloat16", "mixed") else torch.float32


def check_precision(precision: Precision | None, model: nn.Module, where: str) -> None:
    """Raises `ConfigError` for a word that is none, and for a model whose weights are of another
    type than the word says. None says nothing."""
    if precision is None:
        return
    if precision not in get_args(Precision):
        raise ConfigError(f"{where}.precision={precision!r}: must be one of {get_args(Precision)}")
    wanted, found = weights_dtype(precision), next(model.parameters()).dtype
    if found != wanted:
        raise ConfigError(
            f"{where}.precision={precision!r} is for weights in {wanted}, and the model's are in "
            f"{found}: load it with dtype={wanted}"
        )


def autocast(precision: Precision | None, device: torch.device) -> AbstractContextManager[Any]:
    """Returns the context of a forward pass: autocast to bfloat16 for `mixed`, else nothing."""
    import torch

    return torch.autocast(device.type, torch.bfloat16) if precision == "mixed" else nullcontext()


class _TF32:
    """Who holds torch's switch for TF32 products, which is one for the whole process.

    The trainer's compute thread holds it for each of its passes and an engine's thread for each of
    its steps, at the same time. So the holders are counted, under a lock: the first one sets the
    switch, the last one puts it back, and nobody changes it in between, since a holder with
    another wish is refused. torch reads it when a product is launched, or captured in a graph.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._before = False

    @contextmanager
    def held(self, allowed: bool) -> Iterator[None]:
        import torch

        # The older of torch's two names for it: it sets both, while setting the newer one alone
        # makes torch's own readers of the older one raise.
        switch = torch.backends.cuda.matmul
        with self._lock:
            now = switch.fp32_precision == "tf32"
            if self._holders and now != allowed:
                other, this = ("tf32", "float32") if now else ("float32", "tf32")
                raise ConfigError(
                    f"precision={this!r} cannot be used while precision={other!r} is: whether "
                    "products are in TF32 is one switch for the whole process"
                )
            if not self._holders:
                self._before = now
                if now != allowed:
                    switch.allow_tf32 = allowed
            self._holders += 1
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                if not self._holders and self._before != (switch.fp32_precision == "tf32"):
                    switch.allow_tf32 = self._before


_tf32 = _TF32()


def float32_products(precision: Precision | None) -> AbstractContextManager[Any]:
    """Returns the context in which float32 products are computed as `precision` says, and as
    before after it. Threads may hold it together; see `_TF32`."""
    return _tf32.held(precision == "tf32") if precision in ("tf32", "float32") else nullcontext()
