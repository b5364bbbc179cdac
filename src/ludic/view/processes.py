"""The processes of a run over Redis, for its page: what `ludic pipeline status` shows."""

from __future__ import annotations

import os
from typing import Any

from ludic.errors import LudicError
from ludic.view.folders import RunPlace

ADDRESS = "pipeline.json"
_ANSWER_S = 1.0


def processes(run: RunPlace) -> dict[str, Any] | None:
    """Returns the rows of a run's processes and what is between them; None for a run that has no
    Redis at the moment, or whose address others could have written."""
    file = run.path / ADDRESS
    try:
        status = os.stat(run.confined(file)) if file.is_file() else None
    except (LudicError, OSError):
        return None
    if status is None or status.st_uid != os.getuid() or status.st_mode & 0o077:
        return None
    address = run.read_json(ADDRESS)
    try:
        from ludic.pipeline.store import PipelineConfig, Store
        from ludic.runs.pipeline.status import COLUMNS, process_rows, queue_lines, read_status

        config = PipelineConfig(
            address["url"], address["name"], patience_s=_ANSWER_S, call_s=_ANSWER_S
        )
        store = Store(config)
        try:
            found = read_status(store)
        finally:
            store.close()
    except (LudicError, KeyError, TypeError, ValueError) as exc:
        return {"problem": f"the run's Redis cannot be asked: {exc}"}
    return {"columns": COLUMNS, "rows": process_rows(found), "queue": queue_lines(found)}
