"""Sandboxes for programs that nobody has read: one small contract, a strict one, a plain one."""

from ludic.envs.code_exec.sandbox.base import Limits as Limits
from ludic.envs.code_exec.sandbox.base import RunResult as RunResult
from ludic.envs.code_exec.sandbox.base import RunStatus as RunStatus
from ludic.envs.code_exec.sandbox.base import SandboxError as SandboxError
from ludic.envs.code_exec.sandbox.base import SandboxUnavailableError as SandboxUnavailableError
from ludic.envs.code_exec.sandbox.base import text_of as text_of
from ludic.envs.code_exec.sandbox.base import text_of_line as text_of_line
from ludic.envs.code_exec.sandbox.bubblewrap import BubblewrapSandbox as BubblewrapSandbox
from ludic.envs.code_exec.sandbox.plain import PlainSandbox as PlainSandbox
from ludic.envs.code_exec.sandbox.pool import DEFAULT_SANDBOX as DEFAULT_SANDBOX
from ludic.envs.code_exec.sandbox.pool import SANDBOXES as SANDBOXES
from ludic.envs.code_exec.sandbox.pool import Role as Role
from ludic.envs.code_exec.sandbox.pool import SandboxPool as SandboxPool
from ludic.envs.code_exec.sandbox.pool import check_sandbox as check_sandbox
from ludic.envs.code_exec.sandbox.pool import describe_sandbox as describe_sandbox
from ludic.envs.code_exec.sandbox.pool import make_sandbox as make_sandbox
from ludic.envs.code_exec.sandbox.pool import shared_pool as shared_pool
from ludic.envs.code_exec.sandbox.worker import Program as Program
from ludic.envs.code_exec.sandbox.worker import Sandbox as Sandbox
