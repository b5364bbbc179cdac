"""MATH: competition problems whose answers are mathematical expressions."""

from __future__ import annotations

from ludic.envs.dataset_qa_env import DatasetQAEnv
from ludic.envs.dataset_rows import Row
from ludic.errors import EnvError
from ludic.parsers import last_boxed


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
