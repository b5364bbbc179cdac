"""Tools of Model Context Protocol servers, for `ToolAgent` and `ReActAgent`.

A server is a program that is started (stdio) or an address (HTTP). Its tools run outside of any
sandbox, with the rights of whoever runs the server.

Threads: connections live on one background loop, which alone touches them. Agents ask it from
whatever event loop they run on.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TextIO

from ludic.agents.tools import Tool, function_schema
from ludic.envs.adapters import load_package
from ludic.errors import AgentError, ConfigError, ToolError
from ludic.plumbing.arguments import misfit
from ludic.plumbing.contexts import holding
from ludic.plumbing.lazy import names_are_stored
from ludic.plumbing.text import clean_text, words_of
from ludic.workers.deadlines import bounded
from ludic.workers.threads import BackgroundLoop

_PING_S = 5.0
_CLOSE_S = 10.0
_LONGEST_ERROR = 500
_CLOSED = -32000
"""The protocol's code for a request whose connection went away. Servers use it as they like."""

_loop = BackgroundLoop("mcp")


@dataclass(frozen=True, slots=True)
class MCPServer:
    """A server whose tools an agent may call: `ToolAgent(…, tool_sources=[MCPServer(…)])`.

    `connection="episode"` opens a connection with each episode and closes it at its end: for a
    program, that is one process per episode. `connection="shared"` has one for all episodes
    of the run, whose server must keep apart what they do. If a shared server has gone away, the
    next episode starts it, or connects, again.

    Args:
        command: The program and its arguments, spoken to over its standard input and output.
        url: Or the address of a running server ("streamable HTTP").
        name: What messages call the server.
        tools: Take only these of its tools; by default all.
        prefix: Put before the tools' names, for servers whose tools are called the same.
        cwd: The folder that the program is started in.
        env: Variables for the program, besides a few harmless ones of this process.
        pass_env: Names of this process's variables to hand on, such as one with a key.
        headers_env: HTTP headers whose values are read from variables of this process, so that no
            key is written down: `{"Authorization": "MCP_TOKEN"}`.
        log: A file for what the program writes to its standard error.
        start_timeout_s: How long the server may take to answer at first.
    """

    command: Sequence[str] = ()
    url: str | None = None
    name: str = ""
    connection: Literal["episode", "shared"] = "episode"
    tools: Sequence[str] | None = None
    prefix: str = ""
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    pass_env: Sequence[str] = ()
    headers_env: Mapping[str, str] = field(default_factory=dict)
    log: str | None = None
    start_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ConfigError("an MCP server is either a `command` or a `url`: give one of them")
        if isinstance(self.command, str):
            raise ConfigError(f'command = "{self.command}": give a list of program and arguments')
        if self.connection not in ("episode", "shared"):
            raise ConfigError(f"connection={self.connection!r}: must be 'episode' or 'shared'")
        missing = [v for v in (*self.pass_env, *self.headers_env.values()) if v not in os.environ]
        if missing:
            raise ConfigError(f"{self.label}: the variables {missing} are not set")
        load_package("mcp", "mcp")  # if it is missing, the error says how to get it

    @property
    def label(self) -> str:
        """What messages call the server."""
        called = self.name or self.url or " ".join([Path(self.command[0]).name, *self.command[1:]])
        return f"MCP server {called[:80]!r}"

    async def open(self) -> OpenServer:
        """Connects, and returns the server's tools."""
        scope = _scope.get()
        shared = self.connection == "shared"
        connection = await _loop.run(scope.share(self) if shared else scope.open(self))
        return OpenServer(self, connection, scope)


def mcp_server(options: Mapping[str, Any]) -> MCPServer:
    """The server that a run file describes. Stored data must not get programs started."""
    if names_are_stored():
        raise ConfigError(
            "stored data names an MCP server, for which none is started: a replay cannot call "
            "its tools again"
        )
    if complaint := misfit(MCPServer, (), options):
        raise ConfigError(f"an MCP server cannot be made of {dict(options)}: {complaint}")
    return MCPServer(**options)


class OpenServer:
    """A server's tools while an episode uses them."""

    def __init__(self, server: MCPServer, connection: _Connection, scope: _Scope) -> None:
        self._server, self._connection, self._scope = server, connection, scope
        self.tools: Sequence[Tool] = [self._tool(listed) for listed in connection.listed]

    async def close(self) -> None:
        if self._server.connection == "episode":
            await _loop.run(self._scope.let_go(self._connection))

    def _tool(self, listed: Any) -> Tool:
        connection, description = self._connection, listed.description or ""

        async def call(**arguments: Any) -> str:
            return await _loop.run(connection.call(listed.name, arguments))

        name = f"{self._server.prefix}{listed.name}"
        parameters = dict(_either(listed, "input_schema", "inputSchema"))
        parameters.pop("title", None)
        return Tool(name, description, call, function_schema(name, description, parameters))


class _Connection:
    """One session with a server, held open by a task. Only the background loop comes here."""

    def __init__(self, server: MCPServer) -> None:
        self.server = server
        self.listed: list[Any] = []
        self._session: Any = None
        self._task: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._closing = asyncio.Event()
        self._error: BaseException | None = None

    async def open(self) -> None:
        label, limit = self.server.label, self.server.start_timeout_s
        self._task = asyncio.create_task(self._live())
        try:
            await bounded(self._ready.wait(), "its tools", label, limit)
        finally:
            if self._session is None:
                await self.close()
        if self._session is None:
            error = _cause(self._error)
            if isinstance(error, FileNotFoundError | PermissionError):
                raise ConfigError(f"{label} cannot be started: {error}") from error
            raise AgentError(f"{label} cannot be reached: {_in_one_line(error)}") from error
        wanted = self.server.tools
        unknown = set(wanted or ()) - {tool.name for tool in self.listed}
        if unknown:
            await self.close()
            raise ConfigError(
                f"{label} has no tools {sorted(unknown)}; it has "
                f"{sorted(tool.name for tool in self.listed)}"
            )
        self.listed = [tool for tool in self.listed if wanted is None or tool.name in wanted]

    async def _live(self) -> None:
        """Enters and leaves the session in one task, as its library requires."""
        try:
            async with AsyncExitStack() as stack:
                streams = await stack.enter_async_context(_transport(self.server, stack))
                make_session = load_package("mcp", "mcp").ClientSession
                session = await stack.enter_async_context(make_session(*streams[:2]))
                await session.initialize()
                self.listed = await all_tools(session)
                self._session = session
                self._ready.set()
                await self._closing.wait()
        except BaseException as error:
            self._error = error
        finally:
            self._closing.set()
            self._ready.set()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        label = self.server.label
        if self._closing.is_set():
            raise ToolError(f"{label} is gone; its tool {name!r} cannot be called")
        try:
            result = await self._until_gone(self._session.call_tool(name, dict(arguments)))
        except ToolError:
            raise
        except Exception as error:
            # A bad answer is this caller's alone: the connection, which others may share, has
            # ended only if it does not carry a ping either.
            if _is_answer(error) or not await self._is_gone():
                why = words_of(error) if _is_answer(error) else _in_one_line(error)
                raise ToolError(f"tool {name!r} failed: {why[:_LONGEST_ERROR]}") from error
            self._closing.set()
            raise ToolError(f"{label} went away during {name!r}: {_in_one_line(error)}") from error
        text = _text_of(result)
        if _either(result, "is_error", "isError"):
            raise ToolError(text or f"tool {name!r} failed")
        return text

    async def _is_gone(self) -> bool:
        """Whether a ping cannot even be sent. A server that is busy may answer it late, or never,
        or with nonsense: it is still there."""
        error = await self._ping()
        return error is not None and not (
            _is_answer(error) or isinstance(error, TimeoutError | ValueError)
        )

    async def _ping(self) -> Exception | None:
        """What was wrong with the answer to a ping, if anything was."""
        try:
            async with asyncio.timeout(_PING_S):
                await self._until_gone(self._session.send_ping())
        except Exception as error:
            return error
        return None

    async def is_alive(self) -> bool:
        return not self._closing.is_set() and await self._ping() is None

    async def _until_gone(self, request: Any) -> Any:
        """The answer to a request, or a `ToolError` as soon as the connection has ended."""
        asked = asyncio.ensure_future(request)
        gone = asyncio.ensure_future(self._closing.wait())
        try:
            await asyncio.wait((asked, gone), return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise ToolError(f"{self.server.label} went away")
            return asked.result()
        finally:
            gone.cancel()
            asked.cancel()

    async def close(self) -> None:
        """Ends the session, and the program with it. Never raises."""
        self._closing.set()
        if (task := self._task) is not None:
            with suppress(Exception):
                await asyncio.wait((task,), timeout=_CLOSE_S if self._ready.is_set() else 0)
                task.cancel()
                await asyncio.wait((task,), timeout=_CLOSE_S)


class _Scope:
    """The connections of one run. Only the background loop comes here."""

    def __init__(self) -> None:
        self.connections: set[_Connection] = set()
        self._shared: dict[str, _Connection] = {}
        self._sharing: dict[str, asyncio.Lock] = {}

    async def open(self, server: MCPServer) -> _Connection:
        connection = _Connection(server)
        self.connections.add(connection)  # before it is open: it may be cancelled half-way
        try:
            await connection.open()
        except BaseException:
            self.connections.discard(connection)
            raise
        return connection

    async def share(self, server: MCPServer) -> _Connection:
        key = json.dumps({name: getattr(server, name) for name in server.__slots__}, default=dict)
        async with self._sharing.setdefault(key, asyncio.Lock()):
            connection = self._shared.get(key)
            if connection is not None and not await connection.is_alive():
                await self.let_go(connection)
                connection = None
            if connection is None:
                connection = self._shared[key] = await self.open(server)
            return connection

    async def let_go(self, connection: _Connection) -> None:
        self.connections.discard(connection)
        await connection.close()

    async def close(self) -> None:
        connections, self.connections, self._shared = self.connections, set(), {}
        await asyncio.gather(*(connection.close() for connection in connections))


_of_the_process = _Scope()
_scope: ContextVar[_Scope] = ContextVar("mcp_scope", default=_of_the_process)


@asynccontextmanager
async def tool_servers() -> AsyncIterator[None]:
    """Every server that episodes start within it ends with it; without one, with the process."""
    scope = _Scope()
    try:
        with holding(_scope, scope):
            yield
    finally:
        if scope.connections:  # without one, not even the thread was started
            await _loop.run(scope.close())


@atexit.register
def _close_at_exit() -> None:
    if _of_the_process.connections:
        with suppress(Exception):
            _loop.call(_of_the_process.close(), timeout_s=2 * _CLOSE_S, what="their end")


# What is used of the package `mcp`, whose versions 1 and 2 differ.


@asynccontextmanager
async def _transport(server: MCPServer, stack: AsyncExitStack) -> AsyncIterator[Any]:
    """The streams to a server that is started, or has an address."""
    mcp = load_package("mcp", "mcp")
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
        cursor = _either(page, "next_cursor", "nextCursor")
        if not cursor:
            return tools


def _text_of(result: Any) -> str:
    """What a tool answered, as text."""
    parts = []
    for part in result.content:
        text = getattr(part, "text", None) or getattr(getattr(part, "resource", None), "text", None)
        parts.append(text if text is not None else f"[{part.type}, which cannot be shown]")
    structured = _either(result, "structured_content", "structuredContent")
    if not parts and structured is not None:
        return json.dumps(structured)
    return "\n".join(parts)


def _either(thing: Any, new: str, old: str) -> Any:
    """An attribute under its name in version 2 of the package, or in version 1."""
    return getattr(thing, new) if hasattr(thing, new) else getattr(thing, old, None)


def _is_answer(error: BaseException) -> bool:
    """Whether an error is what the server answered, by its code."""
    return getattr(getattr(error, "error", None), "code", _CLOSED) != _CLOSED


def _cause(error: BaseException | None) -> BaseException | None:
    """The first error inside a group of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _in_one_line(error: BaseException | None) -> str:
    """An error in one line: its type, and what it says."""
    inner = _cause(error)
    name = type(inner).__name__
    return clean_text(f"{name}: {inner}" if str(inner or "") else name)
