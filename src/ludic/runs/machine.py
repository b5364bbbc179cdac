"""What this machine has, and how to get what it lacks."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from dataclasses import dataclass

from ludic.errors import LudicError

_PACKAGES = ("ludic-rl", "torch", "transformers", "tokenizers", "numpy", "peft", "vllm")
_OPTIONAL = ("vllm", "redis", "wandb", "tensorboard", "datasets", "peft", "matplotlib")
"""Packages of extras, each of its own name but for matplotlib's."""


@dataclass(frozen=True, slots=True)
class MachineFact:
    """One thing about this machine; `remedy` says how to get what is missing."""

    name: str
    found: str
    remedy: str | None = None


def check_machine() -> list[MachineFact]:
    """Returns what is installed, which GPU there is, and what is missing."""
    import torch

    from ludic.envs.code_exec.sandbox.pool import describe_sandbox

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    facts = [
        MachineFact("python", f"{platform.python_version()} at {sys.executable}"),
        MachineFact("machine", f"{os.cpu_count()} cores, {memory:.0f} GiB"),
    ]
    packages = ("ludic-rl", "torch", "transformers")
    facts += [MachineFact(name, installed(name) or "not installed") for name in packages]
    facts.append(_gpu())
    if torch.cuda.is_available():
        facts.append(_compiler())
    facts.append(MachineFact("sandbox", *describe_sandbox()))
    for package in _OPTIONAL:
        version, extra = installed(package), "plot" if package == "matplotlib" else package
        if package == "vllm" and version is None:
            facts.append(_vllm())
        elif version is None:
            facts.append(MachineFact(package, "missing", f"pip install -e '.[{extra}]'"))
        else:
            facts.append(MachineFact(package, version))
    return facts


def _gpu() -> MachineFact:
    import torch

    if not torch.cuda.is_available():
        built = "a CUDA build of torch" if torch.version.cuda else "a CPU build of torch"
        return MachineFact("GPU", f"none ({built}); everything runs on the CPU")
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return MachineFact(
        "GPU", "; ".join(f"{p.name}, {p.total_memory / 2**30:.0f} GiB" for p in gpus)
    )


def gpu_name() -> str | None:
    """Returns what the first GPU is called, or None."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def _compiler() -> MachineFact:
    """Triton and torch.compile need one to launch their kernels on a GPU."""
    chosen = os.environ.get("CC")
    compiler = shutil.which(chosen) if chosen else shutil.which("clang") or shutil.which("gcc")
    if compiler:
        return MachineFact("C compiler", compiler)
    remedy = "install gcc, or let CC name one: training on a GPU compiles its kernels with it"
    return MachineFact("C compiler", "missing", remedy + (f" (CC={chosen})" if chosen else ""))


def _vllm() -> MachineFact:
    """vLLM is often installed in a separate environment, and on the CPU under another name."""
    from ludic.inference.vllm.server import VLLMBuild

    try:
        build = VLLMBuild.of()
    except LudicError:
        remedy = (
            "pip install -e '.[vllm]' (CUDA), or `make test-vllm` for the CPU build in a "
            "separate environment, named by LUDIC_VLLM_PYTHON"
        )
        return MachineFact("vllm", "missing", remedy)
    kind = "CPU build" if build.cpu else "CUDA build"
    return MachineFact("vllm", f"{build.version}, {kind}, at {build.python}")


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that a result depends on."""
    packages = {name: version for name in _PACKAGES if (version := installed(name))}
    return {"python": platform.python_version(), **packages}


def installed(name: str) -> str | None:
    """Returns the version of an installed package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
