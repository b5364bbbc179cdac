"""Rows of a dataset, given as a list, read from a JSONL file, or fetched from the hub, and what the
environments with one task per row have in common.

Files and hub datasets are loaded once per process and shared by all environments.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from ludic.envs.adapters import load_package
from ludic.envs.single_agent_env import SingleAgentEnv
from ludic.errors import ConfigError
from ludic.seeding import derive_seed

Row: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DatasetRows:
    """The rows, and the name that task keys begin with."""

    name: str
    rows: Sequence[Row]

    def pick(self, seed: int | None, index: int | None, limit: int | None) -> int:
        """Which row an episode is about: `index`, or the one of the first `limit` that its seed
        stands for."""
        total = self.count(limit)
        if index is None:
            return derive_seed(secrets.randbits(63) if seed is None else seed, "row") % total
        if not 0 <= index < total:
            raise ConfigError(f"row {index} of the dataset {self.name!r}: it has {total} rows")
        return index

    def count(self, limit: int | None) -> int:
        """How many rows there are to pick from."""
        return len(self.rows) if limit is None else min(limit, len(self.rows))


@dataclass(eq=False, repr=False, kw_only=True)
class DatasetEnv(SingleAgentEnv):
    """One row of a dataset is one task; the seed picks it. See the environments derived from it."""

    default_system_prompt: ClassVar[str | None] = None

    rows: Sequence[Row] | None = None
    path: str | None = None
    hub: str | None = None
    config: str | None = None
    split: str = "train"
    system_prompt: str | None = None
    index: int | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"{type(self).__name__}(limit={self.limit}): must be at least 1")
        self._task_key: str | None = None

    @cached_property
    def data(self) -> DatasetRows:
        """The rows of exactly one of the three sources, loaded when they are first needed."""
        given = [name for name in ("rows", "path", "hub") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(
                f"a dataset comes from one of rows, path or hub; given: {given or 'none of them'}"
            )
        if self.rows is not None:
            dataset = DatasetRows("rows", self.rows)
        elif self.hub is not None:
            with _loading:
                dataset = _from_hub(self.hub, self.config, self.split)
        else:
            dataset = _from_file(str(self.path))
        if not len(dataset.rows):
            raise ConfigError(f"the dataset {dataset.name!r} has no rows")
        return dataset

    def num_rows(self) -> int:
        """How many rows there are to choose from. Loads the data if it is not loaded yet."""
        return self.data.count(self.limit)

    def suggested_sysprompt(self, agent_id: str) -> str | None:
        return self.default_system_prompt if self.system_prompt is None else self.system_prompt

    def task_key(self) -> str | None:
        return self._task_key


_loading = threading.Lock()
"""Many environments start at once: one loads, the others find it there. Nothing else is done with
the lock: each call of the system would let all of them queue for it."""


def _from_file(path: str) -> DatasetRows:
    try:
        stat = os.stat(path)
        file = (stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size)
        with _loading:
            return _read_jsonl(path, file)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the dataset {path!r} cannot be read: {error}") from error


@lru_cache(maxsize=8)
def _read_jsonl(place: str, file: tuple[int, ...]) -> DatasetRows:
    """The file's rows. `file` tells it from others that are, or were, at the same place."""
    rows: list[Row] = []
    path = Path(place)
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{path.name}, line {number}, is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ConfigError(f"{path.name}, line {number}, is not a JSON object")
            rows.append(row)
    return DatasetRows(path.stem, rows)


@lru_cache(maxsize=8)
def _from_hub(name: str, config: str | None, split: str) -> DatasetRows:
    data = load_package("datasets", "datasets").load_dataset(name, config, split=split)
    return DatasetRows("/".join(filter(None, (name, config, split))), data)
