"""The `ludic` command."""

from __future__ import annotations

import errno
import sys


def main() -> None:
    """Runs the command line; expected failures are one sentence and exit code 2."""
    from ludic.cli.app import app
    from ludic.errors import LudicError
    from ludic.plumbing.text import visible

    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    try:
        app()
    except Exception as exc:
        if not _tells(exc):
            sys.exit(2)
        if debug or not isinstance(exc, LudicError | OSError):
            raise
        sentence = str(exc) if isinstance(exc, LudicError) else _explained(exc)
        print(f"ludic{_rank()}: {visible(' '.join(sentence.split()))}", file=sys.stderr)
        sys.exit(2)


def _tells(exc: Exception) -> bool:
    """Whether this process is to report a failure: of several ranks, one does."""
    from ludic.sharding.ranks import launched, tells_of_failure

    if launched().size == 1:
        return True
    from ludic.sharding.world import PeerError

    return tells_of_failure(told_of_it=isinstance(exc, PeerError))


def _rank() -> str:
    from ludic.sharding.ranks import launched

    return "" if launched().leads else f" (rank {launched().rank})"


def _explained(exc: OSError) -> str:
    where = f": {exc.filename}" if exc.filename else ""
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"the disk is full{where}; free some space, then resume with "
            "`ludic train --resume FOLDER`, or name a folder on another disk with --out"
        )
    if exc.errno == errno.EADDRINUSE:
        return f"{exc.strerror}{where}: name another port, or end what listens on this one"
    return f"{exc.strerror or exc}{where}"
