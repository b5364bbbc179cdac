"""A host that fetches weights, as a process: folder, how it serves, seconds for a piece of another
host. Each line of its input is a source as JSON; for each it prints the checksum of what it has,
and from whom it took nothing more. It passes on until its input ends.

It serves `well`, or as a host does that is `killed` with its second piece half sent, has `wrong`
bytes, or is `slow`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from ludic.distributed import piece_fetcher, weights_http
from ludic.distributed.patience import Patience
from ludic.distributed.piece_fetcher import PieceFetcher, Source
from ludic.plumbing import files

PIECE = 1 << 16


def main() -> None:
    for module in (files, weights_http, piece_fetcher):
        module.PIECE = PIECE  # type: ignore[attr-defined]
    folder, manner, piece_s = sys.argv[1:]
    patience = Patience(deadline_s=60.0, silence_s=20.0, piece_s=float(piece_s))
    fetcher = PieceFetcher(patience, "127.0.0.1")
    if manner != "well":
        weights_http._Handler._send = bad_send(manner)  # type: ignore[method-assign]
    left: list[str] = []
    leave = fetcher._leave

    def noted(job: Any, url: str, why: Any) -> None:
        left.extend([url] if url != job.source.url and not job.over.is_set() else [])
        leave(job, url, why)

    fetcher._leave = noted  # type: ignore[method-assign]
    for line in sys.stdin:
        source, left[:] = Source(**json.loads(line)), []
        path = Path(folder) / source.checksum
        fetcher.fetch(source, path)
        print(json.dumps([files.file_checksum(path), left]), flush=True)
    fetcher.close()


def bad_send(manner: str) -> Any:
    sent = 0

    def send(handler: Any, file: Any, handle: int) -> None:
        nonlocal sent
        sent += 1
        bounds = handler.headers["Range"].removeprefix("bytes=").split("-")
        start, end = int(bounds[0]), int(bounds[1]) + 1
        data = os.pread(handle, end - start, start)
        handler._head(206, len(data))
        if manner == "wrong":
            handler.wfile.write(bytes(len(data)))
        elif manner == "slow":
            while True:
                handler.wfile.write(b"x")
                threading.Event().wait(0.05)
        elif sent == 1:
            handler.wfile.write(data)
        else:
            handler.wfile.write(data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

    return send


if __name__ == "__main__":
    main()
