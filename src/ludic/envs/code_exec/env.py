"""An environment whose answers are programs, and whose rewards are the tests that they pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from ludic.envs.code_exec.judge import Judge, ResultCache, Verdict
from ludic.envs.code_exec.sandbox.base import Limits
from ludic.envs.code_exec.sandbox.pool import (
    DEFAULT_SANDBOX,
    SandboxPool,
    check_sandbox,
    shared_pool,
)
from ludic.envs.code_exec.tasks import ADAPTERS, Adapter, CodeTask, FunctionTask, StdioTask
from ludic.envs.code_exec.verifiers import Verifier, make_verifier
from ludic.envs.dataset_rows import DatasetEnv
from ludic.errors import ConfigError, EnvError
from ludic.plumbing.lazy import names_are_stored
from ludic.types import Action, Info, Obs, StepOutcome

_CACHE: ResultCache[Verdict] = ResultCache()
"""Shared by the environments of this process: episodes of a group often give the same answer."""

SYSTEM_PROMPT = (
    "Write a Python program that solves the task. Answer with the code, in one block that begins "
    "with ```python and ends with ```."
)


@dataclass(eq=False, repr=False, kw_only=True)
class CodeExecEnv(DatasetEnv):
    """Shows a task, runs the answer in a sandbox, and rewards what works.

    The seed picks the task, so that the episodes of a group share it. The answer's code is its
    last fenced block, or all of it. Expected outputs never come near the process that runs it.

    Args:
        rows: The tasks; or `path`, a JSONL file; or `hub`, a dataset on the Hugging Face hub with
            its `config` and `split`, which needs the extra `datasets`.
        adapter: What makes a task of a row: "stdio", "humaneval", "mbpp", or a function of one's
            own (`module:function`) that returns a `StdioTask` or a `FunctionTask`.
        sandbox: "bubblewrap", or "plain", which is a subprocess with limits and warns.
        workers: Programs at the same time, for the whole process; by default one per core.
        limits: Those of a program that differ from `Limits()`.
        verifier: "exact", "whitespace", "float", or a mapping (see `make_verifier`).
        reward: "all" gives 1 where every test passes and 0 otherwise, "partial" the share of the
            tests that pass.
        compile_penalty: Subtracted where the answer is not a program at all.
        max_attempts: Answers per episode. After each but the last, the agent is told what went
            wrong, and may try again; the reward is that of the last one.
        feedback: What it is told: "errors" (tracebacks, and which test failed), or "verdict" (only
            whether it passed). Never what was expected.
        cache: Whether an answer that was tried before is tried again.
        budget_s: How long the programs of one answer may run, over all its tests.
        index: Always this row, whatever the seed; `limit`: only the first rows.
    """

    default_system_prompt = SYSTEM_PROMPT

    adapter: str | Adapter = "stdio"
    sandbox: str = DEFAULT_SANDBOX
    workers: int | None = None
    limits: Limits | Mapping[str, Any] | None = None
    verifier: str | Mapping[str, Any] | Verifier = "whitespace"
    reward: Literal["all", "partial"] = "all"
    compile_penalty: float = 0.0
    max_attempts: int = 1
    feedback: Literal["errors", "verdict"] = "errors"
    cache: bool = True
    max_code_kb: float = 256
    budget_s: float = 45.0
    template: str = "{task}"
    pool: SandboxPool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reward not in ("all", "partial"):
            raise ConfigError(f"CodeExecEnv(reward={self.reward!r}): must be 'all' or 'partial'")
        if self.feedback not in ("errors", "verdict"):
            raise ConfigError(
                f"CodeExecEnv(feedback={self.feedback!r}): must be 'errors' or 'verdict'"
            )
        if self.max_attempts < 1 or self.compile_penalty < 0:
            raise ConfigError(
                f"CodeExecEnv(max_attempts={self.max_attempts}, compile_penalty="
                f"{self.compile_penalty}): at least one attempt, and a penalty of 0 or more"
            )
        if self.sandbox != DEFAULT_SANDBOX and names_are_stored():
            raise ConfigError(
                f"stored data asks for the sandbox {self.sandbox!r}: its programs run only in "
                f"{DEFAULT_SANDBOX!r}"
            )
        if "{task}" not in self.template:
            raise ConfigError(f"the template {self.template!r} has no place for {{task}}")
        adapter = self.adapter
        self._adapter: Adapter = ADAPTERS.get(adapter) if isinstance(adapter, str) else adapter
        self._limits = Limits.of(self.limits)
        self._verifier = make_verifier(self.verifier)
        self._task: CodeTask | None = None
        self._obs = ""
        self._attempts = 0

    @property
    def return_range(self) -> tuple[float, float]:
        return (-self.compile_penalty, 1.0)

    def check_machine(self) -> None:
        if self.pool is None:
            check_sandbox(self.sandbox)

    @cached_property
    def _judge(self) -> Judge:
        return Judge(
            self.pool or shared_pool(self.sandbox, self.workers),
            self._verifier,
            self._limits,
            self.sandbox,
            all_tests=self.reward == "partial",
            max_code_kb=self.max_code_kb,
            budget_s=self.budget_s,
            cache=_CACHE if self.cache else None,
        )

    def env_reset(self, *, seed: int | None = None) -> tuple[Obs, Info]:
        data, _ = self.data, self._judge  # a sandbox that cannot run is reported before any task
        index = data.pick(seed, self.index, self.limit)
        task = self._adapter(data.rows[index])
        if not isinstance(task, StdioTask | FunctionTask):
            raise EnvError(
                f"the task adapter returned {type(task).__name__}, not a StdioTask or FunctionTask"
            )
        self._task, self._attempts = task, 0
        self._task_key = f"{data.name}#{index if task.key is None else task.key}"
        self._obs = self.template.replace("{task}", task.prompt)
        return self._obs, {"task": self._task_key}

    def env_step(self, action: Action) -> StepOutcome:
        assert self._task is not None
        verdict = self._judge(self._task, action)
        self._attempts += 1
        info = {
            "result": str(verdict.outcome),
            "tests_passed": verdict.passed,
            "tests": verdict.total,
            "attempts": self._attempts,
            "status": verdict.status,
        }
        passed = verdict.passed == verdict.total
        if not passed and self._attempts < self.max_attempts:
            hint = verdict.message if self.feedback == "errors" else "Not all tests passed."
            self._obs = f"{hint}\nTry again."
            return StepOutcome(self._obs, 0.0, info=info)
        score = verdict.passed / verdict.total if self.reward == "partial" else float(passed)
        penalty = 0.0 if verdict.compiles else -self.compile_penalty
        parts = {"tests": score, "compile": penalty}
        return StepOutcome("", score + penalty, terminated=True, info=info, reward_components=parts)

    def env_current_obs(self) -> Obs:
        return self._obs
