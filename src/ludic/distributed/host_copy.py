"""A copy in shared memory of the weights that were last staged on this host. All of its followers
of one publisher (a server's workers, and other servers) share it.

A difference is applied to this copy, and every worker loads from it. The first to learn of an
update writes it into the copy, under a lock; the others find it there. `holds` names the version,
and is empty while the copy is being written: after a process is killed half-way the copy has no
name, nothing is applied to it, and the next update is a whole one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from ludic.distributed.differences import apply_all
from ludic.distributed.shared_folders import SharedFolder
from ludic.distributed.vllm.checksums import receipt
from ludic.distributed.weights_file import bytes_of, fill_file, layout_of, make_file, map_file
from ludic.errors import PublishError


class HostCopy:
    """This process's hold on the copy of the publisher `key`. The copy is removed when the last
    process that holds it ends or closes it."""

    def __init__(self, key: str) -> None:
        if not re.fullmatch("[0-9a-f]{16,64}", key):
            raise ValueError(f"{key!r} is not the key of a publisher")
        self.key = key
        self._folder = SharedFolder(f"copy-{key}")
        self._weights = self._folder.path / "weights.safetensors"
        self._state = self._folder.path / "state.json"

    @property
    def holds(self) -> str | None:
        """The name of what was staged last; None: nothing, or only a part of it."""
        name = self._read().get("holds")
        return None if name is None else str(name)

    def receipt(self) -> dict[str, list[Any]]:
        """Checksum, type and shape of the copy's tensors, computed when it was made."""
        return dict(self._read().get("receipt", {}))

    def bring(
        self,
        name: str,
        arrived: Mapping[str, Tensor],
        *,
        base: str | None = None,
        file: Path | None = None,
        timeout_s: float = 120.0,
    ) -> dict[str, Tensor]:
        """Makes the copy `name`, unless another process has done so, and returns its tensors.

        Args:
            name: what the copy is called from now on.
            arrived: all tensors, or their differences to `base`.
            base: what the differences were made against. Where the copy is something else, this
                raises `PublishError` and changes nothing.
            file: where all tensors are in a file in shared memory already, which is then kept
                instead of a copy of it.
            timeout_s: how long another process may take.
        """
        with self._folder.alone(timeout_s):
            if self.holds == name:
                return map_file(self._weights)
            if base is not None and self.holds != base:
                raise PublishError(
                    f"the copy of the weights on {os.uname().nodename} is {self.holds}, and the "
                    f"difference that arrived was made against {base}"
                )
            self._write({})
            if base is None:
                self._replace(arrived, file)
            tensors = map_file(self._weights)
            if base is not None:
                apply_all(arrived, tensors)
            self._write({"holds": name, "receipt": receipt(tensors.items())})
            return tensors

    def close(self) -> None:
        """Lets go of the copy."""
        self._folder.close()

    def _replace(self, arrived: Mapping[str, Tensor], file: Path | None) -> None:
        """A new file: who has mapped the old one may go on reading it."""
        draft = self._weights.with_suffix(".new")
        draft.unlink(missing_ok=True)
        if file is not None:
            with suppress(OSError):  # in another file system
                os.link(file, draft)
        if not draft.exists():
            layout = layout_of(arrived)
            free = shutil.disk_usage(self._folder.path).free
            if bytes_of(layout) > free:
                raise PublishError(
                    f"a copy of the weights needs {bytes_of(layout) / 2**20:,.1f} MiB in "
                    f"{self._folder.path.parent} on {os.uname().nodename}, and "
                    f"{free / 2**20:,.1f} MiB are free there: give it more (Docker: --shm-size, "
                    "or --ipc=host), or publish without differences"
                )
            make_file(draft, layout)
            fill_file(draft, ((name, tensor, 0) for name, tensor in arrived.items()))
        draft.rename(self._weights)

    def _read(self) -> dict[str, Any]:
        try:
            return dict(json.loads(self._state.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return {}

    def _write(self, state: Mapping[str, Any]) -> None:
        draft = self._state.with_suffix(".new")
        draft.write_text(json.dumps(state), encoding="utf-8")
        draft.rename(self._state)
