"""The built-in tools, by name: a Python that remembers, and a calculator that cannot be misused."""

from __future__ import annotations

import json
import math
import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic.agents.tools import Tool, call_tool
from ludic.envs.code_exec import PythonTool, calculator
from ludic.envs.code_exec.sandbox import pool
from ludic.envs.code_exec.sandbox.base import Limits
from ludic.envs.code_exec.tools import session_pool
from ludic.inference import HermesToolParser, HFChatTemplate, ScriptedChatClient
from ludic.inference.tiny import tiny_tokenizer
from ludic.interaction import Runtime
from ludic.registry import get_tool, list_tools
from ludic.rollouts import EnvSpec, ProtocolSpec, RolloutEngine, RolloutRequest
from ludic.types import AgentStep

pytestmark = [pytest.mark.integration]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        ("(1 + 2) * 3", "9"),
        ("-2 ** 2", "-4"),
        ("2^10", "1024"),
        ("7 // 2 + 7 % 2", "4"),
        ("10 / 4", "2.5"),
        ("sqrt(16) + max(1, 2)", "6.0"),
        ("round(pi, 2)", "3.14"),
        ("3 × 4 ÷ 2", "6.0"),
        ("9" * 100 + " + 1", "1" + "0" * 100),
    ],
)
def test_arithmetic_is_right(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["", "1 +", "__import__('os')", "().__class__", "x", "'a' * 9", "[1]", "lambda: 1",
     "1 if 1 else 2",
     "9**9**9", "2**100000", "10**400 * 10**4000", "(" * 300 + "1" + ")" * 300, "1" * 2000,
     "(-1)**0.5", "abs(x=1)", "round('a')", "max()", "1 / 0", "True + 1", "1j", "exp(1e9)",
     "round(1, 9**99)", "round(7, -10**9)", "factorial(9)"],
)  # fmt: skip
def test_all_else_is_an_error_and_quick(expression: str) -> None:
    with pytest.raises((ValueError, ArithmeticError, TypeError)):
        calculator(expression)


@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9), st.sampled_from("+-*"))
def test_it_agrees_with_python(a: int, b: int, sign: str) -> None:
    assert int(calculator(f"({a}) {sign} ({b})")) == eval(f"({a}) {sign} ({b})")


@given(st.text(max_size=40))
def test_no_text_does_anything_but_give_a_number_or_an_error(text: str) -> None:
    try:
        value = calculator(text)
    except (ValueError, ArithmeticError, TypeError):
        return
    assert math.isnan(float(value)) or float(value) is not None


def test_both_are_registered() -> None:
    assert set(list_tools()) >= {"python", "calculator"}
    assert get_tool("calculator") is calculator
    assert get_tool("python") is PythonTool


@pytest.mark.sandbox
def test_a_session_keeps_its_state_until_it_is_closed() -> None:
    tool = PythonTool()
    assert tool("x = 6\nprint('made')") == "made\n"
    assert tool("open('note', 'w').write('kept')\nx * 7") == "42\n"
    assert tool("open('note').read()") == "'kept'\n"
    assert "ZeroDivisionError" in tool("1 / 0")
    assert tool("x") == "6\n"
    tool.close()
    assert "NameError" in tool("x")
    tool.close()


@pytest.mark.sandbox
def test_a_session_that_hangs_dies_or_floods_is_replaced() -> None:
    tool = PythonTool(call_s=1.0, limits=Limits(wall_s=600, cpu_s=60, output_kb=64 * 1024))
    assert "did not end within 1 s" in tool("x = 1\nwhile True: pass")
    assert "NameError" in tool("x")
    assert "session ended" in tool("import os; os._exit(3)")
    assert "null bytes" in tool("x\0")
    assert tool("input()").endswith("EOFError: EOF when reading a line\n")
    long = tool("print('a' * 99999)")
    assert len(long) < 9000
    assert "characters …" in long
    assert "PermissionError" in tool("import socket; socket.socket()")
    tool.close()
    assert not session_pool("bubblewrap")._leased


def test_a_forked_process_has_its_own_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "SandboxPool", lambda *args, **options: object())
    monkeypatch.setattr(pool, "_shared", {})
    own = session_pool("bubblewrap")
    assert session_pool("bubblewrap") is own
    with monkeypatch.context() as forked:  # as in a fork, which has a copy of all this
        forked.setattr(os, "getpid", lambda: -1)
        other = session_pool("bubblewrap")
    assert other is not own


@pytest.mark.sandbox
async def test_as_tools_they_have_schemas_and_answer_calls() -> None:
    tools = {tool.name: tool for tool in (Tool.of(PythonTool()), Tool.of(calculator))}
    assert tools["python"].schema["function"]["parameters"]["required"] == ["code"]
    assert "Python code" in tools["python"].description

    async def ask(name: str, **arguments: Any) -> str:
        call: Any = {
            "id": "1",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        return (await call_tool(tools, call, timeout_s=30)).content

    assert await ask("python", code="2 + 2") == "4\n"
    assert await ask("calculator", expression="2 + 2") == "4"
    assert "not an arithmetic expression" in await ask("calculator", expression="2 +")
    tools["python"].function.close()  # type: ignore[attr-defined]


@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("agent", "rounds"), [("tool", "max_tool_rounds"), ("react", "max_rounds")]
)
async def test_agents_of_a_run_use_them_and_leave_no_session(agent: str, rounds: str) -> None:
    def call(name: str, **arguments: Any) -> str:
        text = json.dumps({"name": name, "arguments": arguments})
        return f"<tool_call>{text}</tool_call>"

    answers = [
        call("python", code="x = 6"),
        call("python", code="x * 7"),
        call("calculator", expression="6 * 7"),
        "\\boxed{42}",
    ]
    template = HFChatTemplate(tiny_tokenizer(), tool_parser=HermesToolParser())
    runtime = Runtime(ScriptedChatClient(answers, template), template, "script")
    request = RolloutRequest(
        env=EnvSpec("dataset_qa", {"rows": [{"question": "6 times 7?", "answer": "42"}]}),
        protocol=ProtocolSpec(
            "single_agent",
            {
                "agent": agent,
                "tools": ["python", "calculator"],
                "parser": {"kind": "boxed"},
                rounds: 5,
            },
        ),
    )
    (rollout,) = await RolloutEngine(runtime=runtime, seed=0).generate_rollouts(
        [request], max_steps=1
    )
    assert rollout.error is None
    calls = [step for step in rollout.steps if isinstance(step, AgentStep)]
    said = [message["content"] for step in calls for message in step.tool_messages]
    assert [text.split("\n")[0] for text in said] == ["", "42", "42"]
    assert not session_pool("bubblewrap")._leased
