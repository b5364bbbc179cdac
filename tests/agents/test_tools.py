from __future__ import annotations

import asyncio
import json
import threading
from enum import Enum
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic.agents import Tool, tools
from ludic.agents.tools import call_tool, tools_by_name
from ludic.errors import NoThreadError, ToolError
from ludic.types import ToolCall
from ludic.workers.threads import EnvThreads


def call(name: str, **arguments: Any) -> ToolCall:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


class Colour(Enum):
    RED = "red"


def add(a: int, b: int = 1) -> int:
    """Adds two numbers.

    It does so exactly.

    Args:
        a: The first one.
        b (int): The second one,
            on two lines.

    Returns:
        The sum.
    """
    return a + b


async def run(function: Any, timeout_s: float | None = 5.0, **arguments: Any) -> Any:
    tools = tools_by_name([function])
    return await call_tool(tools, call(function.__name__, **arguments), timeout_s=timeout_s)


def test_the_schema_comes_from_signature_and_docstring() -> None:
    assert Tool.of(add).schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers. It does so exactly.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The first one."},
                    "b": {
                        "type": "integer",
                        "description": "The second one, on two lines.",
                        "default": 1,
                    },
                },
                "required": ["a"],
            },
        },
    }


def test_an_argument_may_be_named_like_an_attribute_of_pydantic() -> None:
    def odd(schema: str, json: int, model_config: bool = False) -> str:
        return f"{schema}{json}{model_config}"

    tool = Tool.of(odd)
    assert tool.schema["function"]["parameters"]["required"] == ["schema", "json"]
    assert tool.check({"schema": "a", "json": 2}) == {
        "schema": "a",
        "json": 2,
        "model_config": False,
    }


def test_types_beyond_the_plain_ones_are_understood() -> None:
    def paint(colour: Colour, where: Literal["wall", "door"], sizes: list[float]) -> str:
        return ""

    parameters = Tool.of(paint).schema["function"]["parameters"]
    assert parameters["properties"]["where"]["enum"] == ["wall", "door"]
    checked = Tool.of(paint).check({"colour": "red", "where": "door", "sizes": [1, 2.5]})
    assert checked["colour"] is Colour.RED


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: lambda x: x, "not a name that a model can call"),
        (lambda: _untyped, "has no type annotation"),
        (lambda: _variadic, "cannot be passed by name"),
        (lambda: _unreadable, "signature cannot be read"),
        (lambda: _unrepresentable, "no JSON schema"),
    ],
)
def test_what_cannot_be_a_tool_says_why(make: Any, complaint: str) -> None:
    with pytest.raises(ToolError, match=complaint):
        Tool.of(make())


def _untyped(x):  # type: ignore[no-untyped-def]
    return x


def _variadic(*xs: int) -> int:
    return sum(xs)


def _unreadable(x: NoSuchType) -> None:  # type: ignore[name-defined]  # noqa: F821
    return None


def _unrepresentable(x: threading.Thread) -> None:
    return None


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ToolError, match="two tools are named 'add'"):
        tools_by_name([add, Tool.of(_variadic_free, name="add")])


def _variadic_free(x: int) -> int:
    return x


async def test_a_tool_answers_with_text() -> None:
    result = await run(add, a=2, b=3)
    assert (result.content, result.error) == ("5", None)


async def test_values_that_are_not_text_are_written_as_json() -> None:
    def look() -> dict[str, Any]:
        return {"n": [1, None], "s": "é"}

    assert (await run(look)).content == '{"n":[1,null],"s":"é"}'


async def test_a_plain_function_runs_in_a_thread_and_a_coroutine_on_the_loop() -> None:
    def where() -> bool:
        return threading.current_thread() is threading.main_thread()

    async def where_async() -> bool:
        return threading.current_thread() is threading.main_thread()

    assert (await run(where)).content == "false"
    assert (await run(where_async)).content == "true"


async def test_an_object_whose_call_is_async_is_a_tool_too() -> None:
    class Adder:
        async def __call__(self, a: int) -> int:
            return a + 1

    tools = tools_by_name([Tool.of(Adder(), name="increment")])
    result = await call_tool(tools, call("increment", a=1), timeout_s=5.0)
    assert (result.content, result.error) == ("2", None)


async def test_a_slow_plain_tool_does_not_hold_up_the_event_loop() -> None:
    release = threading.Event()

    def slow() -> str:
        return "released" if release.wait(10) else "stuck"

    task = asyncio.create_task(run(slow, timeout_s=20.0))
    await asyncio.sleep(0)  # the loop still turns: it is what releases the tool
    release.set()
    assert (await task).content == "released"


async def test_a_missing_tool_is_an_answer_that_names_the_others() -> None:
    result = await call_tool(tools_by_name([add]), call("subtract"), timeout_s=1.0)
    assert result.error == "there is no tool 'subtract'; the tools are: add"
    assert result.content == f"Error: {result.error}"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"a": "many"}, "a: Input should be a valid integer"),
        ({}, "a: Field required"),
        ({"a": 1, "c": 2}, "c: Extra inputs are not permitted"),
        ({"a": [1]}, "a: Input should be a valid integer"),
        ({"a": None}, "a: Input should be a valid integer"),
    ],
)
async def test_wrong_arguments_are_an_answer_that_names_them(
    arguments: dict[str, Any], complaint: str
) -> None:
    result = await run(add, **arguments)
    assert result.error is not None
    assert "bad arguments for tool 'add'" in result.error
    assert complaint in result.error


async def test_a_tool_that_raises_is_an_answer() -> None:
    def divide(a: int) -> float:
        return 1 / a

    async def divide_async(a: int) -> float:
        return 1 / a

    for function in (divide, divide_async):
        result = await run(function, a=0)
        assert result.error == (
            f"tool {function.__name__!r} raised ZeroDivisionError: division by zero"
        )


async def test_a_tool_that_wants_to_end_the_program_only_fails() -> None:
    def leave() -> None:
        raise SystemExit(3)

    assert (await run(leave)).error == "tool 'leave' raised SystemExit: 3"


async def test_a_tool_past_its_deadline_is_an_answer() -> None:
    release = threading.Event()

    def hang() -> None:
        release.wait(30)

    async def hang_async() -> None:
        await asyncio.sleep(30)

    async def own_timeout() -> None:
        raise TimeoutError("mine")

    for function in (hang, hang_async):
        result = await run(function, timeout_s=0.01)
        assert result.error == f"tool {function.__name__!r} did not answer within 0.01 s"
    assert (await run(own_timeout)).error == "tool 'own_timeout' raised TimeoutError: mine"
    release.set()


async def test_cancelling_a_tool_call_propagates() -> None:
    async def hang() -> None:
        await asyncio.sleep(30)

    task = asyncio.create_task(run(hang, timeout_s=None))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(arguments=st.dictionaries(st.sampled_from(["a", "b", "c", ""]), json_values, max_size=3))
def test_any_json_arguments_give_an_answer_and_never_an_exception(
    arguments: dict[str, Any],
) -> None:
    async def coroutine(a: int, b: int = 1) -> int:
        return a + b

    tools = tools_by_name([Tool.of(coroutine, name="add")])
    result = asyncio.run(call_tool(tools, call("add", **arguments), timeout_s=5.0))
    if result.error is None:
        assert isinstance(json.loads(result.content), int)
    else:
        assert result.content == f"Error: {result.error}"


async def test_when_too_many_tools_hang_the_next_call_fails_and_is_not_the_tools_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released = threading.Event()
    monkeypatch.setattr(tools, "_threads", EnvThreads(max_abandoned=0))

    def wait() -> None:
        """Hangs."""
        released.wait(60)

    try:
        assert "did not answer within" in (await run(wait, timeout_s=0.01)).content
        with pytest.raises(NoThreadError, match="1 worker threads hang"):
            await run(wait, timeout_s=0.01)
    finally:
        released.set()
