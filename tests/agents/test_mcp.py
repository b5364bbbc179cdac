"""Tools of a real MCP server, over stdio and over HTTP."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ludic.agents import ReActAgent, ToolAgent
from ludic.agents.mcp import MCPServer, mcp_server, tool_servers
from ludic.agents.tools import ToolResult, call_tool, tools_by_name
from ludic.errors import AgentError, ConfigError, DeadlineError, ToolError
from ludic.interaction import RunSpec, SingleAgentSyncProtocol
from ludic.plumbing.lazy import stored_names
from ludic.registry import make_protocol
from ludic.types import Rollout, ToolCall
from tests.agents.scripted import move, scripted_agent, scripted_runtime, tool_call
from tests.interaction.worlds import Countdown

pytestmark = [pytest.mark.adapters, pytest.mark.integration]

TOOLS = ["add", "note", "fail", "hang", "die", "who"]
PROGRAM = [sys.executable, str(Path(__file__).with_name("mcp_things.py"))]


@pytest.fixture
def address() -> Iterator[str]:
    """A server over HTTP, on a port that was free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([*PROGRAM, "http", str(port)])
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(params=["stdio", "http"])
def server(request: pytest.FixtureRequest) -> Callable[..., MCPServer]:
    """The same server by either way."""
    if request.param == "stdio":
        return lambda **options: MCPServer(PROGRAM, name="things", **options)
    url = request.getfixturevalue("address")
    return lambda **options: MCPServer(url=url, name="things", **options)


def said(name: str, **arguments: Any) -> ToolCall:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


async def ask(opened: Any, name: str, *, timeout_s: float = 60, **arguments: Any) -> ToolResult:
    return await call_tool(
        tools_by_name(opened.tools), said(name, **arguments), timeout_s=timeout_s
    )


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def is_gone(pid: int) -> bool:
    """Whether the process ends, within a deadline that only a failure waits for."""
    for _ in range(600):
        if not is_running(pid):
            return True
        await asyncio.sleep(0.05)
    return False


async def play(agent: Any, count: int = 1) -> Rollout:
    world = SingleAgentSyncProtocol(agent)
    (rollout,) = await world.run(Countdown(count), RunSpec("e", env_seed=1, sampling_seed=1))
    return rollout


async def test_calls_are_answered_and_what_goes_wrong_is_told_to_the_model(
    server: Callable[..., MCPServer],
) -> None:
    opened = await server().open()
    try:
        assert [tool.name for tool in opened.tools] == TOOLS
        schema = opened.tools[0].schema["function"]
        assert schema["description"] == "Adds two numbers."
        assert schema["parameters"]["required"] == ["a", "b"]
        assert await ask(opened, "add", a=2, b=3) == ToolResult("5")
        wrong = await ask(opened, "add", a="two")
        assert wrong.error is not None
        assert "valid integer" in wrong.error
        assert "no luck" in str((await ask(opened, "fail")).error)
        assert "there is no tool 'sub'" in str((await ask(opened, "sub")).error)
    finally:
        await opened.close()


async def test_a_tool_that_hangs_costs_its_deadline_and_not_the_connection(
    server: Callable[..., MCPServer],
) -> None:
    opened = await server().open()
    try:
        late = await ask(opened, "hang", timeout_s=0.5)
        assert late.error == "tool 'hang' did not answer within 0.5 s"
        assert await ask(opened, "add", a=2, b=3) == ToolResult("5")
    finally:
        await opened.close()


async def test_a_server_that_dies_in_an_episode_is_told_of_and_the_episode_goes_on(
    server: Callable[..., MCPServer],
) -> None:
    script = [tool_call("die"), tool_call("add", a=1, b=1), move("down")]
    agent = scripted_agent(script, ReActAgent, tool_sources=[server()], tool_timeout_s=5.0)
    rollout = await play(agent)
    assert rollout.error is None
    assert rollout.terminated
    first, second, _ = rollout.agent_steps
    assert first.tool_call_errors
    assert "things" in second.tool_call_errors[0]
    assert second.tool_messages[0]["content"].startswith("Error: MCP server 'things' ")


async def test_each_episode_has_a_server_of_its_own_that_ends_with_it() -> None:
    script = [tool_call("note", text="x"), tool_call("who"), move("down")]
    agents = [
        scripted_agent(script, ToolAgent, tool_sources=[MCPServer(PROGRAM)]) for _ in range(2)
    ]
    rollouts = await asyncio.gather(*(play(agent) for agent in agents))
    notes = [r.agent_steps[0].tool_messages[0]["content"] for r in rollouts]
    pids = {int(r.agent_steps[1].tool_messages[0]["content"].split()[0]) for r in rollouts}
    assert notes == ["x", "x"]
    assert len(pids) == 2
    assert all([await is_gone(pid) for pid in pids])


async def test_a_shared_server_is_one_for_all_episodes_and_ends_with_the_run() -> None:
    shared = MCPServer(PROGRAM, connection="shared")
    script = [tool_call("note", text="x"), tool_call("who"), move("down")]
    async with tool_servers():
        agents = [scripted_agent(script, ToolAgent, tool_sources=[shared]) for _ in range(3)]
        rollouts = await asyncio.gather(*(play(agent) for agent in agents))
        (pid,) = {r.agent_steps[1].tool_messages[0]["content"].split()[0] for r in rollouts}
        assert {r.agent_steps[0].tool_messages[0]["content"] for r in rollouts} == {
            "x", "x x", "x x x"
        }  # fmt: skip
        assert is_running(int(pid))
    assert await is_gone(int(pid))


async def test_a_shared_server_that_died_is_started_again_for_the_next_episode() -> None:
    shared = MCPServer(PROGRAM, connection="shared")
    async with tool_servers():
        first = await shared.open()
        pid = (await ask(first, "who")).content.split()[0]
        assert (await ask(first, "die")).error
        second = await shared.open()
        assert (await ask(second, "who")).content.split()[0] != pid
        assert (await ask(first, "who")).error


async def test_servers_end_with_a_process_that_does_not_close_them(tmp_path: Path) -> None:
    script = (
        "import asyncio, sys\n"
        "from ludic.agents.mcp import MCPServer\n"
        f"marks = {{'THINGS_MARKS': {str(tmp_path)!r}}}\n"
        f"server = MCPServer({PROGRAM!r}, connection='shared', env=marks)\n"
        "asyncio.run(server.open())\n"
    )
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", script], check=True, env={**os.environ, **path}
    )
    (mark,) = os.listdir(tmp_path)
    assert await is_gone(int(mark))


async def test_a_protocol_is_made_from_json_with_the_tools_of_a_server() -> None:
    options = {"command": PROGRAM, "tools": ["add"], "prefix": "my_", "env": {"THINGS_KEY": "k"}}
    runtime = scripted_runtime([tool_call("my_add", a=20, b=3), move("23")])
    protocol = make_protocol(
        "single_agent", runtime, agent="react", parser={"kind": "xml", "tag": "move"}, mcp=options
    )
    (rollout,) = await protocol.run(Countdown(1), RunSpec("e", env_seed=1, sampling_seed=1))
    assert rollout.agent_steps[0].tool_messages[0]["content"] == "23"
    assert rollout.error is None


async def test_only_the_variables_that_are_named_reach_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("THINGS_KEY", "secret")
    for options, seen in (({}, "-"), ({"pass_env": ["THINGS_KEY"]}, "secret")):
        opened = await MCPServer(PROGRAM, **options).open()  # type: ignore[arg-type]
        assert (await ask(opened, "who")).content.split()[1] == seen
        await opened.close()


async def test_two_servers_with_tools_of_one_name_are_refused_without_a_prefix() -> None:
    both = [MCPServer(PROGRAM), MCPServer(PROGRAM)]
    agent = scripted_agent([move("down")], ToolAgent, tool_sources=both)
    rollout = await play(agent)
    assert "add" in str(rollout.error)
    both = [MCPServer(PROGRAM), MCPServer(PROGRAM, prefix="other_")]
    script = [tool_call("other_add", a=1, b=1), move("x")]
    agent = scripted_agent(script, ToolAgent, tool_sources=both)
    assert (await play(agent)).agent_steps[0].tool_messages[0]["content"] == "2"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"command": ["/no/such/program"]}, ConfigError, "cannot be started: .*No such file"),
        ({"command": [*PROGRAM], "tools": ["sub"]}, ConfigError, "has no tools .'sub'."),
        ({"command": [sys.executable, "-c", ""]}, AgentError, "cannot be reached"),
        ({"url": "http://127.0.0.1:9/mcp"}, AgentError, "cannot be reached"),
        (
            {
                "command": [sys.executable, "-c", "import time; time.sleep(3600)"],
                "start_timeout_s": 0.5,
            },
            DeadlineError,
            "waited 0.5 s for its tools",
        ),
    ],
)
async def test_a_server_that_cannot_be_used_says_so_in_a_sentence(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        await MCPServer(**options).open()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either a `command` or a `url`"),
        ({"command": "python server.py"}, "give a list"),
        ({"command": ["x"], "connection": "once"}, "must be 'episode' or 'shared'"),
        ({"command": ["x"], "pass_env": ["NO_SUCH_VARIABLE"]}, "NO_SUCH_VARIABLE"),
        ({"comand": ["x"]}, "did you mean 'command'"),
    ],
)
def test_a_server_that_is_described_wrongly_is_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        mcp_server(options)


def test_stored_data_gets_no_program_started() -> None:
    with stored_names(), pytest.raises(ConfigError, match="stored data names an MCP server"):
        mcp_server({"command": PROGRAM})


async def test_a_tool_says_in_its_own_words_why_it_failed() -> None:
    def refuse() -> str:
        """Refuses."""
        raise ToolError("not on Sundays")

    assert (await call_tool(tools_by_name([refuse]), said("refuse"), timeout_s=5)).error == (
        "not on Sundays"
    )
