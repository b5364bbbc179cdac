"""The `ludic` command."""

from __future__ import annotations

import errno
import sys


def main() -> None:
    """Runs the command line; expected failures are one sentence and exit code 2."""
    from ludic.cli.app import app
    from ludic.errors import LudicError
    from ludic.plumbing.text import visible
    from ludic.sharding.ranks import launched, tells_of_failure

    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    try:
        app()
    except Exception as exc:
        here = launched()
        if here.size > 1:  # of several ranks, one reports a failure
            from ludic.sharding.world import PeerError

            if not tells_of_failure(told_of_it=isinstance(exc, PeerError)):
                sys.exit(2)
        if debug or not isinstance(exc, LudicError | OSError):
            raise
        sentence = str(exc) if isinstance(exc, LudicError) else _explained(exc)
        rank = "" if here.leads else f" (rank {here.rank})"
        print(f"ludic{rank}: {visible(' '.join(sentence.split()))}", file=sys.stderr)
        sys.exit(2)


def _explained(exc: OSError) -> str:
    where = f": {exc.filename}" if exc.filename else ""
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"the disk is full{where}; free some space, then resume with "
            "`ludic train --resume FOLDER`, or name a folder on another disk with --out"
        )
    if exc.errno == errno.EADDRINUSE:
        return f"{exc.strerror}{where}: choose another port, or stop what listens on this one"
    return f"{exc.strerror or exc}{where}"
