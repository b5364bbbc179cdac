"""Sandboxes for programs that nobody has read: one small contract, a strict one, a plain one."""

from ludic.envs.code_exec.sandbox.base import (
    Limits,
    Program,
    RunResult,
    RunStatus,
    Sandbox,
    SandboxError,
    SandboxUnavailableError,
    text_of,
    text_of_line,
)
from ludic.envs.code_exec.sandbox.bubblewrap import BubblewrapSandbox
from ludic.envs.code_exec.sandbox.plain import PlainSandbox
from ludic.envs.code_exec.sandbox.pool import (
    DEFAULT_SANDBOX,
    SANDBOXES,
    Role,
    SandboxPool,
    check_sandbox,
    describe_sandbox,
    make_sandbox,
    shared_pool,
)

__all__ = [
    "DEFAULT_SANDBOX",
    "SANDBOXES",
    "BubblewrapSandbox",
    "Limits",
    "PlainSandbox",
    "Program",
    "Role",
    "RunResult",
    "RunStatus",
    "Sandbox",
    "SandboxError",
    "SandboxPool",
    "SandboxUnavailableError",
    "check_sandbox",
    "describe_sandbox",
    "make_sandbox",
    "shared_pool",
    "text_of",
    "text_of_line",
]
