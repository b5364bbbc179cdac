"""Environments that reward working programs, and the sandboxes that the programs run in."""

from ludic.envs.code_exec.env import CodeExecEnv as CodeExecEnv
from ludic.envs.code_exec.judge import Judge as Judge
from ludic.envs.code_exec.judge import Outcome as Outcome
from ludic.envs.code_exec.judge import ResultCache as ResultCache
from ludic.envs.code_exec.judge import Verdict as Verdict
from ludic.envs.code_exec.sandbox.base import Limits as Limits
from ludic.envs.code_exec.sandbox.base import RunResult as RunResult
from ludic.envs.code_exec.sandbox.base import RunStatus as RunStatus
from ludic.envs.code_exec.sandbox.base import SandboxError as SandboxError
from ludic.envs.code_exec.sandbox.base import SandboxUnavailableError as SandboxUnavailableError
from ludic.envs.code_exec.sandbox.bubblewrap import BubblewrapSandbox as BubblewrapSandbox
from ludic.envs.code_exec.sandbox.plain import PlainSandbox as PlainSandbox
from ludic.envs.code_exec.sandbox.pool import SandboxPool as SandboxPool
from ludic.envs.code_exec.sandbox.pool import make_sandbox as make_sandbox
from ludic.envs.code_exec.sandbox.pool import shared_pool as shared_pool
from ludic.envs.code_exec.sandbox.worker import Sandbox as Sandbox
from ludic.envs.code_exec.tasks import ADAPTERS as ADAPTERS
from ludic.envs.code_exec.tasks import CodeTask as CodeTask
from ludic.envs.code_exec.tasks import FunctionTask as FunctionTask
from ludic.envs.code_exec.tasks import IOCase as IOCase
from ludic.envs.code_exec.tasks import StdioTask as StdioTask
from ludic.envs.code_exec.tasks import extract_code as extract_code
from ludic.envs.code_exec.tools import PythonTool as PythonTool
from ludic.envs.code_exec.tools import calculator as calculator
from ludic.envs.code_exec.verifiers import Verifier as Verifier
from ludic.envs.code_exec.verifiers import make_verifier as make_verifier
