"""What this machine has: Python, torch, devices, extras, and how to get what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

EXTRAS = {
    "vllm": ("vllm", "sampling by a vLLM server"),
    "redis": ("redis", "actors and trainer in separate processes"),
    "wandb": ("wandb", "metrics on Weights & Biases"),
    "tensorboard": ("tensorboard", "metrics for TensorBoard"),
    "datasets": ("datasets", "environments from datasets of the hub"),
    "peft": ("peft", "training adapters instead of all weights"),
    "plot": ("matplotlib", "plots as PNG"),
}
"""Each extra's package, and what it is for."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `needed` and not `ok` is a fault; else it is only said."""

    name: str
    found: str
    ok: bool = True
    needed: bool = False
    advice: str = ""


def examine() -> list[Finding]:
    """Everything that a run may depend on, the necessary first."""
    return [_python(), *_required(), *_devices(), *_extras()]


def _python() -> Finding:
    ok = sys.version_info >= (3, 11)
    return Finding(
        "Python",
        f"{platform.python_version()}, {os.cpu_count()} CPU cores",
        ok,
        needed=True,
        advice="" if ok else "install Python 3.11 or newer",
    )


def _required() -> Iterator[Finding]:
    """The packages that Ludic itself asks for, in the versions that it asks for."""
    for package, lowest in (("torch", (2, 11)), ("transformers", (5, 16, 1))):
        version = _version(package)
        ok = version is not None and _numbers(version) >= lowest
        wanted = ".".join(map(str, lowest))
        advice = "" if ok else f"pip install '{package}>={wanted}'"
        yield Finding(package, version or "not installed", ok, needed=True, advice=advice)


def _devices() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        yield Finding(
            f"GPU {index}",
            f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}",
        )
    if not torch.cuda.is_available():
        built = torch.version.cuda
        advice = (
            "torch was built for CUDA and finds no device: is the driver there?"
            if built
            else "runs use the CPU; with a GPU, install a CUDA build of torch"
        )
        yield Finding("GPU", "none that torch can use", ok=False, advice=advice)
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    yield Finding("threads", f"{torch.get_num_threads()} (OMP_NUM_THREADS {threads})")


def _extras() -> Iterator[Finding]:
    for extra, (package, purpose) in EXTRAS.items():
        version = _version(package)
        yield Finding(
            extra,
            version or "not installed",
            version is not None,
            advice="" if version else f"for {purpose}: pip install 'ludic-rl[{extra}]'",
        )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0]))
