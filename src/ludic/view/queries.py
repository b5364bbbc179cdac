"""Questions to a run's index: pages of the table, histograms, facets, neighbours, groups."""

from __future__ import annotations

import json
import math
import re
import sqlite3
from collections.abc import Mapping
from typing import Any

from ludic.view.folders import QueryError
from ludic.view.rows import COLUMNS

MOST_ROWS = 200
_SHOWN = ("n", "source", *COLUMNS)
_SORTS = {
    *("n", "id", "agent", "grp", "task", "env", "upd", "reward", "turns", "tokens"),
    *("truncation", "error", "outcome", "parse_failures", "forks", "cut", "tools", "weight"),
}
_EQUAL = {
    "agent": "agent",
    "env": "env",
    "task": "task",
    "source": "+source",  # nearly all have it: no index would help
    "outcome": "outcome",
    "group": "grp",
    "episode": "episode",
    "truncation": "truncation",
}
_FLAGS = {
    "error": "error != ''",
    "truncated": "truncated",
    "forks": "forks > 0",
    "parse_failures": "parse_failures > 0",
    "cut": "cut > 0",
    "tools": "tools > 0",
    "sub": "parent != ''",
    "trained": "EXISTS (SELECT 1 FROM trained WHERE trained.rollout = rollouts.id)",
}
_WEIGHT = "(SELECT avg(weight) FROM trained WHERE trained.rollout = rollouts.id)"
_RANGES = {
    **{"update": "upd", "reward": "reward", "turns": "turns", "tokens": "tokens"},
    "weight": _WEIGHT,
}
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
    for key, wanted in filters.items():
        name, _, bound = key.rpartition(".")
        if bound not in ("min", "max") or not wanted:
            continue
        number = finite(key, wanted)
        measure = _component(name) if name.startswith("component:") else _RANGES.get(name)
        if measure is not None:
            tests.append(f"{measure} {'>=' if bound == 'min' else '<='} ?")
            values.append(number)
    if words := search_words(filters.get("q", "")):
        tests.append("n IN (SELECT rowid FROM words WHERE words MATCH ?)")
        values.append(words)
    return " AND ".join(tests), values


def search_words(text: str) -> str:
    """What a person typed, as a query of FTS5: all of the words, the last one as far as it is
    typed; a part in quotation marks as it stands."""
    parts = re.findall(r'"([^"]*)"|(\S+)', text.replace("\0", " ")[:500])
    terms = []
    for number, (quoted, word) in enumerate(parts):
        piece = (quoted or word).replace('"', "").strip()
        if not any(c.isalnum() for c in piece):
            continue  # nothing of it is in the index
        last = number == len(parts) - 1 and word and not text.endswith(" ")
        terms.append(f'"{piece}"' + ("*" if last else ""))
    return " AND ".join(terms)


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
    return {"total": _count(db, filters, test, values), "rows": with_weights(db, rows)}


def with_weights(db: sqlite3.Connection, rows: list[sqlite3.Row]) -> list[dict[str, Any]]:
    """The rows as JSON, each with what the trainer made of it."""
    shown_rows = []
    for row in rows:
        shown = dict(row)
        shown["components"] = json.loads(row["components"]) if row["components"] else {}
        weight, count, updates = db.execute(
            "SELECT avg(weight), count(*), max(upd) FROM trained WHERE rollout = ?", (row["id"],)
        ).fetchone()
        shown |= {"weight": weight, "trained": count > 0, "trained_at": updates}
        shown_rows.append(shown)
    return shown_rows


def facets(db: sqlite3.Connection) -> dict[str, Any]:
    """What there is to filter by: the values of each column, with how many rollouts have them."""
    query = "SELECT value, count FROM facets WHERE name = ? ORDER BY count DESC LIMIT ?"
    values: dict[str, Any] = {
        column: [list(row) for row in db.execute(query, (column, _MOST_VALUES))]
        for column in _FACETS
    }
    names = db.execute("SELECT value FROM facets WHERE name = 'component' ORDER BY rowid")
    trained = db.execute("SELECT 1 FROM trained LIMIT 1").fetchone() is not None
    return values | {"components": [name for (name,) in names][:_MOST_VALUES], "trained": trained}


def histogram(
    db: sqlite3.Connection, filters: Filters, *, columns: int = 60, bins: int = 18
) -> dict[str, Any]:
    """How many rollouts have which reward, update by update."""
    test, values = where(filters)
    test += " AND upd IS NOT NULL AND reward IS NOT NULL"
    low, high, first, last = db.execute(
        f"SELECT min(reward), max(reward), min(upd), max(upd) FROM rollouts WHERE {test}", values
    ).fetchone()
    if low is None:
        return {"cells": [], "columns": 0}
    few = db.execute(
        f"SELECT DISTINCT reward FROM rollouts WHERE {test} LIMIT ?", (*values, bins + 1)
    ).fetchall()
    per = max(1, math.ceil((last - first + 1) / columns))
    if len(few) <= bins:  # each value in the middle of its row
        bins = len(few)
        half = (high - low) / max(bins - 1, 1) / 2 or 0.5
        low, high = low - half, high + half
    width = (high - low) / bins
    cells = db.execute(
        "SELECT (upd - ?) / ?, min(CAST((reward - ?) / ? AS INTEGER), ?), count(*), sum(reward) "
        f"FROM rollouts WHERE {test} GROUP BY 1, 2",
        (first, per, low, width, bins - 1, *values),
    ).fetchall()
    counts: dict[int, list[float]] = {}
    for column, _, count, total in cells:
        mine = counts.setdefault(column, [0, 0.0])
        mine[0] += count
        mine[1] += total
    return {
        "first": first,
        "per": per,
        "columns": (last - first) // per + 1,
        "low": low,
        "high": high,
        "bins": bins,
        "cells": [list(cell)[:3] for cell in cells],
        "means": [[column, total / count] for column, (count, total) in sorted(counts.items())],
    }


def neighbours(
    db: sqlite3.Connection, identity: str, filters: Filters, *, sort: str, descending: bool
) -> dict[str, Any]:
    """The rollouts before and after this one, in the order of the table."""
    db.execute("BEGIN")  # all that is asked here is about one moment
    try:
        return _neighbours(db, identity, filters, sort, descending)
    finally:
        db.rollback()


def _neighbours(
    db: sqlite3.Connection, identity: str, filters: Filters, sort: str, descending: bool
) -> dict[str, Any]:
    test, values = where(filters)
    key, way = _key(sort), ("<", ">")[descending]
    here = db.execute(
        f"SELECT {key}, n FROM rollouts WHERE id = ? AND {test} ORDER BY n DESC LIMIT 1",
        (identity, *values),
    ).fetchone()
    if here is None:
        return {"place": None, "previous": None, "following": None, "total": None}
    value, n = here
    if key == "n":
        before, arguments = f"n {way} ?", [n]
    elif value is None:  # those without a value come last
        before, arguments = f"({key} IS NOT NULL OR n {way} ?)", [n]
    else:
        before = f"({key} {way} ? OR ({key} = ? AND n {way} ?))"
        arguments = [value, value, n]
    earlier = db.execute(
        f"SELECT count(*) FROM rollouts WHERE {test} AND {before}", (*values, *arguments)
    ).fetchone()[0]
    rows = db.execute(
        f"SELECT id FROM rollouts WHERE {test} ORDER BY {_order(sort, descending)} "
        "LIMIT 3 OFFSET ?",
        (*values, max(earlier - 1, 0)),
    ).fetchall()
    ids = [None] * (earlier == 0) + [row["id"] for row in rows] + [None]
    total = _count(db, filters, test, values)
    return {"place": earlier + 1, "previous": ids[0], "following": ids[2], "total": total}


def members(db: sqlite3.Connection, column: str, value: str, most: int = 64) -> list[Any]:
    """Rollouts that share a group, an episode, or a parent."""
    if column not in ("grp", "episode", "parent") or not value:
        return []
    rows = db.execute(
        f"SELECT {', '.join(_SHOWN)} FROM rollouts WHERE {column} = ? ORDER BY n LIMIT ?",
        (value, most),
    )
    return with_weights(db, rows.fetchall())


def _count(db: sqlite3.Connection, filters: Filters, test: str, values: list[Any]) -> int:
    """How many rollouts the filters leave; without a scan where only the source is chosen."""
    chosen = filters.get("source") or "all"
    if not any(value for name, value in filters.items() if name != "source"):
        sources = dict(
            db.execute("SELECT value, count FROM facets WHERE name = 'source'").fetchall()
        )
        return int(sum(sources.values()) if chosen == "all" else sources.get(chosen, 0))
    return int(db.execute(f"SELECT count(*) FROM rollouts WHERE {test}", values).fetchone()[0])


def _key(sort: str) -> str:
    if sort.startswith("component:"):
        return _component(sort)
    if sort not in _SORTS:
        raise QueryError(f"the table cannot be sorted by {sort!r}")
    return _WEIGHT if sort == "weight" else sort


def _order(sort: str, descending: bool) -> str:
    key, way = _key(sort), "DESC" if descending else "ASC"
    return f"n {way}" if key == "n" else f"{key} IS NULL, {key} {way}, n {way}"


def _component(name: str) -> str:
    key = name.removeprefix("component:")
    if not re.fullmatch(r"[\w./ -]{1,100}", key):
        raise QueryError(f"{key!r} is not the name of a reward component")
    return f"json_extract(components, '$.\"{key}\"')"


def finite(key: str, text: str) -> float:
    """The number that `text` is."""
    try:
        number = float(text)
    except ValueError:
        raise QueryError(f"{key}: {text[:80]!r} is not a number") from None
    if not math.isfinite(number):
        raise QueryError(f"{key}: {text[:80]!r} is not a finite number")
    return number


def count(key: str, text: str) -> int:
    """The whole number that `text` is; it has few enough digits for SQLite to hold it."""
    if not re.fullmatch(r"[0-9]{1,15}", text):
        raise QueryError(f"{key}: {text[:80]!r} is not a whole number of 0 or more")
    return int(text)
