"""The web application: its pages are files of this package, its data is JSON."""

from __future__ import annotations

import json
import math
import mimetypes
import re
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

try:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route
except ImportError as exc:
    from ludic.errors import MissingExtraError

    raise MissingExtraError("starlette", "view") from exc

from ludic.errors import LudicError
from ludic.view import overview, queries
from ludic.view.curves import STAGES, CurveStore
from ludic.view.export import rollout_html
from ludic.view.folders import Folders, QueryError, RunPlace, state_of
from ludic.view.index import Indexes, RunIndex
from ludic.view.overview import processes
from ludic.view.rollout_page import group_page, rollout_page, texts_of
from ludic.view.security import LOOPBACK, Guard

MOST_CURVES = 64
_FIRST_INDEX_S = 10.0
_KINDS = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_CONTROL = ("run", "sort", "order", "offset", "limit", "id")


class View:
    """What the pages ask for. Every method is called in a worker thread."""

    def __init__(self, roots: Iterable[Path]) -> None:
        self.folders = Folders(list(roots))
        self.indexes, self.curves = Indexes(), CurveStore()

    def runs(self, _: Request) -> Any:
        """All runs, and in which settings they differ."""
        cards = []
        for run in self.folders.runs().values():
            try:
                cards.append(overview.card(run, self.curves))
            except (LudicError, OSError) as exc:
                cards.append({"name": run.name, "problems": [str(exc)], "settings": {}})
        different = overview.differing(cards)
        for each in cards:
            each["settings"] = {k: v for k, v in each["settings"].items() if k in different}
        return {
            "runs": cards,
            "differing": different,
            "problems": self.folders.problems,
            "roots": [root.name or str(root) for root in self.folders.roots],
        }

    def run(self, request: Request) -> Any:
        """One run: settings, origin, metrics that there are, evaluations."""
        run = self._run(request)
        reports = {}
        for name in run.reports():
            try:
                reports[name] = overview.figures(overview.read_report(run, name))
            except LudicError as exc:
                reports[name] = {"name": name, "problem": str(exc)}
        more = {"figures_of_reports": reports, "processes": processes(run)}
        return overview.details(run, self.curves) | more

    def state(self, request: Request) -> Any:
        """A text that changes when something did; polled by the pages."""
        if not request.query_params.get("run"):
            runs = self.folders.runs()
            paths = [r.path / name for r in runs.values() for name in ("metrics.jsonl", ".lock")]
            return {"version": f"{len(runs)}:{overview.fingerprint(paths)}"}
        run = self._run(request)
        index = self.indexes.of(run)
        with index.reading() as db:
            rows = db.execute("SELECT coalesce(sum(rows), 0) FROM files").fetchone()[0]
            rollouts = db.execute("SELECT coalesce(max(n), 0) FROM rollouts").fetchone()[0]
            notes = [dict(note) for note in db.execute("SELECT * FROM notes")]
        names = [*STAGES.values(), "summary.json", "run.json", "eval"]
        files = overview.fingerprint(run.path / name for name in names)
        return {
            "version": f"{rows}:{files}",
            "state": state_of(run),
            "rollouts": rollouts,
            "progress": index.progress,
            "notes": notes,
            "error": self.indexes.errors.get(run.path),
        }

    def curve(self, request: Request) -> Any:
        """Points of one or more metrics of one or more runs."""
        query = request.query_params
        ends = {k: queries.finite(k, v) for k in ("low", "high") if (v := query.get(k))}
        most = max(2, min(_count(request, "most", 400), 2000))
        wanted = [(name, key) for name in query.getlist("run") for key in query.getlist("key")]
        if len(wanted) > MOST_CURVES:
            raise QueryError(f"{len(wanted)} curves at once; at most {MOST_CURVES} can be drawn")
        return [
            {
                "run": name,
                "key": key,
                "points": self.curves.curve(self.folders.run(name), key, most=most, **ends),
            }
            for name, key in wanted
        ]

    def rollouts(self, request: Request) -> Any:
        """One page of the table."""
        offset, limit = _count(request, "offset", 0), _count(request, "limit", 50)
        with self.indexes.of(self._run(request)).reading() as db:
            return queries.page(
                db, _filters(request), **_order(request), offset=offset, limit=limit
            )

    def facets(self, request: Request) -> Any:
        """What the table can be filtered by."""
        with self.indexes.of(self._run(request)).reading() as db:
            return queries.facets(db)

    def histogram(self, request: Request) -> Any:
        """Rewards over updates."""
        with self.indexes.of(self._run(request)).reading() as db:
            return queries.histogram(db, _filters(request))

    def neighbours(self, request: Request) -> Any:
        """What comes before and after a rollout in the table."""
        identity = request.query_params.get("id", "")
        with self.indexes.of(self._run(request)).reading() as db:
            return queries.neighbours(db, identity, _filters(request), **_order(request))

    def rollout(self, request: Request) -> Any:
        """One rollout with its tokens."""
        run = self._run(request)
        with self._whole(run).reading() as db:
            return rollout_page(run, db, request.query_params.get("id", ""), texts_of(run))

    def group(self, request: Request) -> Any:
        """The attempts of a group."""
        run = self._run(request)
        with self._whole(run).reading() as db:
            return group_page(run, db, request.query_params.get("id", ""))

    def evaluations(self, _: Request) -> Any:
        """The evaluations of all runs."""
        return [
            {"run": run.name, "reports": reports}
            for run in self.folders.runs().values()
            if (reports := run.reports())
        ]

    def compare(self, request: Request) -> Any:
        """Two evaluations, episode by episode."""
        query = request.query_params
        sides = []
        for side in ("a", "b"):
            run = self.folders.run(query.get(f"{side}_run", ""))
            sides.append(overview.read_report(run, query.get(side, "")))
        return overview.compared(*sides)

    def _whole(self, run: RunPlace) -> RunIndex:
        """The run's index. A link to one rollout may be the first that is asked for, so this waits
        a while for what was there to be indexed."""
        index = self.indexes.of(run)
        index.complete.wait(_FIRST_INDEX_S)
        return index

    def _run(self, request: Request) -> RunPlace:
        return self.folders.run(request.query_params.get("run", ""))


def make_app(
    roots: Iterable[Path], *, token: str, hosts: Iterable[str] = LOOPBACK
) -> Starlette | Guard:
    """The application behind its guard."""
    view = View(roots)
    names = (
        *("runs", "run", "state", "curve", "rollouts", "facets", "histogram", "neighbours"),
        *("rollout", "group", "evaluations", "compare"),
    )
    routes = [Route(f"/api/{name}", _json(getattr(view, name))) for name in names]

    @asynccontextmanager
    async def lifespan(_: Starlette) -> Any:
        yield
        view.indexes.close()

    app = Starlette(
        routes=[*routes, Route("/export/rollout", _export(view)), *_static()],
        exception_handlers={LudicError: _wrong, OSError: _wrong, sqlite3.Error: _wrong},
        lifespan=lifespan,
    )
    app.state.view = view
    return Guard(app, token=token, hosts=hosts)


def dumped(value: Any) -> bytes:
    """JSON as browsers read it: numbers that are not finite become null, and text is escaped, so
    that halves of surrogate pairs pass."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        return json.dumps(_finite(value), separators=(",", ":")).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, (list, tuple)) else value


def _wrong(request: Request, exc: Exception) -> Response:
    """A sentence about what is wrong, as JSON where JSON was asked for."""
    text, status = str(exc), 404
    if isinstance(exc, QueryError):
        status = 400
    elif isinstance(exc, OSError):
        text = exc.strerror or text
    elif isinstance(exc, sqlite3.Error):
        text, status = f"the index of the run cannot be read now: {exc}; reload to try again", 503
    if request.url.path.startswith("/api/"):
        return Response(dumped({"error": text}), status, media_type="application/json")
    return Response(text.encode("utf-8", "replace"), status, media_type="text/plain")


# Starlette calls handlers that are not coroutines in worker threads.


def _json(answer: Callable[[Request], Any]) -> Callable[[Request], Response]:
    def handle(request: Request) -> Response:
        return Response(dumped(answer(request)), media_type="application/json")

    return handle


def _export(view: View) -> Callable[[Request], Response]:
    def handle(request: Request) -> Response:
        page = rollout_html(view.rollout(request), request.query_params.get("run", ""))
        name = re.sub("[^A-Za-z0-9_.-]", "-", request.query_params.get("id", "rollout"))
        return Response(
            page.encode("utf-8", "replace"),
            media_type="text/html",
            headers={
                "content-disposition": f'attachment; filename="{name[:100] or "rollout"}.html"',
                "content-security-policy": "sandbox; default-src 'none'; style-src 'unsafe-inline'",
            },
        )

    return handle


def _static() -> Iterable[Route]:
    """One route per file of the front end: no path is ever looked up."""
    folder = Path(__file__).with_name("static")
    for path in folder.rglob("*"):
        if path.is_file():
            name = f"/{path.relative_to(folder).as_posix()}"
            kind = _KINDS.get(path.suffix) or mimetypes.guess_type(name)[0] or "text/plain"
            yield Route("/" if name == "/index.html" else name, _file(path.read_bytes(), kind))


def _file(body: bytes, kind: str) -> Callable[[Request], Any]:
    async def handle(_: Request) -> Response:
        return Response(body, media_type=kind, headers={"cache-control": "no-cache"})

    return handle


def _filters(request: Request) -> dict[str, str]:
    return {k: v for k, v in request.query_params.items() if k not in _CONTROL}


def _order(request: Request) -> dict[str, Any]:
    query = request.query_params
    return {"sort": query.get("sort", "n"), "descending": query.get("order", "desc") != "asc"}


def _count(request: Request, key: str, default: int) -> int:
    text = request.query_params.get(key)
    return queries.count(key, text) if text else default
