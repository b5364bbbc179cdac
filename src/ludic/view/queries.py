"""Questions to a run's index: pages of the table, histograms, facets, neighbours, groups."""

from __future__ import annotations

import json
import math
import re
import sqlite3
from collections.abc import Mapping
from typing import Any

from ludic.view.folders import ViewError

MOST_ROWS = 200
_SHOWN = (
    *("n", "id", "episode", "agent", "grp", "task", "parent", "env", "source", "upd", "reward"),
    *("turns", "tokens", "terminated", "truncated", "truncation", "error", "outcome"),
    *("components", "parse_failures", "forks", "cut", "tools"),
)
_SORTS = {
    *("n", "id", "agent", "grp", "task", "env", "upd", "reward", "turns", "tokens"),
    *("truncation", "error", "outcome", "parse_failures", "forks", "cut", "tools", "weight"),
}
_EQUAL = {
    "agent": "agent",
    "env": "env",
    "task": "task",
    "source": "source",
    "outcome": "outcome",
    "group": "grp",
    "episode": "episode",
    "truncation": "truncation",
}
_RANGES = {"update": "upd", "reward": "reward", "turns": "turns", "tokens": "tokens"}
_FLAGS = {
    "error": "error != ''",
    "truncated": "truncated",
    "forks": "forks > 0",
    "parse_failures": "parse_failures > 0",
    "cut": "cut > 0",
    "tools": "tools > 0",
    "sub": "parent != ''",
}
_WEIGHT = "(SELECT avg(weight) FROM trained WHERE trained.rollout = rollouts.id)"
_TRAINED = "EXISTS (SELECT 1 FROM trained WHERE trained.rollout = rollouts.id)"
_FACETS = ("source", "agent", "env", "outcome", "truncation")
_MOST_VALUES = 60

Filters = Mapping[str, str]


def where(filters: Filters) -> tuple[str, list[Any]]:
    """The condition that the filters of an address stand for, and its arguments."""
    tests, values = ["1"], list[Any]()
    for name, column in _EQUAL.items():
        if (wanted := filters.get(name)) and (name, wanted) != ("source", "all"):
            tests.append(f"{column} = ?")
            values.append(wanted)
    for name, test in _FLAGS.items():
        if (wanted := filters.get(name)) in ("yes", "no"):
            tests.append(test if wanted == "yes" else f"NOT ({test})")
    if (wanted := filters.get("trained")) in ("yes", "no"):
        tests.append(_TRAINED if wanted == "yes" else f"NOT {_TRAINED}")
    for key, wanted in filters.items():
        name, _, bound = key.rpartition(".")
        if bound not in ("min", "max") or not wanted:
            continue
        number = _number(key, wanted)
        sign = ">=" if bound == "min" else "<="
        if name in _RANGES:
            tests.append(f"{_RANGES[name]} {sign} ?")
            values.append(number)
        elif name == "weight":
            tests.append(f"{_WEIGHT} {sign} ?")
            values.append(number)
        elif name.startswith("component:"):
            tests.append(f"{_component(name)} {sign} ?")
            values.append(number)
    if words := search_words(filters.get("q", "")):
        tests.append("n IN (SELECT rowid FROM words WHERE words MATCH ?)")
        values.append(words)
    return " AND ".join(tests), values


def search_words(text: str) -> str:
    """What a person typed, as a query of FTS5: all of the words, the last one as far as it is
    typed; a part in quotation marks as it stands."""
    parts = re.findall(r'"([^"]*)"|(\S+)', text.replace("\0", " ")[:500])
    found = []
    for number, (quoted, word) in enumerate(parts):
        piece = (quoted or word).replace('"', "").strip()
        if not any(c.isalnum() for c in piece):
            continue  # nothing of it is in the index
        last = number == len(parts) - 1 and word and not text.endswith(" ")
        found.append(f'"{piece}"' + ("*" if last else ""))
    return " AND ".join(found)


def page(
    db: sqlite3.Connection,
    filters: Filters,
    *,
    sort: str = "n",
    descending: bool = True,
    offset: int = 0,
    limit: int = 50,
) -> dict[str, Any]:
    """One page of the table, and how many rollouts the filters leave."""
    test, values = where(filters)
    order = _order(sort, descending)
    rows = db.execute(
        f"SELECT {', '.join(_SHOWN)} FROM rollouts WHERE {test} ORDER BY {order} LIMIT ? OFFSET ?",
        (*values, max(1, min(limit, MOST_ROWS)), max(0, offset)),
    ).fetchall()
    total = db.execute(f"SELECT count(*) FROM rollouts WHERE {test}", values).fetchone()[0]
    return {"total": total, "rows": with_weights(db, rows)}


def with_weights(db: sqlite3.Connection, rows: list[sqlite3.Row]) -> list[dict[str, Any]]:
    """The rows as JSON, each with what the trainer made of it."""
    found = []
    for row in rows:
        shown = {k: row[k] for k in row.keys() if k not in ("block", "line")}  # noqa: SIM118
        shown["components"] = json.loads(row["components"]) if row["components"] else {}
        weight, count, updates = db.execute(
            "SELECT avg(weight), count(*), max(upd) FROM trained WHERE rollout = ?", (row["id"],)
        ).fetchone()
        shown |= {"weight": weight, "trained": count > 0, "trained_at": updates}
        found.append(shown)
    return found


def facets(db: sqlite3.Connection) -> dict[str, Any]:
    """What there is to filter by: the values of each column, with how many rollouts have them."""
    found: dict[str, Any] = {}
    for column in _FACETS:
        rows = db.execute(
            f"SELECT {column}, count(*) FROM rollouts WHERE {column} != '' GROUP BY 1 "
            f"ORDER BY 2 DESC LIMIT {_MOST_VALUES}"
        )
        found[column] = [[value, count] for value, count in rows]
    sample = db.execute("SELECT DISTINCT components FROM rollouts LIMIT 200")
    names = dict.fromkeys(k for (text,) in sample if text for k in json.loads(text))
    low, high = db.execute("SELECT min(upd), max(upd) FROM rollouts").fetchone()
    trained = db.execute("SELECT 1 FROM trained LIMIT 1").fetchone() is not None
    return found | {"components": list(names), "updates": [low, high], "trained": trained}


def histogram(
    db: sqlite3.Connection, filters: Filters, *, columns: int = 60, bins: int = 18
) -> dict[str, Any]:
    """How many rollouts have which reward, update by update."""
    test, values = where(filters)
    test += " AND upd IS NOT NULL AND reward IS NOT NULL"
    low, high, first, last, distinct = db.execute(
        "SELECT min(reward), max(reward), min(upd), max(upd), count(DISTINCT reward) "
        f"FROM rollouts WHERE {test}",
        values,
    ).fetchone()
    if low is None:
        return {"cells": [], "columns": 0}
    per = max(1, math.ceil((last - first + 1) / columns))
    if distinct <= bins:  # a few values: each in the middle of its row
        bins = distinct
        half = (high - low) / max(distinct - 1, 1) / 2 or 0.5
        low, high = low - half, high + half
    width = (high - low) / bins
    cells = db.execute(
        f"SELECT (upd - ?) / ?, min(CAST((reward - ?) / ? AS INTEGER), ?), count(*) "
        f"FROM rollouts WHERE {test} GROUP BY 1, 2",
        (first, per, low, width, bins - 1, *values),
    ).fetchall()
    means = db.execute(
        f"SELECT (upd - ?) / ?, avg(reward) FROM rollouts WHERE {test} GROUP BY 1",
        (first, per, *values),
    ).fetchall()
    return {
        "first": first,
        "per": per,
        "columns": (last - first) // per + 1,
        "low": low,
        "high": high,
        "bins": bins,
        "cells": [list(cell) for cell in cells],
        "means": [list(mean) for mean in means],
    }


def neighbours(
    db: sqlite3.Connection, identity: str, filters: Filters, *, sort: str, descending: bool
) -> dict[str, Any]:
    """The rollouts before and after this one, in the order of the table."""
    test, values = where(filters)
    order = _order(sort, descending)
    row = db.execute(
        "SELECT place, previous, following, total FROM (SELECT id, row_number() OVER w AS place, "
        "lag(id) OVER w AS previous, lead(id) OVER w AS following, count(*) OVER () AS total "
        f"FROM rollouts WHERE {test} WINDOW w AS (ORDER BY {order})) WHERE id = ?",
        (*values, identity),
    ).fetchone()
    return dict(row) if row else {"place": None, "previous": None, "following": None}


def members(db: sqlite3.Connection, column: str, value: str, most: int = 64) -> list[Any]:
    """Rollouts that share a group, an episode, or a parent."""
    if column not in ("grp", "episode", "parent") or not value:
        return []
    rows = db.execute(
        f"SELECT {', '.join(_SHOWN)} FROM rollouts WHERE {column} = ? ORDER BY n LIMIT ?",
        (value, most),
    )
    return with_weights(db, rows.fetchall())


def _order(sort: str, descending: bool) -> str:
    way = "DESC" if descending else "ASC"
    if sort.startswith("component:"):
        column = _component(sort)
    elif sort in _SORTS:
        column = _WEIGHT if sort == "weight" else sort
    else:
        raise ViewError(f"the table cannot be sorted by {sort!r}")
    if column == "n":
        return f"n {way}"
    return f"{column} IS NULL, {column} {way}, n {way}"


def _component(name: str) -> str:
    key = name.removeprefix("component:")
    if not re.fullmatch(r"[\w./ -]{1,100}", key):
        raise ViewError(f"{key!r} is no name of a reward's component")
    return f"json_extract(components, '$.\"{key}\"')"


def _number(key: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ViewError(f"{key}: {text!r} is not a number") from None
    if not math.isfinite(number):
        raise ViewError(f"{key}: {text!r} is not a finite number")
    return number
