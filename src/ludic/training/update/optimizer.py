"""AdamW whose state is float32, whatever type the module computes in."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ludic.errors import CheckpointError, ConfigError, OutOfMemoryError
from ludic.seeding import derive_seed
from ludic.sharding.weights import dithered, is_rounded, own_rows, whole
from ludic.sharding.world import is_out_of_memory, release_memory
from ludic.training.config import TrainerConfig
from ludic.training.update.logprobs import add_matmul

_log = logging.getLogger("ludic.training")
GradientsHeld: TypeAlias = dict[str, tuple[Tensor, int]]
"""Gradients by parameter, each with the version of its values."""

AddProduct: TypeAlias = Callable[[Tensor, Tensor, float], bool]
"""Adds the product of two matrices, times a number, to a parameter's gradient in float32. False:
nothing was added, and autograd has to."""
ProductSums: TypeAlias = Callable[[Tensor], AddProduct | None]
"""What adds to the gradient of a parameter; None where autograd has to."""

MOMENTS = ("exp_avg", "exp_avg_sq")


def is_narrow(parameter: Tensor) -> bool:
    """Whether the parameter has a master of its own."""
    return torch.finfo(parameter.dtype).bits < 32


class MasterAdamW:
    """AdamW over float32 masters of the trained parameters.

    A bfloat16 step is smaller than a bfloat16 weight can show, so the sum of many would be lost:
    the masters keep it, gradients of micro-batches are added up in float32, and after a step the
    module gets the rounded masters. A master begins at a random place among the numbers that round
    to its weight; see `dithered`. Parameters that are float32 already are their own masters. In
    mixed precision, where products see them rounded, those of a bfloat16 checkpoint are moved to
    such a place as well. Matrices decay; vectors (norms, biases) do not.
    """

    remedy = 'set optimizer_device="cpu", train an adapter, or give the engine fewer slots'

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], cfg: TrainerConfig) -> None:
        self.parameters = {name: p for name, p in parameters if p.requires_grad}
        if not self.parameters:
            raise ConfigError("the model has no parameter that requires a gradient")
        self._seed, self._told = cfg.seed, False
        self._written: list[int] = []  # the weights' versions, as the last step left them
        self._narrow = {id(p): name for name, p in self.parameters.items() if is_narrow(p)}
        self._sums: dict[str, Tensor] = {}  # gradients of the narrow ones, in float32
        self._make_room()
        self.masters = {name: self._master(name, cfg) for name in self.parameters}
        self._begin(cfg)

    def _make_room(self) -> None:
        """Called before any master is made."""

    def _begin(self, cfg: TrainerConfig) -> None:
        matrices = [m for m in self.masters.values() if m.ndim >= 2]
        vectors = [m for m in self.masters.values() if m.ndim < 2]
        self._fused = next(iter(self.masters.values())).device.type == "cuda"
        self._adam = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": cfg.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=cfg.learning_rate,
            betas=cfg.betas,
            eps=cfg.eps,
            fused=self._fused or None,
        )

    @torch.no_grad()
    def _master(self, name: str, cfg: TrainerConfig) -> Tensor:
        parameter, key = self.parameters[name], self._key(name)
        if is_narrow(parameter):
            return dithered(parameter, key)
        if cfg.precision == "mixed" and parameter.ndim >= 2 and is_rounded(parameter):
            parameter.copy_(dithered(parameter.bfloat16(), key))
        return parameter

    def _state(self, name: str) -> dict[str, Tensor]:
        """Moments and number of steps; empty before the first."""
        return self._adam.state[self.masters[name]]  # type: ignore[no-any-return]

    def _moment(self, name: str, kind: str) -> Tensor:
        """Where a moment of this parameter goes."""
        return torch.zeros_like(self.masters[name])

    def _counter_device(self, name: str) -> torch.device:
        """A fused step counts on the device, the others on the CPU."""
        return self.masters[name].device if self._fused else torch.device("cpu")

    def _key(self, name: str) -> int:
        return derive_seed(self._seed, "masters", name)

    @torch.no_grad()
    def take_weights(self) -> None:
        """Takes the module's weights as they are now, where somebody else has trained it
        meanwhile. Masters of weights that have not changed stay where they are. Each rank looks at
        its own rows: others may have no reason to ask."""
        for name, parameter in self.parameters.items():
            master, rows = self.masters[name], own_rows(parameter)
            own = own_rows(master).to(rows.dtype)
            if master is not parameter and not torch.equal(own, rows):
                master.copy_(dithered(parameter, self._key(name)))

    def follow_weights(self) -> None:
        """`take_weights`, where anybody has written to a weight since the last step: a step would
        undo that. After the first step torch does not count, so that it is not seen, what is
        written through `.data` or, by anybody but a trainer, to a sharded weight."""
        if self._versions() != self._written:
            self.take_weights()
            self._written = self._versions()

    def _versions(self) -> list[int]:
        return [own_rows(parameter)._version for parameter in self.parameters.values()]

    def product_sums(self) -> ProductSums:
        """For one pass: lets products add to gradients in float32, where autograd would round each
        and add it later. Parameters that somebody watches are left to autograd, and so are those
        that the pass uses twice: each must get its gradient all at once (`take_back`). What is
        computed without gradients does not count."""
        uses: Counter[str] = Counter()

        def of(parameter: Tensor) -> AddProduct | None:
            name = self._narrow.get(id(parameter))
            watched = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
            if name is None or watched or not torch.is_grad_enabled():
                return None
            uses[name] += 1
            return lambda a, b, scale: uses[name] == 1 and self._add_product(name, a, b, scale)

        return of

    @torch.no_grad()
    def _add_product(self, name: str, a: Tensor, b: Tensor, scale: float) -> bool:
        self._sums[name] = add_matmul(self._sums.get(name), a, b, torch.float32, scale)
        return True

    def accumulate(self) -> None:
        """Adds what autograd has made of the gradients in the last backward pass, in float32."""
        self._with_what_is_free(self._move_gradients)

    @torch.no_grad()
    def _move_gradients(self) -> None:
        """One by one, so that what has been moved stays where this is called again."""
        narrow = [(name, self.parameters[name]) for name in self._narrow.values()]
        more = [(n, p) for n, p in narrow if p.grad is not None and n in self._sums]
        if more:
            sums = [self._sums[name] for name, _ in more]
            torch._foreach_add_(sums, [p.grad for _, p in more if p.grad is not None])
        for _, parameter in more:
            parameter.grad = None
        for name, parameter in narrow:
            if parameter.grad is not None:
                self._sums[name] = parameter.grad.float()
                parameter.grad = None

    def gradients_held(self) -> GradientsHeld:
        """The gradients that there are before a pass, with the versions of their values."""
        return {name: (g, g._version) for name, g in self._gradients().items()}

    def take_back(self, before: GradientsHeld) -> list[nn.Parameter]:
        """Drops what a backward pass that failed has left, and returns the parameters where that
        cannot be told from what they had: they have all of its gradient, the others none of it."""
        for name, parameter in self.parameters.items():
            if name not in before or id(parameter) in self._narrow:
                parameter.grad = None
            if name not in before:
                self._sums.pop(name, None)
        return [
            self.parameters[name]
            for name, (gradient, version) in before.items()
            if gradient._version != version
        ]

    def _gradients(self) -> dict[str, Tensor]:
        grads = {
            n: self._sums.get(n) if id(p) in self._narrow else p.grad
            for n, p in self.parameters.items()
        }
        return {name: gradient for name, gradient in grads.items() if gradient is not None}

    def gradients(self) -> list[Tensor]:
        return list(self._gradients().values())

    @torch.no_grad()
    def gradient_norm(self) -> Float[Tensor, ""]:
        """The norm over all trained parameters and, where they are sharded, all ranks."""
        return whole(torch.nn.utils.get_total_norm(self.gradients()))

    @torch.no_grad()
    def step(self, learning_rate: float, scale: float = 1.0) -> None:
        """One step with the gradients times `scale` (below 1 where their norm was clipped)."""
        for name, gradient in self._gradients().items():
            self.masters[name].grad = gradient
        self._with_what_is_free(self._make_moments)
        if scale != 1.0:
            torch._foreach_mul_(self.gradients(), scale)
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        self._adam.step()
        if self._narrow:
            # Of each rank's own rows: sharded tensors cannot be copied at once.
            rows, masters = (
                [own_rows(tensors[name]) for name in self._narrow.values()]
                for tensors in (self.parameters, self.masters)
            )
            torch._foreach_copy_(rows, masters)
        self._written = self._versions()
        self.zero_grad()

    def _make_moments(self) -> None:
        """Makes room for the moments of a first step, before any weight moves: the step itself
        takes no more memory."""
        for name, master in self.masters.items():
            state = self._state(name)
            if master.grad is not None and not state:
                moments = {kind: self._moment(name, kind) for kind in MOMENTS}
                state |= {"step": torch.zeros((), device=self._counter_device(name)), **moments}

    def _with_what_is_free(self, work: Callable[[], None]) -> None:
        """Does `work`, again with all memory that nobody uses where it did not fit. It must go on
        where it stopped."""
        for again in (False, True):
            try:
                work()
                return
            except Exception as exc:
                if not is_out_of_memory(exc):
                    raise
                if again:
                    raise OutOfMemoryError(
                        "out of memory in the optimizer, whose masters, moments and gradients take "
                        f"up to 16 bytes for each trained parameter: {self.remedy}"
                    ) from exc
            release_memory()
            if not self._told:
                self._told = True
                _log.warning("out of memory in the optimizer: tried again with what is free")

    def close(self) -> None:
        """Lets go of the parameters: another optimizer may train them."""

    def zero_grad(self) -> None:
        """Forgets all gradients."""
        self._sums.clear()
        for tensor in (*self.parameters.values(), *self.masters.values()):
            tensor.grad = None

    def start_over(self) -> None:
        """Forgets gradients and moments: a step that ran out of memory leaves half of them."""
        self.zero_grad()
        self._adam.state.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """Masters and moments by `parameter/what`. Empty moments mean that no step was taken."""
        state: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                state[f"{name}/master"] = master
            for key in (*MOMENTS, "step"):
                if key in self._state(name):
                    state[f"{name}/{key}"] = self._state(name)[key]
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes back what `state_dict` gave; tensors must be laid out as the parameters are."""
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                if f"{name}/master" not in state:
                    raise CheckpointError(
                        f"the optimizer's state has no master weights for {name!r}"
                    )
                master.copy_(state[f"{name}/master"])
            if f"{name}/step" not in state:
                continue
            own = self._state(name)
            own["step"] = state[f"{name}/step"].to(self._counter_device(name), copy=True)
            for key in MOMENTS:
                own[key] = self._moment(name, key).copy_(state[f"{name}/{key}"])


def clipped(norm: float, limit: float | None) -> float:
    """What gradients of this norm are multiplied by so that it is at most `limit`."""
    return 1.0 if limit is None or norm <= limit else limit / norm
