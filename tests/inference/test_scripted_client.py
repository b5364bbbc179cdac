from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic.errors import ConfigError, DeadlineError, EngineClosedError, RequestRejectedError
from ludic.inference import (
    ChatClient,
    HFChatTemplate,
    ReturnSpec,
    SamplingConfig,
    ScriptedCall,
    ScriptedChatClient,
    TokenCompletionRequest,
    VersionedClient,
)
from ludic.inference.tiny import tiny_tokenizer
from ludic.types import FinishReason, VersionSpan

TEMPLATE = HFChatTemplate(tiny_tokenizer())
PROMPT = tuple(TEMPLATE.render([{"role": "user", "content": "play"}]))
END = TEMPLATE.end_token_id


def request(conversation: str | None = None, **sampling: Any) -> TokenCompletionRequest:
    return TokenCompletionRequest(
        "script", PROMPT, SamplingConfig(**sampling), conversation_id=conversation
    )


def test_it_keeps_the_contract_of_a_versioned_client() -> None:
    client = ScriptedChatClient(["hi"], TEMPLATE)
    assert isinstance(client, ChatClient)
    assert isinstance(client, VersionedClient)


async def test_a_text_becomes_tokens_that_end_as_a_model_ends_them() -> None:
    client = ScriptedChatClient(["5 ✓"], TEMPLATE, logprob=-0.25, version=3)
    response = await client.complete_tokens(request())
    trace = response.trace
    assert trace is not None
    assert trace.prompt_token_ids == PROMPT
    assert trace.completion_token_ids == (*TEMPLATE.codec.encode("5 ✓"), END)
    assert trace.completion_logprobs == (-0.25,) * len(trace.completion_token_ids)
    assert trace.version_spans == (VersionSpan(0, len(trace.completion_token_ids), 3),)
    assert response.finish_reason == FinishReason.STOP
    assert response.text == "5 ✓"
    assert TEMPLATE.parse(response).message["content"] == "5 ✓"


async def test_logprobs_may_be_a_function_of_the_token_or_left_out() -> None:
    client = ScriptedChatClient(["ab"], TEMPLATE, cycle=True, logprob=lambda i, token: -float(i))
    response = await client.complete_tokens(request())
    assert response.trace is not None
    assert response.trace.completion_logprobs == (0.0, -1.0, -2.0)
    silent = TokenCompletionRequest("script", PROMPT, returns=ReturnSpec(logprobs=False))
    response = await client.complete_tokens(silent)
    assert response.trace is not None
    assert response.trace.completion_logprobs is None


async def test_every_conversation_reads_the_script_from_its_beginning() -> None:
    client = ScriptedChatClient(["one", "two"], TEMPLATE)
    said = [(await client.complete_tokens(request(c))).text for c in ("a", "b", "a", "b")]
    assert said == ["one", "one", "two", "two"]
    with pytest.raises(RequestRejectedError, match="2 texts, and conversation 'a'"):
        await client.complete_tokens(request("a"))


async def test_a_script_may_begin_anew_at_its_end() -> None:
    client = ScriptedChatClient(["one", "two"], TEMPLATE, cycle=True)
    said = [(await client.complete_tokens(request())).text for _ in range(5)]
    assert said == ["one", "two", "one", "two", "one"]


async def test_a_policy_function_sees_the_prompt_and_may_be_async() -> None:
    def policy(call: ScriptedCall) -> str:
        return f"{call.index}:{call.text.count('play')}:{call.tail(3)}"

    async def later(call: ScriptedCall) -> str:
        await asyncio.sleep(0)
        return policy(call)

    for script in (policy, later):
        client = ScriptedChatClient(script, TEMPLATE)
        await client.complete_tokens(request("a"))
        assert (await client.complete_tokens(request("a"))).text == "1:1:nt\n"
        assert client.calls == 2
        assert client.tokenize_seconds > 0


@given(
    text=st.text(st.characters(codec="utf-8") | st.just("\ufdd0"), max_size=30),
    stop=st.lists(st.text(min_size=1, max_size=3), max_size=2).map(tuple),
    stop_ids=st.lists(st.integers(0, 255), max_size=2).map(tuple),
    max_tokens=st.none() | st.integers(1, 40),
)
def test_a_completion_ends_at_the_first_stop_or_limit_and_keeps_what_stopped_it(
    text: str, stop: tuple[str, ...], stop_ids: tuple[int, ...], max_tokens: int | None
) -> None:
    client = ScriptedChatClient([text], TEMPLATE)
    asked = request(stop=stop, stop_token_ids=stop_ids, max_tokens=max_tokens)
    response = asyncio.run(client.complete_tokens(asked))
    assert response.trace is not None
    ids = response.trace.completion_token_ids
    whole = [*TEMPLATE.codec.encode(TEMPLATE.codec.guard(text)), END]

    def stops(prefix: list[int]) -> bool:
        spelled = TEMPLATE.codec.decode(prefix)
        return prefix[-1] in (*stop_ids, END) or any(s in spelled for s in stop)

    first = next(n for n in range(1, len(whole) + 1) if stops(whole[:n]))
    limit = len(whole) if max_tokens is None else max_tokens
    assert list(ids) == whole[: min(first, limit)]
    expected = FinishReason.STOP if first <= limit else FinishReason.LENGTH
    assert response.finish_reason == expected


async def test_a_text_that_spells_the_end_token_ends_there() -> None:
    client = ScriptedChatClient(["a<|im_end|>b"], TEMPLATE)
    response = await client.complete_tokens(request())
    assert response.text == "a"
    assert response.trace is not None
    assert response.trace.completion_token_ids[-1] == END


async def test_the_context_window_bounds_prompt_and_completion() -> None:
    client = ScriptedChatClient(["abcdef"], TEMPLATE, max_context_tokens=len(PROMPT) + 3)
    response = await client.complete_tokens(request())
    assert response.finish_reason == FinishReason.LENGTH
    assert response.text == "abc"
    small = ScriptedChatClient(["abc"], TEMPLATE, max_context_tokens=len(PROMPT))
    with pytest.raises(RequestRejectedError, match="leaves no room"):
        await small.complete_tokens(request())


async def test_versions_are_stamped_and_only_grow() -> None:
    client = ScriptedChatClient(["a"], TEMPLATE, cycle=True)
    assert await client.get_policy_version() == 0
    await client.sync_weights({}, version=4)
    assert await client.get_policy_version() == 4
    response = await client.complete_tokens(request())
    assert response.trace is not None
    assert response.trace.version_spans[0].version == 4
    with pytest.raises(RequestRejectedError, match="older"):
        await client.sync_weights({}, version=3)


async def test_a_slow_script_meets_its_deadline() -> None:
    async def slow(call: ScriptedCall) -> str:
        await asyncio.sleep(60)
        return "too late"

    asked = TokenCompletionRequest("script", PROMPT, timeout_s=0.01)
    for client in (
        ScriptedChatClient(["a"], TEMPLATE, latency_s=60),
        ScriptedChatClient(slow, TEMPLATE),
    ):
        with pytest.raises(DeadlineError, match="a completion from the script"):
            await client.complete_tokens(asked)


async def test_faults_come_when_they_are_asked_for() -> None:
    broken = ValueError("on purpose")
    client = ScriptedChatClient(
        ["a", "b"], TEMPLATE, fault=lambda call: broken if call.index == 0 else None
    )
    with pytest.raises(ValueError, match="on purpose"):
        await client.complete_tokens(request())
    assert (await client.complete_tokens(request())).text == "b"


async def test_a_time_out_of_the_script_itself_is_not_taken_for_the_deadline() -> None:
    async def impatient(call: ScriptedCall) -> str:
        raise TimeoutError("its own")

    asked = TokenCompletionRequest("script", PROMPT, timeout_s=30)
    with pytest.raises(TimeoutError, match="its own"):
        await ScriptedChatClient(impatient, TEMPLATE).complete_tokens(asked)


async def test_a_closed_client_refuses() -> None:
    client = ScriptedChatClient(["a"], TEMPLATE)
    await client.close()
    with pytest.raises(EngineClosedError):
        await client.complete_tokens(request())


async def test_bad_input_is_named() -> None:
    with pytest.raises(ConfigError, match="not one string"):
        ScriptedChatClient("abc", TEMPLATE)
    with pytest.raises(ConfigError, match="empty script"):
        ScriptedChatClient([], TEMPLATE)
    client = ScriptedChatClient(lambda call: 5, TEMPLATE)  # type: ignore[arg-type,return-value]
    with pytest.raises(RequestRejectedError, match="returned int"):
        await client.complete_tokens(request())
    with pytest.raises(RequestRejectedError, match="prompt is empty"):
        await client.complete_tokens(TokenCompletionRequest("script", ()))
