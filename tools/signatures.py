"""Tables of arguments in the documentation, made from signatures.

`python -m tools.signatures --write` puts them between the marks of their pages. A test holds that
they are up to date, and that each argument has its meaning here.
"""

from __future__ import annotations

import argparse
import inspect
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ludic.inference.tiny import tiny_model, tiny_tokenizer
from ludic.registry import AGGREGATIONS, ALGORITHMS

DOCS = Path(__file__).resolve().parent.parent / "docs"
BEGIN = "<!-- table: python -m tools.signatures --write -->"
END = "<!-- end of the table -->"

TYPES = {
    "Aggregation": "aggregation",
    "BetaTracker | None": "`BetaTracker`",
    "Clip": "two numbers",
    "CreditAssigner | None": "credit assigner",
    "Literal['token', 'turn']": '`"token"` or `"turn"`',
    "Sequence[str]": "list of strings",
    "Unit": '`"turn"` or `"rollout"`',
    "bool": "`true` or `false`",
    "float": "number",
    "float | None": "number",
    "float | DriftForgetting | Mapping[str, float]": "number or table",
    "int": "integer",
    "int | None": "integer",
    "tuple[float, float]": "two numbers",
}

OF_ALGORITHMS = {
    "aggregation": "how the token terms become one number",
    "cap": "the upper bound of the importance ratio ρ",
    "clip": "the bounds of the importance ratio ρ",
    "credit_assigner": "credit for the outcome, if `reward_coeff` is not 0",
    "entropy_coeff": "the weight of the entropy bonus, which keeps the policy exploring",
    "filter_zvp": "drop groups whose members all have the same return",
    "floor": "the lower bound of the importance ratio ρ; empty: none",
    "gamma": "the discount per turn",
    "group_size": "attempts at one task, compared with each other",
    "kl_coeff": "the weight of the KL term; above 0 it needs a reference",
    "level": "the gap to the teacher that a token is credited with: its own, or its turn's mean",
    "max_completion_tokens": "the constant L that the sum over tokens is divided by",
    "normalize_adv": "divide by the group's standard deviation",
    "forgetting": "λ, or how it follows the policy's drift",
    "returns": "the lowest and highest return, mapped to 0 and 1",
    "reward_coeff": "the weight of the outcome's credit next to the teacher's",
    "tau_neg": "the gate's temperature where A ≤ 0",
    "tau_pos": "the gate's temperature where A > 0",
    "tracker": "the tasks' values; empty: a new one",
    "unit": "what a sequence is",
}
ODD_ONES = {
    ("gmpo", "clip"): "the bound on log ρ, on the side where A gains",
    ("opd", "group_size"): "compare the outcomes of this many attempts at a task, as GRPO does",
}

OF_THE_TINY_MODEL = {
    "heads": "attention heads",
    "hidden_size": "the width; a multiple of `heads`",
    "initializer_range": "the standard deviation of the random weights",
    "kv_heads": "heads of keys and values; `heads` is a multiple of it",
    "layers": "decoder layers",
    "max_position_embeddings": "the longest context, prompt and answer together",
    "words": "texts that become single tokens",
}


def algorithms() -> str:
    """Returns a heading and a table for every algorithm."""
    return "\n".join(
        f"### `{name}`\n\n{summary(ALGORITHMS.get(name))}\n\n"
        + table(
            [
                (parameter, ODD_ONES.get((name, parameter.name)) or OF_ALGORITHMS[parameter.name])
                for parameter in parameters(ALGORITHMS.get(name))
            ]
        )
        for name in built_in()
    )


def built_in() -> list[str]:
    """Returns the algorithms of the package itself: importing a user's module may add others."""
    names = sorted(ALGORITHMS.names())
    return [name for name in names if ALGORITHMS.get(name).__module__.startswith("ludic.")]


def embedded_model() -> str:
    """Returns the table of what `model.kwargs` takes for the tiny model."""
    taken = [p for p in parameters(tiny_model) if p.name not in ("seed", "vocab_size")]
    taken += parameters(tiny_tokenizer)
    return table([(parameter, OF_THE_TINY_MODEL[parameter.name]) for parameter in taken])


PAGES: dict[str, Callable[[], str]] = {
    "algorithm_arguments.md": algorithms,
    "embedded_model.md": embedded_model,
}


def parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Returns a function's parameters, in order."""
    return list(inspect.signature(function).parameters.values())


def summary(function: Callable[..., Any]) -> str:
    """Returns the first sentence or two of a docstring, as one line."""
    return " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split())


def _spelled(annotation: Any) -> str:
    """Returns an annotation as the source has it, also where something has evaluated it."""
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def table(rows: Iterable[tuple[inspect.Parameter, str]]) -> str:
    """Returns a table of arguments."""
    lines = ["| argument | default | type | meaning |", "|---|---|---|---|"]
    lines += [
        f"| `{parameter.name}` | {default(parameter.default)} | "
        f"{TYPES[_spelled(parameter.annotation)]} | {meaning} |"
        for parameter, meaning in rows
    ]
    return "\n".join(lines) + "\n"


def default(value: Any) -> str:
    """Returns a default as a run file would write it."""
    if value is None or value == ():
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, float) and math.isinf(value):
        return "none"
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    if isinstance(value, str):
        return f'`"{value}"`'
    if isinstance(value, int | float):
        return f"`{value}`"
    return f'`"{AGGREGATIONS.builtin_name(type(value))}"`'  # an aggregation


def page_with(text: str, content: str) -> str:
    """Returns the page with `content` between its two marks."""
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    return f"{before}{BEGIN}\n\n{content}\n{END}{after}"


def main(arguments: Iterable[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="into the pages")
    chosen = parser.parse_args(None if arguments is None else list(arguments))
    for name, content in PAGES.items():
        if chosen.write:
            page = DOCS / name
            text = page_with(page.read_text(encoding="utf-8"), content())
            page.write_text(text, encoding="utf-8")
            print(f"wrote docs/{name}")
        else:
            print(content())


if __name__ == "__main__":
    main()
