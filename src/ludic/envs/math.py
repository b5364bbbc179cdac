"""MATH: competition problems whose answers are mathematical expressions.

Try it by hand: `python -m ludic.envs.math --path problems.jsonl`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ludic.envs.dataset_qa_env import DatasetQAEnv, main
from ludic.envs.dataset_rows import Row
from ludic.errors import EnvError
from ludic.parsers import last_boxed
from ludic.rewards import RewardSpec, RewardSum

_PROMPT = "Solve the problem step by step. Write the final answer at the end as \\boxed{answer}."


class MATHEnv(DatasetQAEnv):
    """Competition problems, judged by symbolic equality: \\frac{1}{2} and 0.5 are the same.

    The data comes from the hub, or from `path` (JSONL) or `rows`. A row has a `problem`, and an
    `answer` or a `solution` whose last box is the answer. The action is the bare answer, so give
    the agent a parser that finds it, such as `boxed_parser`.
    """

    def __init__(
        self,
        *,
        rows: Sequence[Row] | None = None,
        path: str | None = None,
        hub: str | None = None,
        config: str | None = None,
        split: str = "train",
        id_key: str | None = None,
        rewards: RewardSpec | Sequence[RewardSpec] | RewardSum = "symbolic",
        system_prompt: str | None = _PROMPT,
        index: int | None = None,
        limit: int | None = None,
    ) -> None:
        if rows is None and path is None and hub is None:
            hub = "nlile/hendrycks-MATH-benchmark"
        super().__init__(
            rows=rows,
            path=path,
            hub=hub,
            config=config,
            split=split,
            question_key="problem",
            id_key=id_key,
            rewards=rewards,
            system_prompt=system_prompt,
            index=index,
            limit=limit,
        )

    def read_target(self, row: Row, index: int) -> str:
        if row.get("answer"):
            return str(row["answer"])
        target = last_boxed(str(self._column(row, "solution", index)))
        if not target:
            raise EnvError(f"row {index} has neither an 'answer' nor a box in its 'solution'")
        return target


if __name__ == "__main__":
    raise SystemExit(main(env=MATHEnv))
