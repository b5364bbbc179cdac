"""Servers of tools that answer badly, and lists of tools that come in pages."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ludic.agents.mcp import MCPServer, OpenServer, _Connection, all_tools, tool_servers
from ludic.agents.tools import ToolResult, call_tool, tools_by_name
from ludic.errors import ToolError
from tests.agents.mcp_raw import RAW, TOOLS

PROGRAM = [sys.executable, str(Path(__file__).with_name("mcp_raw.py"))]


async def called(opened: OpenServer, name: str) -> ToolResult:
    call: Any = {"id": "1", "type": "function", "function": {"name": name, "arguments": {}}}
    return await call_tool(tools_by_name(opened.tools), call, timeout_s=60)


@pytest.mark.adapters("mcp")
@pytest.mark.integration
async def test_every_page_of_a_list_of_tools_is_read() -> None:
    async with tool_servers():
        opened = await MCPServer(PROGRAM).open()
        assert [tool.name for tool in opened.tools] == TOOLS
        await opened.close()


@pytest.mark.adapters("mcp")
@pytest.mark.integration
@pytest.mark.parametrize("bad", ["malformed", "closed", "refused", *RAW])
async def test_a_bad_answer_is_its_callers_alone(bad: str) -> None:
    async with tool_servers():
        mine, other = [await MCPServer(PROGRAM, connection="shared").open() for _ in range(2)]
        waiting = asyncio.ensure_future(called(other, "waiting"))
        await asyncio.sleep(0)
        result = await called(mine, bad)
        assert (result.error is None) == (bad in RAW)
        assert (await waiting).content == "fine"
        assert (await called(mine, "fine")).content == "fine"


class Session:
    """A session of version 2 of the package, as far as it is used, with answers that are given."""

    def __init__(self, error: Exception, ping: Exception | None = None) -> None:
        self.error, self.ping = error, ping

    async def call_tool(self, name: str, arguments: Any) -> Any:
        raise self.error

    async def send_ping(self) -> None:
        if self.ping is not None:
            raise self.ping

    async def list_tools(self, *, params: Any = None) -> Any:
        at = 0 if params is None else int(params.cursor)
        return SimpleNamespace(tools=[at], next_cursor=str(at + 1) if at < 3 else None)


class Answered(Exception):
    """An error with a code, as the package raises it."""

    def __init__(self, code: int) -> None:
        super().__init__("said so")
        self.error = SimpleNamespace(code=code)


def connection(session: Session) -> _Connection:
    made = _Connection(SimpleNamespace(label="MCP server 'x'"))  # type: ignore[arg-type]
    made._session = session
    return made


@pytest.mark.parametrize(
    "error", [ValueError("not a result"), RuntimeError("unexpected"), Answered(-32000), Answered(1)]
)
@pytest.mark.parametrize("ping", [None, Answered(-32601), ValueError("not a pong")])
async def test_a_connection_that_carries_a_ping_survives_any_answer(
    error: Exception, ping: Exception | None
) -> None:
    shared = connection(Session(error, ping))
    with pytest.raises(ToolError, match="tool 'add' failed"):
        await shared.call("add", {})
    with pytest.raises(ToolError, match="tool 'add' failed"):
        await shared.call("add", {})


@pytest.mark.parametrize("ping", [Answered(-32000), BrokenPipeError()])
async def test_a_connection_that_carries_no_ping_is_gone(ping: Exception) -> None:
    shared = connection(Session(Answered(-32000), ping))
    with pytest.raises(ToolError, match="went away"):
        await shared.call("add", {})
    with pytest.raises(ToolError, match="is gone"):
        await shared.call("add", {})


async def test_pages_are_asked_for_as_version_2_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    types = ModuleType("mcp.types")
    types.PaginatedRequestParams = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mcp", ModuleType("mcp"))
    monkeypatch.setitem(sys.modules, "mcp.types", types)
    assert await all_tools(Session(ValueError())) == [0, 1, 2, 3]
