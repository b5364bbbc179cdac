"""Questions from a dataset: one row, one answer, one reward. GSM8K and MATH are two of them."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ludic.envs.dataset_rows import DatasetEnv, Row
from ludic.errors import ConfigError, EnvError
from ludic.parsers import last_boxed
from ludic.rewards import Attempt, RewardSpec, RewardSum, Score, make_rewards
from ludic.rewards.answers import read_number
from ludic.types import Action, Info, Obs, StepOutcome


@dataclass(eq=False, repr=False, kw_only=True)
class DatasetQAEnv(DatasetEnv):
    """Shows one question and judges one answer; the episode ends with it.

    The seed picks the row, so that the episodes of a group share their question. The reward is
    the weighted sum of `rewards`, whose parts are kept on the step. The outcome is "right" or
    "wrong" if one of them checks the answer (exact, numeric, symbolic). A subclass for one dataset
    sets the `default_…` attributes, and overrides `read_target` where the answer is hidden in a
    solution.

    Args:
        rows: The data itself; or `path`, a JSONL file; or `hub`, a dataset on the Hugging Face
            hub with its `config` and `split`, which needs the extra `datasets`. With none of
            the three, `default_hub`.
        question_key: The column with the question; `answer_key` has the target, `id_key` a
            stable id (by default a row's position is its id).
        rewards: Reward functions or their JSON specs (`ludic.rewards.make_rewards`).
        template: The observation; `{question}` stands for the question.
        system_prompt: Suggested to the agent; "" means none at all.
        index: Always this row, whatever the seed: to evaluate each row once.
        limit: Use only the first `limit` rows.
    """

    default_hub: ClassVar[tuple[str, str | None] | None] = None
    """The dataset's name on the hub, and its configuration there."""
    default_question_key: ClassVar[str] = "question"
    default_rewards: ClassVar[str] = "exact"

    question_key: str | None = None
    answer_key: str = "answer"
    id_key: str | None = None
    rewards: RewardSpec | Sequence[RewardSpec] | RewardSum | None = None
    template: str = "{question}"

    def __post_init__(self) -> None:
        super().__post_init__()
        if "{question}" not in self.template:
            raise ConfigError(f"the template {self.template!r} has no place for {{question}}")
        if self.default_hub and self.rows is None and self.path is None and self.hub is None:
            self.hub, default_config = self.default_hub
            self.config = self.config or default_config
        self._score = make_rewards(self.default_rewards if self.rewards is None else self.rewards)
        self._row: Row = {}
        self._question = ""
        self._target = ""

    def env_reset(self, *, seed: int | None = None) -> tuple[Obs, Info]:
        index = self.data.pick(seed, self.index, self.limit)
        row = self._row = self.data.rows[index]
        question_key = self.question_key or self.default_question_key
        self._question = str(self.column(row, question_key, index))
        self._target = self.read_target(row, index)
        row_id = index if self.id_key is None else self.column(row, self.id_key, index)
        self._task_key = f"{self.data.name}#{row_id}"
        return self.env_current_obs(), {"task": self._task_key}

    def env_step(self, action: Action) -> StepOutcome | Awaitable[StepOutcome]:
        score = self._score(Attempt(action, self._target, self._question, self._row))
        return self._outcome(score) if isinstance(score, Score) else self._judged(score)

    def env_current_obs(self) -> Obs:
        return self.template.replace("{question}", self._question)

    def read_target(self, row: Row, index: int) -> str:
        """The reference answer of a row."""
        return str(self.column(row, self.answer_key, index))

    def column(self, row: Row, key: str, index: int) -> Any:
        """What the row has under `key`; an `EnvError` names the columns that it does have."""
        if key not in row:
            raise EnvError(
                f"row {index} of the dataset {self.data.name!r} has no column {key!r}; "
                f"it has {sorted(row)}"
            )
        return row[key]

    async def _judged(self, score: Awaitable[Score]) -> StepOutcome:
        return self._outcome(await score)

    def _outcome(self, score: Score) -> StepOutcome:
        # The target stays out of the observation: nothing after the answer should teach it.
        info: dict[str, Any] = {"target": self._target}
        if score.right is not None:
            info["result"] = "right" if score.right else "wrong"
        return StepOutcome(
            "", score.reward, terminated=True, info=info, reward_components=score.components
        )


class GSM8KEnv(DatasetQAEnv):
    """Grade-school word problems, judged by the number: 18, $18.00 and \\frac{36}{2} are the same.

    The data comes from the hub, or from `path` (the JSONL files of the dataset) or `rows`. The
    target is what follows `####` in a row's answer. The action is the bare answer, so give the
    agent a parser that finds it, such as `boxed_parser`.
    """

    default_hub = ("openai/gsm8k", "main")
    default_rewards = "symbolic"
    default_system_prompt = (
        "Solve the problem step by step. The answer is one number: write it at the end as "
        "\\boxed{number}."
    )

    def read_target(self, row: Row, index: int) -> str:
        answer = super().read_target(row, index)
        target = answer.rpartition("####")[2].strip()
        if read_number(target) is None:
            raise EnvError(f"row {index}: no number follows '####' in {answer[-80:]!r}")
        return target


class MATHEnv(DatasetQAEnv):
    """Competition problems, judged by symbolic equality: \\frac{1}{2} and 0.5 are the same.

    The data comes from the hub, or from `path` (JSONL) or `rows`. A row has a `problem`, and an
    `answer` or a `solution` whose last box is the answer. The action is the bare answer, so give
    the agent a parser that finds it, such as `boxed_parser`.
    """

    default_hub = ("nlile/hendrycks-MATH-benchmark", None)
    default_question_key = "problem"
    default_rewards = "symbolic"
    default_system_prompt = (
        "Solve the problem step by step. Write the final answer at the end as \\boxed{answer}."
    )

    def read_target(self, row: Row, index: int) -> str:
        if row.get("answer"):
            return str(row["answer"])
        target = last_boxed(str(self.column(row, "solution", index)))
        if not target:
            raise EnvError(f"row {index} has neither an 'answer' nor a box in its 'solution'")
        return target
