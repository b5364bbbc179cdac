"""A process that fetches one policy, as an actor's host does: URL of Redis, run, cache, address to
pass on from, policy as JSON. Prints the checksum of what it has, and passes on until its input
ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ludic.distributed import piece_fetcher, weights_http
from ludic.pipeline.policies import StoredPolicy
from ludic.pipeline.store import PipelineConfig
from ludic.pipeline.weights_fetcher import PolicyFetcher
from ludic.plumbing import files

PIECE = 1 << 16


def main() -> None:
    for module in (files, weights_http, piece_fetcher):
        module.PIECE = PIECE  # type: ignore[attr-defined]
    url, run, folder, address, policy = sys.argv[1:]
    fetcher = PolicyFetcher(PipelineConfig(url, run), Path(folder), address=address)
    here = fetcher.fetch(StoredPolicy(**json.loads(policy)))
    print(files.file_checksum(Path(here.path)), flush=True)
    sys.stdin.read()
    fetcher.close()


if __name__ == "__main__":
    main()
