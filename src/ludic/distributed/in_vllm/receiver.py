"""The receiving side of a publish, inside vLLM's workers. Imported by vLLM alone.

An update is staged, then checked, and applied only by `finish_weight_update`. If anything fails
before that, the old weights are untouched, and the server may sample all the while. The tensors
come over the plane that the update names: a safetensors file in shared memory, a file that this
host fetches by HTTP, CUDA IPC handles, or a broadcast. Differences go into the host's copy of the
weights, and every worker loads its part from there.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ludic.distributed.host_copy import HostCopy
from ludic.distributed.in_vllm.copies import Copies
from ludic.distributed.in_vllm.served_model import (
    checkpoint_shapes,
    same_under_other_names,
    ties_words,
    why_rebuild,
)
from ludic.distributed.vllm.checksums import receipt
from ludic.distributed.vllm.ipc_handles import open_tensors
from ludic.distributed.vllm.planes import BroadcastGroup
from ludic.distributed.vllm.shared_memory import FetchedWeights, open_shared
from ludic.errors import MissingExtraError
from ludic.inference.vllm.flags import PASS_ON
from ludic.inference.vllm.switching import timed

try:
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
except ImportError as exc:
    raise MissingExtraError("vllm", "vllm") from exc

_log = logging.getLogger("vllm.ludic")


@dataclass
class LudicInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """How to join the trainer's broadcast group; all empty for the planes that need none."""

    host: str | None = None
    port: int = 0
    rank_offset: int = 1
    world_size: int = 0
    backend: str = "nccl"
    timeout_s: float = 120.0


@dataclass
class LudicUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which plane, and what it needs.

    With `copy`, the tensors go into the host's copy of this publisher (`key`), which is then called
    `name`; `base` is what they are differences to, or None where all of them come.
    """

    plane: str
    path: str | None = None
    source: dict[str, Any] | None = None
    memory: list[dict[str, Any]] = field(default_factory=list)
    tensors: list[dict[str, Any]] = field(default_factory=list)
    copy: dict[str, Any] | None = None


class LudicWeightTransferEngine(
    WeightTransferEngine[LudicInitInfo, LudicUpdateInfo]  # type: ignore[misc]
):
    """Stages an update, reports what it holds, and applies it as a whole."""

    init_info_cls = LudicInitInfo
    update_info_cls = LudicUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.applied = 0
        self.seconds: dict[str, float] = {}
        """What staging, checksums and applying took here, the last time."""
        self.broken: str | None = None
        """Why no update can be taken any more, where that is so."""
        self._staged: list[tuple[str, Tensor]] = []
        self._copy: HostCopy | None = None
        self.fetched = FetchedWeights(os.environ.get(PASS_ON))
        self._copies = Copies()
        self._judged: Any = None
        self._why_rebuild: str | None = None
        self._group: BroadcastGroup | None = None
        self._expected = self._checkpoint_shapes()

    def init_transfer_engine(self, init_info: LudicInitInfo) -> None:
        """Joins the trainer's broadcast group where one is named."""
        self.shutdown()
        if init_info.host is not None:
            parallel = self.parallel_config
            rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
            self._group = BroadcastGroup(
                init_info.host,
                init_info.port,
                rank=init_info.rank_offset + rank,
                world_size=init_info.world_size,
                backend=init_info.backend,
                timeout_s=init_info.timeout_s,
                device=self.device,
            )

    def start_weight_update(self) -> None:
        """Forgets an update that was never finished. The model is not touched."""
        if self.broken is not None:
            raise RuntimeError(f"this server must be restarted: {self.broken}")
        self._staged = []

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Stages one part of an update."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: LudicUpdateInfo) -> None:
        """Takes the tensors in and checks that they are this model's, without using them."""
        if update_info.plane != "http":
            self.fetched.drop()  # of a trainer that went away
        if update_info.copy is None:
            self._let_go()  # else its receipt would be another's
        with timed("stage", self.seconds):
            self._staged = []
            if update_info.plane == "http":
                path = str(self.fetched.fetch(update_info.source or {}))
                update_info = replace(update_info, plane="shared_memory", path=path)
            arrived = list(self._arriving(update_info))
            if update_info.copy is not None:
                arrived = self._through_copy(dict(arrived), update_info)
            self._check(dict(arrived))
            if self._judged is not self.model:
                self._judged = self.model
                self._why_rebuild = why_rebuild(self.model, self.model_config, self.device)
            self._staged = arrived

    def finish_weight_update(self) -> None:
        """Applies what was staged; without anything staged, nothing happens.

        Where it raises, the model may hold old weights and new ones, but an update of all of them
        puts it right; where it cannot, `broken` says so.
        """
        staged, self._staged = self._staged, []
        if not staged:
            return
        self.fetched.drop()  # until then other workers of this host, and other hosts, find it
        with timed("apply", self.seconds):
            apply = self._write if self._why_rebuild is None else self._rebuild
            try:
                wanted, loaded = apply(staged)
            finally:
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)  # until then it reads the staged ones
            if self._expected is None:
                # No checkpoint to compare with: what the model itself took in has to do.
                missing = sorted(wanted - (wanted if loaded is None else loaded) - self._tied())
                if missing:
                    raise ValueError(f"the update left out parameters {missing[:5]}")
                self._expected = {name: tuple(tensor.shape) for name, tensor in staged}
            staged.clear()
        self.applied += 1
        took = ", ".join(f"{part} {seconds:.3f} s" for part, seconds in self.seconds.items())
        why = self._why_rebuild
        way = "in place" if why is None else f"layer by layer, since {why}"
        _log.info("update %d was written %s: %s", self.applied, way, took)

    def _write(self, staged: list[tuple[str, Tensor]]) -> tuple[set[str], set[str] | None]:
        """New values into the parameters as they stand."""
        if self._copies.repeat(self.model, staged):
            return set(), None
        wanted = {name for name, _ in self.model.named_parameters()}
        load = partial(self.model.load_weights, iter(staged))
        return wanted, self._copies.record(self.model, staged, load)

    def _rebuild(self, staged: list[tuple[str, Tensor]]) -> tuple[set[str], set[str] | None]:
        """vLLM's own reload, which makes every layer anew from what a checkpoint would hold."""
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        self.broken = "a reload of its layers failed half-way"
        initialize_layerwise_reload(self.model)
        wanted = {name for name, _ in self.model.named_parameters()}
        try:
            loaded = self.model.load_weights(iter(staged))
        finally:
            # After a failure too: what a layer has got would count towards the next update.
            finalize_layerwise_reload(self.model, self.model_config)
            self.broken = None
        self._repack_tied_head()
        return wanted, loaded

    def receipt(self) -> dict[str, list[Any]]:
        """Checksum, type and shape of every staged tensor, computed on this device; those of the
        host's copy were computed once for all who load from it."""
        if not self._staged:
            return {}
        with timed("checksums", self.seconds):
            return receipt(self._staged) if self._copy is None else self._copy.receipt()

    @property
    def holds(self) -> str | None:
        """What this host's copy is, where this worker has loaded from it."""
        return None if self._copy is None else self._copy.holds

    def shutdown(self) -> None:
        """Leaves the broadcast group."""
        if self._group is not None:
            self._group.close()
            self._group = None

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Not used: the trainer's side is `BroadcastPolicyPublisher`. Abstract in vLLM 0.26."""
        raise NotImplementedError("publish with ludic.distributed.BroadcastPolicyPublisher")

    def _arriving(self, info: LudicUpdateInfo) -> Iterator[tuple[str, Tensor]]:
        if info.plane == "shared_memory":
            if info.path is None:
                raise ValueError("a shared-memory update needs a path")
            yield from open_shared(Path(info.path))
        elif info.plane == "ipc":
            update = {"memory": info.memory, "tensors": info.tensors}
            yield from open_tensors(update, self.device)
        elif info.plane == "broadcast":
            if self._group is None:
                raise RuntimeError("the broadcast group is not open: initialise the engine first")
            yield from self._group.receive(info.tensors, self.device)
        else:
            raise ValueError(
                f"unknown plane {info.plane!r}: is this Ludic older than the trainer's?"
            )

    def _through_copy(
        self, arrived: dict[str, Tensor], info: LudicUpdateInfo
    ) -> list[tuple[str, Tensor]]:
        """The tensors of the host's copy, after what arrived went into it."""
        wanted = dict(info.copy or {})
        key, name, base = str(wanted["key"]), str(wanted["name"]), wanted.get("base")
        if self._copy is None or self._copy.key != key:
            self._let_go()
            self._copy = HostCopy(key)
        file = Path(info.path) if info.path is not None and base is None else None
        return list(self._copy.bring(name, arrived, base=base, file=file).items())

    def _let_go(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.close()

    def _check(self, arrived: dict[str, Tensor]) -> None:
        """Raises unless these are all of the model's tensors, with its shapes."""
        if self._expected is None:
            return
        tied = self._tied()
        missing = sorted(self._expected.keys() - arrived.keys() - tied)
        unknown = sorted(arrived.keys() - self._expected.keys() - tied)
        if missing or unknown:
            expected = {n: s for n, s in self._expected.items() if n not in tied}
            shapes = {n: tuple(t.shape) for n, t in arrived.items() if n not in tied}
            if same_under_other_names(shapes, expected):
                return
            raise ValueError(
                f"the update does not fit the served model {self.model_config.model}: "
                f"{len(missing)} tensors left out {missing[:3]}, {len(unknown)} unknown "
                f"{unknown[:3]}"
            )
        for name, tensor in arrived.items():
            shape = self._expected.get(name)
            if shape is not None and shape != tuple(tensor.shape):
                raise ValueError(
                    f"{name} arrived with shape {tuple(tensor.shape)}; the served model has {shape}"
                )

    def _checkpoint_shapes(self) -> dict[str, tuple[int, ...]] | None:
        config, whole = self.model_config, getattr(self, "vllm_config", None)
        loading = getattr(whole, "load_config", None)
        shapes = checkpoint_shapes(
            config.model,
            revision=getattr(config, "revision", None),
            cache=getattr(loading, "download_dir", None),
        )
        if shapes is None:
            _log.warning(
                "no safetensors of %s were found on this machine, so the first update's names and "
                "shapes are checked only while it is applied; start the server from a folder to "
                "have them checked before",
                config.model,
            )
        return shapes

    def _repack_tied_head(self) -> None:
        """On the CPU the head multiplies with a packed copy of its weight. Where the weight is the
        embedding's, vLLM sees nothing loaded for the head and keeps the old copy."""
        head = getattr(self.model, "lm_head", None)
        method = getattr(head, "quant_method", None)
        if self.device.type == "cpu" and self._tied() and method is not None:
            method.process_weights_after_loading(head)

    def _tied(self) -> set[str]:
        return {"lm_head.weight"} if ties_words(self.model_config) else set()
