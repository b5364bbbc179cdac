"""What the connections to MCP servers use of the package `mcp`, whose versions 1 and 2 differ."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, TextIO

from ludic.errors import MissingExtraError
from ludic.plumbing.text import clean_text

if TYPE_CHECKING:
    from ludic.agents.mcp import MCPServer

_CLOSED = -32000
"""The protocol's code for a request whose connection went away. Servers use it as they like."""


def package() -> Any:
    """The package; `MissingExtraError` says how to get it."""
    try:
        return import_module("mcp")
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "mcp":
            raise
        raise MissingExtraError("mcp", "mcp") from error


@asynccontextmanager
async def transport(server: MCPServer, stack: AsyncExitStack) -> AsyncIterator[Any]:
    """The streams to a server that is started, or has an address."""
    mcp = package()
    if server.url is None:
        log = stack.enter_context(_appended(server.log or os.devnull))
        parameters = mcp.StdioServerParameters(
            command=server.command[0],
            args=list(server.command[1:]),
            env={**server.env, **{name: os.environ[name] for name in server.pass_env}},
            cwd=server.cwd,
            encoding_error_handler="replace",  # one bad byte would end the connection for all
        )
        async with mcp.stdio_client(parameters, errlog=log) as streams:
            yield streams
        return
    http = import_module("mcp.client.streamable_http")
    make = import_module("mcp.shared._httpx_utils").create_mcp_http_client
    headers = {header: os.environ[name] for header, name in server.headers_env.items()}
    client = await stack.enter_async_context(make(headers=headers))
    async with http.streamable_http_client(server.url, http_client=client) as streams:
        yield streams


def _appended(path: str) -> TextIO:
    return open(path, "a", encoding="utf-8")


async def all_tools(session: Any) -> list[Any]:
    """Every page of the server's list."""
    tools: list[Any] = []
    cursor: str | None = None
    make_params = import_module("mcp.types").PaginatedRequestParams
    while True:
        # Version 2 takes the cursor in no other way, and version 1 takes it in this one, too.
        params = make_params(cursor=cursor) if cursor else None
        page = await session.list_tools(params=params)
        tools += page.tools
        cursor = either(page, "next_cursor", "nextCursor")
        if not cursor:
            return tools


def text_of(result: Any) -> str:
    """What a tool answered, as text."""
    parts = []
    for part in result.content:
        text = getattr(part, "text", None) or getattr(getattr(part, "resource", None), "text", None)
        parts.append(text if text is not None else f"[{part.type}, which cannot be shown]")
    structured = either(result, "structured_content", "structuredContent")
    if not parts and structured is not None:
        return json.dumps(structured)
    return "\n".join(parts)


def either(thing: Any, new: str, old: str) -> Any:
    """An attribute under its name in version 2 of the package, or in version 1."""
    return getattr(thing, new) if hasattr(thing, new) else getattr(thing, old, None)


def is_answer(error: BaseException) -> bool:
    """Whether an error is what the server answered, by its code."""
    return getattr(getattr(error, "error", None), "code", _CLOSED) != _CLOSED


def cause(error: BaseException | None) -> BaseException | None:
    """The first error inside a group of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def said(error: BaseException | None) -> str:
    """An error in one line: its type, and what it says."""
    inner = cause(error)
    name = type(inner).__name__
    return clean_text(f"{name}: {inner}" if str(inner or "") else name)
