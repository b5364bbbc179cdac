"""`ludic serve`: a vLLM server that takes new weights."""

from __future__ import annotations

import typer


def serve(context: typer.Context) -> None:
    """Serve a model with vLLM, ready for live weight updates (`ludic serve --help`)."""
    from ludic.inference.vllm.server import main

    raise SystemExit(main(context.args))
