"""An index of a run's rollouts in SQLite, kept beside them and brought up to date as they grow.

It has the columns of the table, the words of every rollout, and where each rollout is stored; the
rollouts themselves stay in their files. It can be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from string import Template

from ludic.plumbing.text import clean_text
from ludic.rollouts.lines import Block, Damage, whole_blocks
from ludic.view.folders import RunPlace, ViewError
from ludic.view.rows import COLUMNS, NewerSchemaError, rollout_columns, trained_columns

VERSION = 6
FILE = ".view.sqlite"
_ROWS_PER_COMMIT = 2000
_WAIT_S = 20.0
_MOST_NOTES = 200

_TABLES = Template(Path(__file__).with_name("tables.sql").read_text(encoding="utf-8")).substitute(
    columns=", ".join(COLUMNS)
)
_INSERT = (
    f"INSERT INTO rollouts (n, block, line, source, {', '.join(COLUMNS)}) "
    f"VALUES (?, ?, ?, ?, {', '.join('?' * len(COLUMNS))})"
)
_COUNTED = [(name, COLUMNS.index(name)) for name in ("agent", "env", "outcome", "truncation")]
_PARTS = COLUMNS.index("components")


@dataclass(frozen=True, slots=True)
class _Source:
    path: Path
    kind: str
    name: str


class RunIndex:
    """The index of one run. `update` is called by one thread at a time; any may read."""

    def __init__(self, run: RunPlace) -> None:
        self.run = run
        self.path = _place(run)
        self.progress: float | None = None
        """The share of the files' bytes that is indexed, while that is under way."""
        self.complete = threading.Event()
        """Set once everything that was there has been indexed."""
        self._updating = threading.Lock()
        self._open_or_make()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection that cannot write."""
        address = f"{self.path.as_uri()}?mode=ro"
        with closing(sqlite3.connect(address, uri=True, timeout=_WAIT_S)) as db:
            db.row_factory = sqlite3.Row
            db.execute("PRAGMA query_only=1")
            db.execute("PRAGMA trusted_schema=0")
            yield db

    def update(self, *, keep_on: Callable[[], bool] = lambda: True) -> int:
        """Takes up what was written since; returns how many lines that was."""
        with self._updating:
            try:
                added = self._update(keep_on)
                self.complete.set()
                return added
            except sqlite3.DatabaseError as exc:
                if isinstance(exc, sqlite3.OperationalError):  # locked, or the disk is full
                    raise ViewError(f"the index {self.path} cannot be written: {exc}") from exc
                self._remove()
                self._open_or_make()
                return self._update(keep_on)
            finally:
                self.progress = None

    def _update(self, keep_on: Callable[[], bool]) -> int:
        with closing(_connect(self.path)) as db:
            sources = self._sources(db)
            if any(self._was_rewritten(db, source) for source in sources):
                db.close()
                self._remove()
                self._open_or_make()
                return self._update(keep_on)
            total = sum(_size(source.path) for source in sources) or 1
            added = before = 0
            for source in sources:
                for count, size in self._take(db, source):
                    added += count
                    self.progress = (before + size) / total
                    if not keep_on():
                        return added
                before += _size(source.path)
            return added

    def _sources(self, db: sqlite3.Connection) -> list[_Source]:
        sources: list[_Source] = []
        files = [("rollouts", path) for path in self.run.rollout_files()]
        files += [("tokens", path) for path in self.run.token_files()]
        for kind, path in files:
            try:
                real = self.run.confined(path)
            except ViewError as exc:
                self._note(db, path.name, 0, str(exc))
                continue
            sources.append(_Source(real, kind, path.relative_to(self.run.path).as_posix()))
        db.commit()
        return sources

    def _was_rewritten(self, db: sqlite3.Connection, source: _Source) -> bool:
        indexed = db.execute(
            "SELECT inode, size, tail FROM files WHERE name = ?", (source.name,)
        ).fetchone()
        if indexed is None:
            return False
        inode, size, tail = indexed
        try:
            now = source.path.stat()
            same = now.st_ino == inode and now.st_size >= size
            return not same or _tail(source.path, size) != bytes(tail)
        except OSError:
            return True

    def _take(self, db: sqlite3.Connection, source: _Source) -> Iterator[tuple[int, int]]:
        """Yields after each commit how many lines it had, and up to where the file is indexed."""
        db.execute(
            "INSERT OR IGNORE INTO files (name, kind, inode, size, tail) VALUES (?, ?, ?, 0, ?)",
            (source.name, source.kind, source.path.stat().st_ino, _tail(source.path, 0)),
        )
        db.commit()
        db.execute("BEGIN IMMEDIATE")
        file, size = db.execute(
            "SELECT id, size FROM files WHERE name = ?", (source.name,)
        ).fetchone()
        if size == _size(source.path):
            db.rollback()
            return
        waiting = 0
        for piece in whole_blocks(source.path, size):
            if isinstance(piece, Damage):
                what = f"{piece.length:,} bytes cannot be read ({piece.why}); the rest is shown"
                self._note(db, source.name, piece.start, what)
            else:
                waiting += self._add(db, source, file, piece)
            size = piece.start + piece.length
            if waiting >= _ROWS_PER_COMMIT:
                self._commit(db, source, file, size)
                yield waiting, size
                waiting = 0
                db.execute("BEGIN IMMEDIATE")
        self._commit(db, source, file, size)
        yield waiting, size

    def _commit(self, db: sqlite3.Connection, source: _Source, file: int, size: int) -> None:
        tail = _tail(source.path, size)
        db.execute("UPDATE files SET size = ?, tail = ? WHERE id = ?", (size, tail, file))
        db.commit()

    def _add(self, db: sqlite3.Connection, source: _Source, file: int, block: Block) -> int:
        number = db.execute(
            "INSERT INTO blocks (file, start, length) VALUES (?, ?, ?)",
            (file, block.start, block.length),
        ).lastrowid
        last = db.execute("SELECT coalesce(max(n), 0) FROM rollouts").fetchone()[0]
        rows: list[tuple[object, ...]] = []
        facets: Counter[tuple[str, object]] = Counter()
        words: list[tuple[int, str]] = []
        stem = Path(source.name).name.partition(".")[0]
        for place, line in enumerate(block.text.split(b"\n")):
            if not line.strip():
                continue
            try:
                if source.kind == "tokens":
                    rows.append((*trained_columns(line), number, place))
                    continue
                values, text = rollout_columns(line)
            except NewerSchemaError as exc:
                self._note(db, source.name, None, f"{exc}: update Ludic to see them")
                continue
            except (ValueError, RecursionError) as exc:
                self._note(db, source.name, block.start, f"line {place + 1} of a block: {exc}")
                continue
            last += 1
            stored = tuple(clean_text(v) if isinstance(v, str) else v for v in values)
            rows.append((last, number, place, stem, *stored))
            words.append((last, clean_text(text)))
            facets["source", stem] += 1
            facets.update((name, stored[at]) for name, at in _COUNTED if stored[at])
            facets.update(("component", name) for name in json.loads(stored[_PARTS] or "{}"))
        if source.kind == "tokens":
            db.executemany("INSERT INTO trained VALUES (?, ?, ?, ?, ?, ?)", rows)
        else:
            db.executemany(_INSERT, rows)
            db.executemany("INSERT INTO words (rowid, text) VALUES (?, ?)", words)
            db.executemany(
                "INSERT INTO facets VALUES (?, ?, ?) "
                "ON CONFLICT DO UPDATE SET count = count + excluded.count",
                [(*facet, count) for facet, count in facets.items()],
            )
        db.execute("UPDATE files SET rows = rows + ? WHERE id = ?", (len(rows), file))
        return len(rows)

    def _note(self, db: sqlite3.Connection, file: str, start: int | None, what: str) -> None:
        total, same = db.execute(
            "SELECT count(*), sum(file = ? AND what = ? AND start IS ?) FROM notes",
            (file, what, start),
        ).fetchone()
        if total < _MOST_NOTES and not same:
            db.execute("INSERT INTO notes VALUES (?, ?, ?)", (file, start, what))

    def _open_or_make(self) -> None:
        try:
            if self.path.is_symlink():
                raise ViewError(f"{self.path} is a link and is not written to")
            with closing(_connect(self.path)) as db:
                version = db.execute("PRAGMA user_version").fetchone()[0]
                if version == VERSION:
                    return
                if version == 0 and not db.execute("SELECT 1 FROM sqlite_master").fetchone():
                    db.executescript(f"{_TABLES} PRAGMA user_version={VERSION};")
                    return
        except sqlite3.OperationalError as exc:
            elsewhere = Path(tempfile.mkdtemp(prefix="ludic-view-")) / FILE
            if self.path.parent == elsewhere.parent.parent:
                raise ViewError(f"no index can be written: {exc}") from exc
            self.path = elsewhere
        except sqlite3.DatabaseError:
            pass  # not an index: made again
        self._remove()
        with closing(_connect(self.path)) as db:
            db.executescript(f"{_TABLES} PRAGMA user_version={VERSION};")

    def _remove(self) -> None:
        for suffix in ("", "-journal", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                os.unlink(f"{self.path}{suffix}")


def _place(run: RunPlace) -> Path:
    """Beside the rollouts, or in a temporary folder if that one cannot be written to."""
    place = run.path / FILE
    if os.access(run.path, os.W_OK) and not place.is_symlink():
        return place
    return Path(tempfile.mkdtemp(prefix="ludic-view-")) / FILE


def _connect(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=_WAIT_S, isolation_level=None)
    db.execute("PRAGMA trusted_schema=0")
    db.execute("PRAGMA synchronous=OFF")  # it can be made again
    db.execute("PRAGMA cache_size=-16000")
    return db


def _tail(path: Path, size: int) -> bytes:
    """A fingerprint of what stands before `size`."""
    with open(path, "rb") as file:
        file.seek(max(size - 256, 0))
        return hashlib.blake2b(file.read(min(size, 256)), digest_size=16).digest()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


class Indexes:
    """The indexes of all runs, brought up to date by one thread while somebody looks."""

    def __init__(self, every_s: float = 1.0, watched_s: float = 60.0) -> None:
        self.every_s, self.watched_s = every_s, watched_s
        self._lock = threading.Lock()
        self._indexes: dict[Path, RunIndex] = {}
        self._asked: dict[Path, float] = {}
        self.errors: dict[Path, str] = {}
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._loop, name="ludic-view-index", daemon=True)

    def of(self, run: RunPlace) -> RunIndex:
        """The index of a run, which is watched from now on."""
        with self._lock:
            index = self._indexes.get(run.path)
            if index is None or not index.path.exists():
                index = self._indexes[run.path] = RunIndex(run)
            new = run.path not in self._asked
            self._asked[run.path] = time.monotonic()
            if self._thread.ident is None:
                self._thread.start()
        if new:
            self._wake.set()
        return index

    def close(self) -> None:
        """Ends the thread, after the rows that it is at."""
        self._stop.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(30.0)
        for index in self._indexes.values():
            if index.path.parent != index.run.path:
                shutil.rmtree(index.path.parent, ignore_errors=True)

    def _loop(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                since = time.monotonic() - self.watched_s
                self._asked = {path: asked for path, asked in self._asked.items() if asked > since}
                watched = list(self._asked)
            for path in watched:
                try:
                    self._indexes[path].update(keep_on=lambda: not self._stop.is_set())
                    self.errors.pop(path, None)
                except Exception as exc:  # shown on the page; the next round tries again
                    self.errors[path] = str(exc)
            self._wake.wait(self.every_s)
            self._wake.clear()
