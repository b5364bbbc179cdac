"""A real MCP server for the tests: `python mcp_things.py`, or `python mcp_things.py http PORT`."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

try:
    from mcp.server.fastmcp import FastMCP as Server
except ImportError:  # version 2 of the package
    from mcp.server.mcpserver import MCPServer as Server

notes: list[str] = []


def server(**options: Any) -> Any:
    things = Server("things", **options)

    @things.tool()
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    @things.tool()
    def note(text: str) -> str:
        """Keeps a note, and returns all of them."""
        notes.append(text)
        return " ".join(notes)

    @things.tool()
    def fail() -> str:
        """Fails."""
        raise ValueError("no luck")

    @things.tool()
    async def hang() -> str:
        """Never answers."""
        await asyncio.sleep(3600)
        return ""

    @things.tool()
    def die() -> str:
        """Ends the server."""
        os._exit(3)

    @things.tool()
    def who() -> str:
        """Returns the server's process, and a variable."""
        return f"{os.getpid()} {os.environ.get('THINGS_KEY', '-')}"

    return things


if __name__ == "__main__":
    if marks := os.environ.get("THINGS_MARKS"):  # each server leaves a mark while it lives
        Path(marks, str(os.getpid())).touch()
    if sys.argv[1:2] == ["http"]:
        where = {"host": "127.0.0.1", "port": int(sys.argv[2])}
        if Server.__name__ == "FastMCP":
            server(**where, log_level="ERROR").run("streamable-http")
        else:
            server(log_level="ERROR").run("streamable-http", **where)
    else:
        server(log_level="ERROR").run()
