"""GSM8K: word problems of grade-school arithmetic, with a number for an answer."""

from __future__ import annotations

from ludic.envs.dataset_qa_env import DatasetQAEnv
from ludic.envs.dataset_rows import Row
from ludic.errors import EnvError
from ludic.rewards.answers import read_number


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
