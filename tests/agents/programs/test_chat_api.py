"""What a program may send, and what it is told when it may not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic.agents.programs.chat_api import ApiError, ChatRequest, read_request
from ludic.inference import ToolRequest
from tests.agents.programs.asking import TOOL

BROKEN = {"type": "function", "function": {"name": "f", "arguments": "{"}}
HELLO = [{"role": "user", "content": "hello"}]


def read(**arguments: Any) -> ChatRequest:
    return read_request(json.dumps({"model": "m", "messages": HELLO, **arguments}).encode())


def refused(body: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read_request(body)
    error = caught.value
    assert error.body()["error"].keys() == {"message", "type", "param", "code"}
    assert error.body()["error"]["message"]
    return error


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("best_of", 2),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"50256": -100}),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "add"}}),
        ("parallel_tool_calls", False),
        ("functions", [{"name": "old"}]),
        ("logprobs", True),
        ("top_logprobs", 3),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "alloy"}),
        ("n", "2"),
        ("n", True),
    ],
)
def test_what_cannot_be_trained_on_is_refused_by_its_name(name: str, value: Any) -> None:
    error = refused(json.dumps({"model": "m", "messages": HELLO, name: value}).encode())
    assert (error.status, error.param, error.code) == (400, name, "unsupported_value")
    assert name in str(error)


def test_neutral_values_of_the_same_settings_pass() -> None:
    request = read(
        n=1, presence_penalty=0, frequency_penalty=0.0, logit_bias={}, tool_choice="auto",
        response_format={"type": "text"}, parallel_tool_calls=True, logprobs=False, best_of=None,
        user="u", metadata={"a": "b"}, store=False, reasoning_effort="low",
    )  # fmt: skip
    assert request == ChatRequest(({"role": "user", "content": "hello"},))


def test_sampling_settings_are_kept_apart_and_limits_are_the_smaller() -> None:
    request = read(
        temperature=0, top_p=0.5, seed=3, max_tokens=9, max_completion_tokens=7, stop="\n"
    )
    assert request.overruled == {"temperature": 0, "top_p": 0.5, "seed": 3}
    assert (request.max_tokens, request.stop) == (7, ("\n",))


def test_messages_are_read_as_templates_take_them() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    request = read(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "be"}]},
            {"role": "user", "content": "hi", "name": "ann"},
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "x": 1},
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ],
        tools=[TOOL],
    )
    assert request.messages == (
        {"role": "system", "content": "be"},
        {"role": "user", "content": "hi", "name": "ann"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "add", "arguments": {"a": 1}},
                }
            ],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
    )
    assert request.tools == ToolRequest([TOOL])
    assert read(tools=[TOOL], tool_choice="none").tools is None


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"model": None}, "model"),
        ({"model": 3}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": {"role": "user"}}, "messages"),
        ({"messages": ["hello"]}, "messages.0"),
        ({"messages": [{"role": "king", "content": ""}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "", "mood": 1}]}, "messages.0.mood"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content",
        ),
        ({"messages": [{"role": "tool", "content": "2"}]}, "messages.0.tool_call_id"),
        ({"messages": [{"role": "assistant", "tool_calls": [BROKEN]}]}, "messages.0.tool_calls"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "custom"}]}, "tools.0"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stop": ["", "x"]}, "stop"),
        ({"stop": 3}, "stop"),
        ({"tempreature": 1}, "tempreature"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_place(change: dict[str, Any], param: str) -> None:
    error = refused(json.dumps({"model": "m", "messages": HELLO, **change}).encode())
    assert (error.status, error.param) == (400, param)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"model": NaN}', b"[" * 100_000,
        b'{"model": "a", "model": "b"}', b'{"model": "\\ud800", "messages": []}', b"1" * 5000,
    ],
)  # fmt: skip
def test_a_body_that_is_no_request_is_refused_and_breaks_nothing(body: bytes) -> None:
    assert refused(body).status == 400


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "function", "name", "id", "tool_calls"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(
    st.dictionaries(
        st.sampled_from(["model", "messages", "tools", "stop", "stream", "stream_options", "n"]),
        JSON,
    )
)
def test_any_json_is_a_request_or_an_error_of_the_api(data: dict[str, Any]) -> None:
    error: ApiError | None = None
    try:
        assert read_request(json.dumps(data).encode()).messages
    except ApiError as exc:
        error = exc
    assert error is None or error.status == 400
    json.dumps(error and error.body())
