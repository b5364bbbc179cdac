"""Environments that reward working programs, and the sandboxes that the programs run in."""

from ludic.envs.code_exec.env import CodeExecEnv
from ludic.envs.code_exec.judge import Judge, Outcome, ResultCache, Verdict
from ludic.envs.code_exec.sandbox import (
    BubblewrapSandbox,
    Limits,
    PlainSandbox,
    RunResult,
    RunStatus,
    Sandbox,
    SandboxError,
    SandboxPool,
    SandboxUnavailableError,
    make_sandbox,
    shared_pool,
)
from ludic.envs.code_exec.tasks import (
    ADAPTERS,
    CodeTask,
    FunctionTask,
    IOCase,
    StdioTask,
    extract_code,
)
from ludic.envs.code_exec.tools import PythonTool, calculator
from ludic.envs.code_exec.verifiers import Verifier, make_verifier

__all__ = [
    "ADAPTERS",
    "BubblewrapSandbox",
    "CodeExecEnv",
    "CodeTask",
    "FunctionTask",
    "IOCase",
    "Judge",
    "Limits",
    "Outcome",
    "PlainSandbox",
    "PythonTool",
    "ResultCache",
    "RunResult",
    "RunStatus",
    "Sandbox",
    "SandboxError",
    "SandboxPool",
    "SandboxUnavailableError",
    "StdioTask",
    "Verdict",
    "Verifier",
    "calculator",
    "extract_code",
    "make_sandbox",
    "make_verifier",
    "shared_pool",
]
