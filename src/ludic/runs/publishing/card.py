"""The model card: what was trained, on what, how it went, and with which versions.

It follows from the run folder alone, so that pushing the same run again changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ludic.eval import Estimate, EvalReport, Headline, headline_of
from ludic.runs.publishing.facts import RunFacts
from ludic.runs.results.summary import outcomes_of

_LOAD_MODEL = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{repo}"{revision})
tokenizer = AutoTokenizer.from_pretrained("{repo}"{revision})
"""
_LOAD_ADAPTER = """\
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

model = AutoPeftModelForCausalLM.from_pretrained("{repo}"{revision})
tokenizer = AutoTokenizer.from_pretrained("{repo}"{revision})
"""


def model_card(
    facts: RunFacts | None,
    repo: str,
    *,
    revision: str = "main",
    adapter: bool = False,
    base_model: str | None = None,
    checkpoint: str | None = None,
) -> str:
    """Returns a README for the hub. Without a run it says only how to load the model."""
    base = base_model or (facts.base_model if facts else None)
    name = repo.partition("/")[2]
    parts = [_front_matter(facts, base, adapter=adapter), f"# {name}"]
    if facts is not None:
        parts.append(_what(facts, base, adapter, checkpoint))
    load = _LOAD_ADAPTER if adapter else _LOAD_MODEL
    at = "" if revision == "main" else f', revision="{revision}"'
    parts += ["## Use", "```python\n" + load.format(repo=repo, revision=at) + "```"]
    if facts is not None:
        parts += _figures(facts) + _settings(facts) + _versions(facts)
    return "\n\n".join(parts) + "\n"


def _front_matter(facts: RunFacts | None, base: str | None, *, adapter: bool) -> str:
    lines = [f"library_name: {'peft' if adapter else 'transformers'}"]
    lines.append("pipeline_tag: text-generation")
    if base is not None:
        lines += [f"base_model: {base}"]
        lines += [f"base_model_relation: {'adapter' if adapter else 'finetune'}"]
    lines += ["tags:", "- ludic", "- reinforcement-learning"]
    if facts is not None and facts.settings["training"]["steps"]:
        lines.append(f"- {facts.settings['algorithm']['name']}")
    return "\n".join(["---", *lines, "---"])


def _what(facts: RunFacts, base: str | None, adapter: bool, checkpoint: str | None) -> str:
    said = facts.settings
    kind = "A LoRA adapter for" if adapter else "Trained from"
    model = f"`{base or said['model']['name']}`"
    how = []
    if said.get("sft"):
        how.append(f"{said['sft']['steps']} supervised updates")
    if said["training"]["steps"]:
        how.append(f"{said['training']['steps']} updates of `{said['algorithm']['name']}`")
    kinds = ", ".join(f"`{env['kind']}`" for env in said["env"])
    text = f"{kind} {model} by Ludic (`ludic-rl`): "
    text += f"{', then '.join(how) or 'no updates'} on {kinds}, seed {said['run']['seed']}."
    if checkpoint is not None:
        text += f" This is its checkpoint `{checkpoint}`."
    return text


def _figures(facts: RunFacts) -> list[str]:
    found = []
    if facts.reports:
        found += ["## Evaluation", _evaluation(facts.reports)]
    if facts.earlier:
        found.append("These figures are of the whole run; this checkpoint is an earlier one.")
    rows = [f"| {name} | {value:,.4g} |" for name, value in facts.figures.items()]
    if rows:
        found += ["## Training", "\n".join(["| | |", "|---|---|", *rows])]
    if facts.warnings:
        found.append("\n".join(f"- **Warning:** {sentence}" for sentence in facts.warnings))
    return found


def _evaluation(reports: Mapping[str, EvalReport]) -> str:
    lead = headline_of(reports.values())
    others = (Headline("outcome", name) for name in outcomes_of(reports.values()))
    figures = dict.fromkeys([lead, *others, Headline("reward")])
    columns = ["stage", "episodes", *(figure.name for figure in figures)]
    rows = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for stage, whole in reports.items():
        for part, report in whole.parts().items():
            cells = [stage.replace("_", " ") + (f", {part}" if part else "")]
            cells += [str(len(report.by_episode()))]
            for figure in figures:
                cells.append((percent if figure.is_rate else number)(figure.of(report)))
            rows.append("| " + " | ".join(cells) + " |")
    return "Held-out episodes, with 95 % intervals.\n\n" + "\n".join(rows)


def percent(rate: Estimate) -> str:
    """Returns a rate with its interval."""
    return f"{rate.value:.1%} [{rate.low:.1%}, {rate.high:.1%}]"


def number(value: Estimate) -> str:
    """Returns a mean with its interval."""
    return f"{value.value:.3f} [{value.low:.3f}, {value.high:.3f}]"


def _settings(facts: RunFacts) -> list[str]:
    data = [*facts.settings["env"], *facts.settings["eval"]["env"]]
    rows = [f"- `{env['kind']}` {_inline(env.get('kwargs', {}))}".rstrip() for env in data]
    chosen = json.dumps(facts.chosen(), indent=2, ensure_ascii=False)
    return [
        "## Data",
        "\n".join(dict.fromkeys(rows)),
        "## Settings",
        "Those that are not the defaults; all of them are in `ludic_run.json`.",
        f"```json\n{chosen}\n```",
    ]


def _inline(arguments: Mapping[str, Any]) -> str:
    text = json.dumps(arguments, ensure_ascii=False)
    return f"with `{text}`" if arguments else ""


def _versions(facts: RunFacts) -> list[str]:
    origin = facts.origin
    lines = [", ".join(f"{name} {found}" for name, found in origin.get("versions", {}).items())]
    if origin.get("started"):
        lines.append(f"Started on {str(origin['started'])[:10]}")
    if origin.get("command"):
        lines.append(f"Command: `{' '.join(origin['command'])}`")
    if git := origin.get("git"):
        lines.append(f"Commit {git['commit'][:12]}{', with changes' * bool(git['dirty'])}")
    lines = [f"- {line}" for line in lines if line]
    return ["## Versions", "\n".join(lines)] if lines else []
