"""Reports of evaluations, alone and two against each other."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ludic.errors import LudicError
from ludic.eval.report import EpisodeResult, EvalReport, leading_tests
from ludic.view.folders import RunPlace, ViewError

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
    pairs = _pairs(a, b)
    pairs.sort(key=lambda pair: -abs(pair["difference"] or 0))
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
    found = []
    for key in dict.fromkeys([*left, *right]):
        x, y = left.get(key), right.get(key)
        found.append(
            {
                "seed": None if key[0] is None else str(key[0]),
                "agent": key[1],
                "a": _shown(x),
                "b": _shown(y),
                "difference": y.reward - x.reward if x and y else None,
            }
        )
    return found


def _by_seed(report: EvalReport) -> dict[tuple[int | None, str, int], EpisodeResult]:
    seen: dict[tuple[int | None, str], int] = {}
    found = {}
    for episode in report.episodes:
        key = (episode.env_seed, episode.agent_id)
        found[(*key, seen.get(key, 0))] = episode
        seen[key] = seen.get(key, 0) + 1
    return found


def _shown(episode: EpisodeResult | None) -> dict[str, Any] | None:
    if episode is None:
        return None
    return {
        "reward": episode.reward,
        "success": episode.success,
        "outcome": episode.outcome,
        "turns": episode.turns,
        "tokens": episode.tokens,
        "error": episode.error,
        "truncation": episode.truncation,
        "task": episode.task_key,
    }
