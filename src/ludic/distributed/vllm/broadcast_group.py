"""A process group of a trainer and its samplers, apart from any default group.

Over NCCL it joins GPUs; over gloo it joins CPUs, which is how its use is tested without a second
GPU. Only rank 0 sends.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ludic.errors import ConfigError, DeadlineError


class BroadcastGroup:
    """Ranks that meet at `host:port`; rank 0 listens there. Every wait ends after `timeout_s`."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        rank: int,
        size: int,
        backend: str = "nccl",
        timeout_s: float = 120.0,
        device: torch.device | None = None,
    ) -> None:
        if backend not in ("nccl", "gloo"):
            raise ConfigError(f"BroadcastGroup(backend={backend!r}): must be 'nccl' or 'gloo'")
        limit = timedelta(seconds=timeout_s)
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        try:
            self._store = dist.TCPStore(  # type: ignore[attr-defined]
                host, port, size, is_master=rank == 0, timeout=limit, wait_for_workers=True
            )
        except dist.DistStoreError as exc:
            raise DeadlineError(f"{size} ranks to meet", f"{host}:{port}", timeout_s) from exc
        self._group: Any
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            if device is not None:
                torch.cuda.set_device(device)
            self._group = dist.ProcessGroupNCCL(self._store, rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(self._store, rank, size, limit)

    def broadcast(self, tensor: Tensor) -> None:
        """Rank 0's values into everybody's `tensor`, which must be contiguous."""
        self._group.broadcast(tensor, 0).wait()

    def close(self) -> None:
        """Leaves; peers that still wait get an error, or their own deadline."""
        shutdown = getattr(self._group, "abort", None) or getattr(self._group, "shutdown", None)
        if shutdown is not None:
            with suppress(RuntimeError, NotImplementedError):
                shutdown()
