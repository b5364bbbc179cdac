"""Environments of verifiers 0.3 for the tests, as their authors write them."""

from __future__ import annotations

from typing import Any

ROWS = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(1, 6)]


def load_environment(kind: str = "single", **options: Any) -> Any:
    """An environment of each sort: `single`, `guess`, `tools`, `group`, `broken`."""
    import verifiers as vf
    from datasets import Dataset

    rows = Dataset.from_list(ROWS)

    def right(completion: Any, answer: str) -> float:
        return float(str(completion[-1].content).strip() == answer)

    def brief(completion: Any) -> float:
        return float(len(str(completion[-1].content)) < 10)

    def turns(state: Any) -> float:
        return float(len(state["trajectory"]))

    def compared(completions: Any) -> list[float]:
        return [0.0 for _ in completions]

    rubric = vf.Rubric(funcs=[right, brief, turns], weights=[1.0, 0.5, 0.0])

    class Guess(vf.MultiTurnEnv):  # type: ignore[misc]
        async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
            said = str(messages[-1].content).strip()
            if said == "crash":
                raise vf.Error("the environment crashed")
            if said == state["answer"]:
                state["final_env_response"] = [{"role": "user", "content": "Right."}]
                return state["final_env_response"]
            return [{"role": "user", "content": f"{said} is wrong. Again."}]

    def add(a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: The first one.
            b: The second one.
        """
        return a + b

    if kind == "single":
        return vf.SingleTurnEnv(dataset=rows, system_prompt="Answer.", rubric=rubric, **options)
    if kind == "guess":
        return Guess(dataset=rows, rubric=rubric, max_turns=3, **options)
    if kind == "tools":
        return vf.ToolEnv(dataset=rows, rubric=rubric, tools=[add], max_turns=4, **options)
    if kind == "group":
        return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[compared]))
    raise ValueError(f"there is no kind {kind!r}")
