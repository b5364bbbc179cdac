"""The model card: what was trained, on what, how it went, and with which versions.

It follows from the run folder alone, so that pushing the same run again changes nothing. It names
none of this machine's folders, servers and keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from ludic.errors import ConfigError
from ludic.eval import Estimate, EvalReport, Headline, headline_of
from ludic.eval.report import read_report
from ludic.runs.results.terminal import outcomes_of, read_curve
from ludic.runs.settings import check_run
from ludic.runs.storage import EVALUATIONS, RunFolder

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
    library, relation = ("peft", "adapter") if adapter else ("transformers", "finetune")
    lines = [f"library_name: {library}", "pipeline_tag: text-generation"]
    if base is not None:
        lines += [f"base_model: {base}", f"base_model_relation: {relation}"]
    lines += ["tags:", "- ludic", "- reinforcement-learning"]
    if facts is not None and facts.settings["training"]["steps"]:
        lines.append(f"- {facts.settings['algorithm']['name']}")
    return "\n".join(["---", *lines, "---"])


def _what(facts: RunFacts, base: str | None, adapter: bool, checkpoint: str | None) -> str:
    settings = facts.settings
    kind = "A LoRA adapter for" if adapter else "Trained from"
    model = f"`{base or settings['model']['name']}`"
    how = []
    if settings.get("sft"):
        how.append(f"{settings['sft']['steps']} supervised updates")
    if settings["training"]["steps"]:
        how.append(f"{settings['training']['steps']} updates of `{settings['algorithm']['name']}`")
    kinds = ", ".join(f"`{env['kind']}`" for env in settings["env"])
    text = f"{kind} {model} by Ludic (`ludic-rl`): "
    text += f"{', then '.join(how) or 'no updates'} on {kinds}, seed {settings['run']['seed']}."
    if checkpoint is not None:
        text += f" This is its checkpoint `{checkpoint}`."
    return text


def _figures(facts: RunFacts) -> list[str]:
    parts = []
    if facts.reports:
        parts += ["## Evaluation", _evaluation(facts.reports)]
    if facts.earlier:
        parts.append("These figures are of the whole run; this checkpoint is an earlier one.")
    rows = [f"| {name} | {value:,.4g} |" for name, value in facts.figures.items()]
    if rows:
        parts += ["## Training", "\n".join(["| | |", "|---|---|", *rows])]
    if facts.warnings:
        parts.append("\n".join(f"- **Warning:** {sentence}" for sentence in facts.warnings))
    return parts


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
                cells.append((percent if figure.is_rate else str)(figure.of(report)))
            rows.append("| " + " | ".join(cells) + " |")
    return "Held-out episodes, with 95 % intervals.\n\n" + "\n".join(rows)


def percent(rate: Estimate) -> str:
    """Returns a rate with its interval."""
    return f"{rate.value:.1%} [{rate.low:.1%}, {rate.high:.1%}]"


def _settings(facts: RunFacts) -> list[str]:
    data = [*facts.settings["env"], *facts.settings["eval"]["env"]]
    rows = []
    for env in data:
        arguments = json.dumps(env.get("kwargs") or {}, ensure_ascii=False)
        rows.append(f"- `{env['kind']}`" + (f" with `{arguments}`" if arguments != "{}" else ""))
    chosen = json.dumps(facts.chosen(), indent=2, ensure_ascii=False)
    return [
        "## Data",
        "\n".join(dict.fromkeys(rows)),
        "## Settings",
        "Those that are not the defaults; all of them are in `ludic_run.json`.",
        f"```json\n{chosen}\n```",
    ]


def _versions(facts: RunFacts) -> list[str]:
    origin = facts.origin
    lines = [", ".join(f"{name} {version}" for name, version in origin.get("versions", {}).items())]
    if origin.get("started"):
        lines.append(f"Started on {str(origin['started'])[:10]}")
    if origin.get("command"):
        lines.append(f"Command: `{' '.join(origin['command'])}`")
    if git := origin.get("git"):
        lines.append(f"Commit {git['commit'][:12]}{', with changes' * bool(git['dirty'])}")
    lines = [f"- {line}" for line in lines if line]
    return ["## Versions", "\n".join(lines)] if lines else []


_PRIVATE = {"servers", "server", "publish_address", "publish_port", "vllm_python", "folder"}
_PRIVATE |= {"api_key_env", "api_key_file", "machine", "run_file_folder"}
_PATH = re.compile(r"(?:~|(?<![\w.:/<-]))/(?:[^\s:=,\"']+/)*([^\s:=,\"'/]+)/?")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class RunFacts:
    """A run as its card states it."""

    name: str
    settings: Mapping[str, Any]
    """All of them, as in the run folder's `run.json`."""
    origin: Mapping[str, Any]
    reports: Mapping[str, EvalReport] = field(default_factory=dict)
    rewards: tuple[float, ...] = ()
    """The mean reward of each update."""
    figures: Mapping[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    earlier: bool = False
    """Whether the published checkpoint is not the run's last."""

    @staticmethod
    def of(folder: RunFolder, which: str | None = None) -> RunFacts:
        """Reads a run folder, of which `run.json` and `metrics.jsonl` suffice, for `which` of its
        models. What a run that was stopped did not come to is left out, as is what came after the
        cold start if that is published."""
        summary = folder.read_json("summary.json") if folder.has("summary.json") else {}
        stages = EVALUATIONS[:2] if which == "sft" else EVALUATIONS
        there = {s: folder.evals / f"{s}.json" for s in stages}
        _, rewards = read_curve(folder.metrics, "train/reward_mean")
        _, tokens = read_curve(folder.metrics, "train/completion_tokens")
        _, elapsed = read_curve(folder.metrics, "perf/elapsed_s")
        figures: dict[str, float] = {"updates": len(rewards)}
        if rewards:
            figures["mean reward, first ten updates"] = fmean(rewards[:10])
            figures["mean reward, last ten updates"] = fmean(rewards[-10:])
        if tokens:
            figures["completion tokens"] = sum(tokens)
        if elapsed:
            figures["seconds of training"] = elapsed[-1]
        settings = folder.read_json("run.json")
        return RunFacts(
            name=str(settings.get("run", {}).get("name", folder.path.name)),
            settings=in_public(settings),
            origin=in_public(folder.read_json("origin.json")) if folder.has("origin.json") else {},
            reports={s: read_report(path) for s, path in there.items() if path.is_file()},
            rewards=tuple(rewards),
            figures=figures,
            warnings=tuple(summary.get("warnings", ())),
        )

    @property
    def base_model(self) -> str | None:
        """The model that was trained, if it is one of the hub."""
        return hub_name(str(self.settings["model"].get("name", "")))

    def chosen(self) -> dict[str, Any]:
        """Returns the settings that are not the defaults."""
        usual = check_run({"env": {"kind": "usual"}}).plain()
        env = [{k: v for k, v in e.items() if v not in (None, {})} for e in self.settings["env"]]
        return {**_different(self.settings, usual), "env": env}


def hub_name(name: str) -> str | None:
    """Returns the name if it can be one on the hub."""
    return name if _HUB_NAME.fullmatch(name) and not Path(name).exists() else None


def in_public(value: Any) -> Any:
    """Returns settings without addresses, folders and the places of keys; a path is its last
    part."""
    if isinstance(value, Mapping):
        return {k: in_public(v) for k, v in value.items() if k not in _PRIVATE}
    if isinstance(value, (list, tuple)):
        return [in_public(item) for item in value]
    if isinstance(value, str):
        return "a server" if value.startswith(("http://", "https://")) else _PATH.sub(r"\1", value)
    return value


def _different(stated: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for key, value in stated.items():
        if key == "schema" or value in (None, usual.get(key)):
            continue
        if isinstance(value, Mapping) and isinstance(usual.get(key), Mapping):
            if inner := _different(value, usual[key]):
                changed[key] = inner
        else:
            changed[key] = value
    return changed


def check_repo(repo: str) -> None:
    """Raises if a name cannot be one on the hub."""
    if not _HUB_NAME.fullmatch(repo):
        raise ConfigError(f"{repo!r} is no name on the hub: give owner/name")
