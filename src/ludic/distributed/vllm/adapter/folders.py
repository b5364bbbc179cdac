"""The folders in which adapters travel."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ludic.distributed.vllm.shared_memory import OwnedFolder


class AdapterFolders(OwnedFolder):
    """Makes and removes adapters' folders, all of them within its own."""

    def write(self, name: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
        """A new folder that PEFT and vLLM read as an adapter. No pickle."""
        from safetensors.torch import save_file

        folder = self.path / name
        folder.mkdir(mode=0o700)
        try:
            plain = {n: t.detach().cpu().contiguous() for n, t in tensors.items()}
            save_file(plain, folder / "adapter_model.safetensors", metadata={"format": "pt"})
            (folder / "adapter_config.json").write_text(json.dumps(dict(config), indent=1))
        except BaseException:
            self.remove(folder)
            raise
        return folder

    def remove(self, folder: Path) -> None:
        """Removes one; one that is gone is not an error."""
        shutil.rmtree(folder, ignore_errors=True)
