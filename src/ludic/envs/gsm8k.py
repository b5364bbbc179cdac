"""GSM8K: word problems of grade-school arithmetic, with a number for an answer.

Try it by hand: `python -m ludic.envs.gsm8k --path train.jsonl`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ludic.envs.dataset_qa_env import DatasetQAEnv, main
from ludic.envs.dataset_rows import Row
from ludic.errors import EnvError
from ludic.rewards import RewardSpec, RewardSum
from ludic.rewards.answers import read_number

_PROMPT = (
    "Solve the problem step by step. The answer is one number: write it at the end as "
    "\\boxed{number}."
)


class GSM8KEnv(DatasetQAEnv):
    """Grade-school word problems, judged by the number: 18, $18.00 and \\frac{36}{2} are the same.

    The data comes from the hub, or from `path` (the JSONL files of the dataset) or `rows`. The
    target is what follows `####` in a row's answer. The action is the bare answer, so give the
    agent a parser that finds it, such as `boxed_parser`.
    """

    def __init__(
        self,
        *,
        rows: Sequence[Row] | None = None,
        path: str | None = None,
        hub: str | None = None,
        split: str = "train",
        rewards: RewardSpec | Sequence[RewardSpec] | RewardSum = "symbolic",
        system_prompt: str | None = _PROMPT,
        index: int | None = None,
        limit: int | None = None,
    ) -> None:
        from_hub = rows is None and path is None
        super().__init__(
            rows=rows,
            path=path,
            hub=(hub or "openai/gsm8k") if from_hub else hub,
            config="main" if from_hub and hub is None else None,
            split=split,
            rewards=rewards,
            system_prompt=system_prompt,
            index=index,
            limit=limit,
        )

    def read_target(self, row: Row, index: int) -> str:
        answer = super().read_target(row, index)
        target = answer.rpartition("####")[2].strip()
        if read_number(target) is None:
            raise EnvError(f"row {index}: no number follows '####' in {answer[-80:]!r}")
        return target


if __name__ == "__main__":
    raise SystemExit(main(env=GSM8KEnv))
