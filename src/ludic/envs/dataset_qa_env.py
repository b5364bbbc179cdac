"""Questions from a dataset: one row, one answer, one reward. GSM8K and MATH are two of them."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, ClassVar

from ludic.envs.dataset_rows import DatasetRows, Row, load_rows
from ludic.envs.single_agent_env import SingleAgentEnv
from ludic.errors import ConfigError, EnvError
from ludic.parsers import last_boxed
from ludic.rewards import Attempt, RewardSpec, RewardSum, Score, make_rewards
from ludic.rewards.answers import read_number
from ludic.types import Action, Info, Obs, StepOutcome


class DatasetQAEnv(SingleAgentEnv):
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
        system_prompt: Suggested to the agent; "" is none at all.
        index: Always this row, whatever the seed: to evaluate each row once.
        limit: Use only the first `limit` rows.
    """

    default_hub: ClassVar[tuple[str, str | None] | None] = None
    """The dataset's name on the hub, and its configuration there."""
    default_question_key: ClassVar[str] = "question"
    default_rewards: ClassVar[str] = "exact"
    default_system_prompt: ClassVar[str | None] = None

    def __init__(
        self,
        *,
        rows: Sequence[Row] | None = None,
        path: str | None = None,
        hub: str | None = None,
        config: str | None = None,
        split: str = "train",
        question_key: str | None = None,
        answer_key: str = "answer",
        id_key: str | None = None,
        rewards: RewardSpec | Sequence[RewardSpec] | RewardSum | None = None,
        template: str = "{question}",
        system_prompt: str | None = None,
        index: int | None = None,
        limit: int | None = None,
    ) -> None:
        if "{question}" not in template:
            raise ConfigError(f"the template {template!r} has no place for {{question}}")
        if limit is not None and limit < 1:
            raise ConfigError(f"{type(self).__name__}(limit={limit}): must be at least 1")
        if self.default_hub and rows is None and path is None and hub is None:
            hub, default_config = self.default_hub
            config = config or default_config
        self._source: dict[str, Any] = {
            "rows": rows, "path": path, "hub": hub, "config": config, "split": split
        }  # fmt: skip
        self._question_key = question_key or self.default_question_key
        self._answer_key, self._id_key = answer_key, id_key
        self._rewards = make_rewards(self.default_rewards if rewards is None else rewards)
        self._template = template
        self._system_prompt = self.default_system_prompt if system_prompt is None else system_prompt
        self._index = index
        self._limit = limit
        self._data: DatasetRows | None = None
        self._row: Row = {}
        self._question = ""
        self._target = ""
        self._task_key: str | None = None
        self._over = True

    def num_rows(self) -> int:
        """How many rows there are to choose from. Loads the data if that is still to be done."""
        return self._loaded().count(self._limit)

    def env_reset(self, *, seed: int | None = None) -> tuple[Obs, Info]:
        data = self._loaded()
        index = data.pick(seed, self._index, self._limit)
        self._row = data.rows[index]
        self._question = str(self.column(self._row, self._question_key, index))
        self._target = self.read_target(self._row, index)
        row_id = index if self._id_key is None else self.column(self._row, self._id_key, index)
        self._task_key = f"{data.name}#{row_id}"
        self._over = False
        return self.env_current_obs(), {"task": self._task_key}

    def env_step(self, action: Action) -> StepOutcome | Awaitable[StepOutcome]:
        if self._over:
            raise EnvError(
                f"{type(self).__name__} was stepped after the episode ended: reset it first"
            )
        self._over = True
        score = self._rewards(Attempt(action, self._target, self._question, self._row))
        if isinstance(score, Score):
            return self._outcome(score)
        return self._judged(score)

    def env_current_obs(self) -> Obs:
        return self._template.replace("{question}", self._question)

    def suggested_sysprompt(self, agent_id: str) -> str | None:
        return self._system_prompt

    def task_key(self) -> str | None:
        return self._task_key

    def read_target(self, row: Row, index: int) -> str:
        """The reference answer of a row."""
        return str(self.column(row, self._answer_key, index))

    def column(self, row: Row, key: str, index: int) -> Any:
        """What the row has under `key`; an `EnvError` names the columns that it does have."""
        if key not in row:
            raise EnvError(
                f"row {index} of the dataset {self._loaded().name!r} has no column {key!r}; "
                f"it has {sorted(row)}"
            )
        return row[key]

    def _loaded(self) -> DatasetRows:
        if self._data is None:
            self._data = load_rows(**self._source)
        return self._data

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
