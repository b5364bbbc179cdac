"""Which sandboxes there are, and which of them this machine can run."""

from __future__ import annotations

from ludic.envs.code_exec.sandbox.base import Sandbox, SandboxUnavailableError
from ludic.envs.code_exec.sandbox.bubblewrap import (
    BubblewrapSandbox,
    bubblewrap_version,
    check_bubblewrap,
)
from ludic.envs.code_exec.sandbox.cgroups import writable_parent
from ludic.envs.code_exec.sandbox.plain import PlainSandbox
from ludic.errors import UnknownNameError

DEFAULT_SANDBOX = "bubblewrap"
SANDBOXES: dict[str, type[BubblewrapSandbox] | type[PlainSandbox]] = {
    "bubblewrap": BubblewrapSandbox,
    "plain": PlainSandbox,
}


def make_sandbox(name: str = DEFAULT_SANDBOX, *, warm: bool = True) -> Sandbox:
    """The sandbox of that name, and never another; `SandboxUnavailableError` if it cannot run."""
    check_sandbox(name)
    return SANDBOXES[name](warm=warm)


def check_sandbox(name: str = DEFAULT_SANDBOX) -> None:
    """Raises `SandboxUnavailableError` if this machine cannot run the sandbox of that name."""
    if name not in SANDBOXES:
        raise UnknownNameError("sandbox", name, SANDBOXES)
    try:
        if name == "bubblewrap":
            check_bubblewrap()
    except SandboxUnavailableError as error:
        raise SandboxUnavailableError(
            f"{error}. Nothing weaker is used in its place; a plain subprocess with limits has to "
            "be asked for by name: sandbox = 'plain'"
        ) from error


def describe_sandbox() -> tuple[str, str | None]:
    """For the doctor: which sandbox programs run in here, and what to do if it is none."""
    try:
        check_bubblewrap()
    except SandboxUnavailableError as error:
        return "missing", f"{error}; a plain subprocess is used only if asked for by name"
    counted = "cgroups" if writable_parent() is not None else "a watch over the process tree"
    return f"bubblewrap {bubblewrap_version()}, memory by {counted}", None
