"""Asserts that never meet the code that they test: two sandboxes, and a pipe between them.

The solution runs in one sandbox and sees only the arguments of the calls. The task's asserts, with
the expected values in them, run in the other. Between them goes tagged JSON.
"""

from ludic.envs.code_exec.function_tests.relay import FunctionResults as FunctionResults
from ludic.envs.code_exec.function_tests.relay import run_function_tests as run_function_tests
