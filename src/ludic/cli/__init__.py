"""The `ludic` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line; expected failures are one sentence and exit code 2."""
    from ludic.cli.app import app
    from ludic.errors import LudicError

    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    try:
        app()
    except LudicError as exc:
        if debug:
            raise
        print(f"ludic: {exc}", file=sys.stderr)
        sys.exit(2)
    except OSError as exc:
        if debug:
            raise
        where = f" ({exc.filename})" if exc.filename else ""
        print(f"ludic: {exc.strerror or exc}{where}", file=sys.stderr)
        sys.exit(2)
