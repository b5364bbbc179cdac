"""Runs at a glance: state, progress, headline figures, the settings in which they differ, and the
reports of their evaluations; and the processes of a run over Redis."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from re import fullmatch
from typing import Any

from ludic.errors import LudicError
from ludic.eval.report import EpisodeResult, EvalReport, leading_tests
from ludic.view.curves import CurveStore
from ludic.view.folders import RunPlace, ViewError, state_of

_HEADLINES = ("train/reward_mean", "train/loss", "train/entropy", "perf/tokens_per_s")
_NOT_SETTINGS = ("run.name", "run.folder", "schema")
_FILES = {"config": "run.json", "origin": "origin.json", "summary": "summary.json"}
_SPARK_POINTS = 60
_SCHEMA = 1
"""The newest schema of run.json that is shown whole."""


def card(run: RunPlace, curves: CurveStore) -> dict[str, Any]:
    """What the list of runs shows of one."""
    problems: list[str] = []
    config, origin, summary = (_read(run, name, problems) for name in _FILES.values())
    schema = config.get("schema")
    if isinstance(schema, int) and schema > _SCHEMA:
        problems.append(
            f"run.json has schema {schema}, newer than {_SCHEMA}: some settings may not be shown"
        )
    if not config:
        problems.append("no run.json: only what else is in the folder is shown")
    progress, state = curves.progress(run), state_of(run)
    problems += (f"metrics.jsonl: {what}" for what in _metric_problems(run, progress, state))
    last = progress["last"]
    flat = flattened(config)
    return {
        "name": run.name,
        "state": state,
        "started": origin.get("started"),
        "step": last.get("train/step"),
        "steps": flat.get("training.steps"),
        "model": flat.get("model.name"),
        "env": ", ".join(_kinds(config.get("env"))),
        "algorithm": flat.get("algorithm.name"),
        "figures": {key: last[key] for key in _HEADLINES if key in last},
        "spark": [[p[0], p[1]] for p in curves.curve(run, "train/reward_mean", most=_SPARK_POINTS)],
        "headline": _headline(summary),
        "problems": problems,
        "settings": flat,
        "reports": run.reports(),
    }


def details(run: RunPlace, curves: CurveStore) -> dict[str, Any]:
    """What the page of one run shows besides its rollouts."""
    files = {key: _read(run, name, []) for key, name in _FILES.items()}
    return {**card(run, curves), "keys": curves.keys(run), **files}


def differing(cards: Iterable[Mapping[str, Any]]) -> list[str]:
    """The settings that are not the same in all runs."""
    settings = [card["settings"] for card in cards if card["settings"]]
    keys = dict.fromkeys(key for each in settings for key in each if key not in _NOT_SETTINGS)

    def values(key: str) -> set[str]:
        return {json.dumps(each[key], default=str) if key in each else "" for each in settings}

    return [key for key in keys if len(values(key)) > 1]


def flattened(config: Any, prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dotted keys; a list that is not of tables stays one value."""
    flat: dict[str, Any] = {}
    for key, value in config.items() if isinstance(config, dict) else enumerate(config):
        tables = isinstance(value, list) and value and all(isinstance(v, dict) for v in value)
        if (isinstance(value, dict) and value) or tables:
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def fingerprint(paths: Iterable[Path]) -> str:
    """Changes whenever one of the files does."""
    parts = []
    for path in paths:
        try:
            stat = path.stat()
            parts.append(f"{stat.st_size:x}.{stat.st_mtime_ns:x}")
        except OSError:
            parts.append("-")
    return "/".join(parts)


def _metric_problems(run: RunPlace, progress: Mapping[str, Any], state: str) -> Iterator[str]:
    """What is wrong with a run's metrics."""
    if bad := progress["bad"]:
        yield f"{bad} lines cannot be read and are left out"
    if gaps := progress["gaps"]:
        yield f"{gaps} steps between the first and the last have no line"
    if progress["cut"] and state != "running":
        yield "its last line is cut"
    last, saved = progress["last"].get("train/step"), _saved_step(run)
    if last is not None and saved is not None and last < saved:
        yield f"it ends at step {last:g}, and there is a checkpoint of step {saved}: it was cut"


def _saved_step(run: RunPlace) -> int | None:
    """The step of the newest checkpoint, which is never ahead of the metrics."""
    try:
        pointer = run.confined(run.path / "checkpoints" / "rl" / "latest")
        if not pointer.is_file():
            return None
        with pointer.open("rb") as file:
            match = fullmatch(rb"step-(\d{1,12})", file.read(64).strip())
    except (OSError, ViewError):
        return None
    return int(match[1]) if match else None


def _headline(summary: Mapping[str, Any]) -> dict[str, Any] | None:
    name, kind = summary.get("headline"), summary.get("headline_kind")
    if not isinstance(name, str):
        return None
    if kind is None and name == "success":
        name = kind = "reward"  # older runs call any reward above 0 a success
    stages = {
        key.removeprefix(f"{name}_"): value
        for key, value in summary.items()
        if key.startswith(f"{name}_") and isinstance(value, dict)
    }
    reward = kind == "reward"
    return {"name": "mean reward" if reward else name, "rate": not reward, "stages": stages}


def _kinds(envs: Any) -> list[str]:
    tables = envs if isinstance(envs, list) else [envs]
    return [str(table["kind"]) for table in tables if isinstance(table, dict) and "kind" in table]


def _read(run: RunPlace, name: str, problems: list[str]) -> dict[str, Any]:
    try:
        data = run.read_json(name)
    except ViewError as exc:
        problems.append(str(exc))
        return {}
    return data if isinstance(data, dict) else {}


MOST_EPISODES = 2000


def read_report(run: RunPlace, name: str) -> EvalReport:
    """A report of the run; its name must be one that the run has."""
    if name not in run.reports():
        raise ViewError(f"{run.name} has no evaluation {name!r}")
    data = run.read_json(f"eval/{name}.json")
    try:
        return EvalReport.from_dict(data)
    except (KeyError, TypeError, ValueError) as exc:
        raise ViewError(f"eval/{name}.json is not a report of this version: {exc!r}") from exc


def figures(report: EvalReport) -> dict[str, Any]:
    """The report's figures with their intervals."""
    lead, rates = report.headline, report.rates()
    if lead.kind == "outcome":
        rates = {lead.key: lead.of(report), **rates}
        rates.pop("success", None)  # which is the same here
    return {
        "name": report.name,
        "episodes": len(report.by_episode()),
        "headline": lead.key,
        "reward": asdict(report.reward),
        "rates": {name: asdict(rate) for name, rate in rates.items()},
        "envs": {
            env: {"rate": lead.is_rate, **asdict(lead.of(part))}
            for env, part in report.envs().items()
        },
    }


def compared(a: EvalReport, b: EvalReport) -> dict[str, Any]:
    """Both reports, the paired test where they have the same seeds, and every pair of episodes,
    those that differ most first."""
    test, why = {}, None
    try:
        test = {
            name: {**asdict(result.difference), "p": result.p_value}
            for name, result in leading_tests(a, b).items()
        }
    except LudicError as exc:
        why = str(exc)
    pairs = sorted(_pairs(a, b), key=lambda pair: -abs(pair["difference"] or 0))
    return {
        "a": figures(a),
        "b": figures(b),
        "test": test,
        "why_not": why,
        "pairs": pairs[:MOST_EPISODES],
        "total": len(pairs),
        "better": sum((p["difference"] or 0) > 0 for p in pairs),
        "worse": sum((p["difference"] or 0) < 0 for p in pairs),
    }


def _pairs(a: EvalReport, b: EvalReport) -> list[dict[str, Any]]:
    left, right = _by_seed(a), _by_seed(b)
    pairs = {key: (left.get(key), right.get(key)) for key in [*left, *right]}
    return [
        {
            "seed": None if seed is None else str(seed),
            "agent": agent,
            "a": _shown(x),
            "b": _shown(y),
            "difference": y.reward - x.reward if x and y else None,
        }
        for (seed, agent, _), (x, y) in pairs.items()
    ]


def _by_seed(report: EvalReport) -> dict[tuple[int | None, str, int], EpisodeResult]:
    seen: Counter[tuple[int | None, str]] = Counter()
    episodes = {}
    for episode in report.episodes:
        key = (episode.env_seed, episode.agent_id)
        episodes[(*key, seen[key])] = episode
        seen[key] += 1
    return episodes


def _shown(episode: EpisodeResult | None) -> dict[str, Any] | None:
    if episode is None:
        return None
    names = ("reward", "success", "outcome", "turns", "tokens", "error", "truncation")
    return {name: getattr(episode, name) for name in names} | {"task": episode.task_key}


ADDRESS = "pipeline.json"
_ANSWER_S = 1.0


def processes(run: RunPlace) -> dict[str, Any] | None:
    """Returns the rows of a run's processes and what is between them; None for a run that has no
    Redis at the moment, or whose address others could have written."""
    file = run.path / ADDRESS
    try:
        stat = os.stat(run.confined(file)) if file.is_file() else None
    except (LudicError, OSError):
        return None
    if stat is None or stat.st_uid != os.getuid() or stat.st_mode & 0o077:
        return None
    address = run.read_json(ADDRESS)
    try:
        from ludic.pipeline.status import COLUMNS, process_rows, queue_lines, read_status
        from ludic.pipeline.store import PipelineConfig, Store

        config = PipelineConfig(
            address["url"], address["name"], patience_s=_ANSWER_S, call_s=_ANSWER_S
        )
        with closing(Store(config)) as store:
            status = read_status(store)
    except (LudicError, KeyError, TypeError, ValueError) as exc:
        return {"problem": f"the run's Redis cannot be asked: {exc}"}
    return {"columns": COLUMNS, "rows": process_rows(status), "queue": queue_lines(status)}
