"""The model card: what was trained, on what, how it went, and with which versions.

It follows from the run folder alone, so that pushing the same run again changes nothing. It names
none of this machine's folders, servers and keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from ludic.errors import ConfigError
from ludic.eval import Estimate, EvalReport, Headline, headline_of
from ludic.eval.report import read_report
from ludic.runs.results.terminal import outcomes_of, read_curve
from ludic.runs.settings import check_run
from ludic.runs.storage import EVALUATIONS, RunFolder

_TEMPLATE = Path(__file__).with_name("card.md.jinja").read_text(encoding="utf-8")


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
    from jinja2 import Environment

    environment = Environment(trim_blocks=True, keep_trailing_newline=True)
    environment.filters["json"] = partial(json.dumps, indent=2, ensure_ascii=False)
    return environment.from_string(_TEMPLATE).render(
        facts=facts,
        repo=repo,
        revision=revision,
        adapter=adapter,
        base=base_model or (facts.base_model if facts else None),
        checkpoint=checkpoint,
        evaluation=evaluation,
    )


def evaluation(reports: Mapping[str, EvalReport]) -> list[list[str]]:
    """Returns the table of a run's figures, its heading first."""
    lead = headline_of(reports.values())
    others = (Headline("outcome", name) for name in outcomes_of(reports.values()))
    figures = dict.fromkeys([lead, *others, Headline("reward")])
    rows = [["stage", "episodes", *(figure.name for figure in figures)]]
    for stage, whole in reports.items():
        for part, report in whole.parts().items():
            name = stage.replace("_", " ") + (f", {part}" if part else "")
            shown = ((percent if f.is_rate else str)(f.of(report)) for f in figures)
            rows.append([name, str(len(report.by_episode())), *shown])
    return rows


def percent(rate: Estimate) -> str:
    """Returns a rate with its interval."""
    return f"{rate.value:.1%} [{rate.low:.1%}, {rate.high:.1%}]"


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
        files = {s: folder.evals / f"{s}.json" for s in stages}
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
            reports={s: read_report(path) for s, path in files.items() if path.is_file()},
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

    def data(self) -> list[str]:
        """Returns a line for each environment."""
        lines = []
        for env in (*self.settings["env"], *self.settings["eval"]["env"]):
            arguments = json.dumps(env.get("kwargs") or {}, ensure_ascii=False)
            lines.append(f"- `{env['kind']}`" + f" with `{arguments}`" * (arguments != "{}"))
        return list(dict.fromkeys(lines))

    def versions(self) -> list[str]:
        """Returns where the run came from: versions, date, command and commit."""
        origin, packages = self.origin, self.origin.get("versions", {}).items()
        lines = [", ".join(f"{name} {version}" for name, version in packages)]
        if origin.get("started"):
            lines.append(f"Started on {str(origin['started'])[:10]}")
        if origin.get("command"):
            lines.append(f"Command: `{' '.join(origin['command'])}`")
        if git := origin.get("git"):
            lines.append(f"Commit {git['commit'][:12]}{', with changes' * bool(git['dirty'])}")
        return [line for line in lines if line]


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
        raise ConfigError(f"{repo!r} is not a name on the hub: give owner/name")
