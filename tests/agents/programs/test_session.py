"""The tokens of a program's calls: extended, forked, repeated, and never recorded twice."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ludic.agents.programs.chat_api import ApiError
from ludic.errors import DeadlineError, InferenceError, QueueFullError
from ludic.inference import HFChatTemplate
from ludic.inference.local import LocalChatClient
from ludic.inference.sampling import InferenceSpec, SamplingConfig
from ludic.inference.scripted_client import ScriptedCall
from ludic.inference.tiny import tiny_model, tiny_tokenizer
from ludic.rollouts.storage import dialogue
from ludic.saw.building import build_items
from ludic.types import EnvironmentStep, ForkReason, Rollout, TruncationReason
from tests.agents.programs.asking import TOOL, Recorded, asking, check_exact, scripted, user
from tests.agents.scripted import FORKING_TEMPLATE, template_of
from tests.envs.waiting import eventually

RETRY = {"x-stainless-retry-count": "1"}
FIRST = {"x-stainless-retry-count": "0"}


def counted(call: ScriptedCall) -> str:
    """Says how many calls the conversation had, so that no two samples are the same."""
    return f"answer {call.index}"


async def test_a_request_that_continues_an_answer_extends_its_tokens() -> None:
    client = scripted(["one", "two", "three"])
    async with asking(client) as caller:
        messages: list[Any] = [user("hello")]
        for _ in range(3):
            messages += [await caller.ask(messages), user("go on")]
        steps = caller.session.take_steps()
    assert [step.message["content"] for step in steps] == ["one", "two", "three"]
    new = [message["content"] for step in steps for message in step.new_messages]
    assert new == ["hello", "go on", "go on"]
    check_exact(steps, client)
    assert all(step.fork is None for step in steps)
    assert caller.session.take_steps() == ()


async def test_tool_calls_and_their_answers_extend_too() -> None:
    said = 'Adding.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    client = scripted([said, "2"])
    async with asking(client) as caller:
        messages: list[Any] = [user("1 + 1")]
        answer = await caller.ask(messages, tools=[TOOL])
        (call,) = answer["tool_calls"]
        assert (answer["content"], call["function"]["name"]) == ("Adding.", "add")
        messages += [answer, {"role": "tool", "tool_call_id": call["id"], "content": "2"}]
        assert (await caller.ask(messages, tools=[TOOL]))["content"] == "2"
        steps = caller.session.take_steps()
    check_exact(steps, client)
    assert steps[1].fork is None
    assert steps[1].new_messages[0]["name"] == "add"
    # As for any agent with tools: the answer stands with its call, and is read back once.
    assert steps[0].tool_messages == steps[1].new_messages
    roles = [m["role"] for m in dialogue(Rollout("r", steps))]
    assert roles == ["user", "assistant", "tool", "assistant"]


async def test_a_call_that_the_template_spells_otherwise_forks_with_its_reason() -> None:
    said = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    template = template_of(tiny_tokenizer(), FORKING_TEMPLATE)
    client = scripted([said, "2"])
    async with asking(client, template) as caller:
        answer = await caller.ask([user("1 + 1")], tools=[TOOL])
        tool = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "2"}
        await caller.ask([user("1 + 1"), answer, tool], tools=[TOOL])
        steps = caller.session.take_steps()
    check_exact(steps, client)
    assert steps[1].fork is not None
    assert steps[1].fork.reason is ForkReason.TOOL_CALL_RERENDERED


async def test_an_unreadable_call_stays_text_and_is_recorded_as_an_error() -> None:
    client = scripted(["<tool_call>{oops</tool_call>"])
    async with asking(client) as caller:
        answer = await caller.ask([user("1 + 1")], tools=[TOOL])
        (step,) = caller.session.take_steps()
    assert "tool_calls" not in answer
    assert answer["content"] == "<tool_call>{oops</tool_call>"
    assert step.tool_call_errors


async def test_an_edited_history_is_a_fork_and_other_tools_are_too() -> None:
    client = scripted(["one", "two", "three", "four"])
    async with asking(client) as caller:
        first = await caller.ask([user("hello")])
        edited = {**first, "content": "one!"}
        await caller.ask([user("hello"), edited, user("go on")])
        await caller.ask([user("hello"), first, user("go on")], tools=[TOOL])
        await caller.ask([user("hello"), first, user("go on")])
        steps = caller.session.take_steps()
    check_exact(steps, client)
    forks = [step.fork for step in steps]
    assert [fork and fork.reason for fork in forks] == [
        None,
        ForkReason.HISTORY_REWRITTEN,
        ForkReason.TOOLS_CHANGED,
        ForkReason.HISTORY_REWRITTEN,
    ]
    assert forks[1] is not None
    assert "continue no earlier answer" in forks[1].detail
    assert forks[3] is not None
    assert "go on from answer 1" in forks[3].detail
    assert steps[1].new_messages[1]["content"] == "one!"
    # The last one goes back, but what was sampled first is still its beginning, token by token.
    assert steps[3].trace is not None
    assert steps[0].trace is not None
    assert steps[3].trace.extends(steps[0].trace)


async def test_two_conversations_in_turns_each_extend_their_own() -> None:
    client = scripted(counted)
    async with asking(client) as caller:
        ann, bob = [user("ann")], [user("bob")]
        for _ in range(3):
            ann += [await caller.ask(ann), user("go on")]  # type: ignore[list-item]
            bob += [await caller.ask(bob), user("go on")]  # type: ignore[list-item]
        steps = caller.session.take_steps()
    check_exact(steps, client)
    traces = [step.trace for step in steps]
    for before, after in ((0, 2), (2, 4), (1, 3), (3, 5)):
        assert traces[after].extends(traces[before])  # type: ignore[union-attr, arg-type]
    # All of it is two rows, and every sampled token is in one of them, once.
    rollout = Rollout("r", (*steps, EnvironmentStep(0, tuple(range(6)), "", "a", "", 1.0, True)))
    items = build_items([rollout], {("r", 0): 1.0})
    assert len(items) == 2
    assert sum(int(item.action_mask.sum()) for item in items) == rollout.num_tokens


async def test_a_retry_gets_the_same_tokens_and_the_same_question_another_sample() -> None:
    client = scripted(counted)
    async with asking(client) as caller:
        hello = [user("hello")]
        first = await caller.ask(hello, FIRST)
        again = await caller.ask(hello, RETRY)
        second = await caller.ask(hello, FIRST)
        assert await caller.ask(hello, {"x-stainless-retry-count": "2"}) == second
        steps = caller.session.take_steps()
    assert first == again
    assert (first["content"], second["content"]) == ("answer 0", "answer 1")
    assert len(client.responses) == len(steps) == 2
    seeds = {request.sampling.seed for request in client.requests}
    check_exact(steps, client)
    assert len(seeds) == 1  # none: this session has no seed


async def test_an_answer_is_the_same_object_down_to_its_id() -> None:
    async with asking(scripted(counted)) as caller:
        body = {"model": "m", "messages": [user("hello")]}
        assert await caller.post(body, FIRST) == await caller.post(body, RETRY)


async def test_a_retry_with_other_words_is_a_new_request() -> None:
    async with asking(scripted(counted)) as caller:
        await caller.ask([user("hello")], FIRST)
        assert (await caller.ask([user("hallo")], RETRY))["content"] == "answer 1"


async def test_a_retry_while_the_first_is_sampled_joins_it() -> None:
    client = scripted(counted)
    client.gate.clear()
    async with asking(client) as caller:
        tasks = [asyncio.create_task(caller.ask([user("hello")], FIRST))]
        await client.begun.wait()
        tasks += [asyncio.create_task(caller.ask([user("hello")], RETRY)) for _ in range(3)]
        await eventually(lambda: caller.session._asked[0].waiting == 4)
        client.gate.set()
        answers = await asyncio.gather(*tasks)
        steps = caller.session.take_steps()
    assert len(client.responses) == len(steps) == 1
    assert all(answer == answers[0] for answer in answers)


async def test_an_idempotency_key_is_honoured_and_not_for_another_request() -> None:
    client = scripted(counted)
    async with asking(client) as caller:
        key = {"Idempotency-Key": "k1"}
        assert await caller.ask([user("hi")], key) == await caller.ask([user("hi")], key)
        status, said = await caller.post({"model": "m", "messages": [user("ho")]}, key)
    assert (status, said["error"]["code"]) == (422, "idempotency_key_reused")
    assert len(client.responses) == 1


async def test_each_of_two_equal_requests_that_were_cut_finds_its_own_answer() -> None:
    client = scripted(counted)
    client.gate.clear()
    async with asking(client) as caller:
        tasks = [asyncio.create_task(caller.ask([user("hello")], FIRST)) for _ in range(2)]
        await eventually(lambda: len(client.requests) == 2)
        await caller.cut(*tasks)
        client.gate.set()
        await eventually(lambda: len(client.responses) == 2)
        await eventually(lambda: not any(asked.waiting for asked in caller.session._asked))
        assert caller.session.take_steps() == ()
        assert caller.session.undelivered == 2
        answers = [(await caller.ask([user("hello")], RETRY))["content"] for _ in range(2)]
        steps = caller.session.take_steps()
    assert sorted(answers) == ["answer 0", "answer 1"]
    assert len(steps) == len(client.responses) == 2


async def test_an_answer_that_nobody_got_is_not_recorded() -> None:
    client = scripted(counted)
    client.gate.clear()
    async with asking(client) as caller:
        task = asyncio.create_task(caller.ask([user("hello")], FIRST))
        await client.begun.wait()
        await caller.cut(task)
        client.gate.set()
        await eventually(lambda: bool(client.responses) and not caller.session._asked[0].waiting)
        assert (await caller.ask([user("hello")], FIRST))["content"] == "answer 1"
        (step,) = caller.session.take_steps()
    assert caller.session.undelivered == 1
    assert (step.message["content"], step.fork) == ("answer 1", None)


async def test_settings_of_the_run_go_before_those_of_a_request() -> None:
    client = scripted(["a long answer. And more."] * 3)
    sampling = SamplingConfig(temperature=0.7, max_tokens=12, stop=("!",))
    async with asking(client, inference=InferenceSpec(sampling), seed=5) as caller:
        await caller.ask([user("hello")], temperature=0.0, top_p=0.1, seed=1, max_tokens=1000)
        await caller.ask([user("hello")], max_completion_tokens=3, stop=["long"])
        answer = await caller.ask([user("hello")], temperature=0.7, stop=["ng"])
        steps = caller.session.take_steps()
    used = [request.sampling for request in client.requests]
    assert [(s.temperature, s.top_p, s.max_tokens) for s in used] == [
        (0.7, 1.0, 12), (0.7, 1.0, 3), (0.7, 1.0, 12)
    ]  # fmt: skip
    assert used[1].stop == ("!", "long")
    assert len({s.seed for s in used}) == 3
    assert steps[0].info["overruled"] == {"temperature": 0.0, "top_p": 0.1, "seed": 1}
    assert "overruled" not in steps[2].info
    assert steps[0].sampling["temperature"] == 0.7
    # A stop string is not shown, as the API has it, but it was sampled and is trained on.
    assert answer["content"] == "a lo"
    assert steps[2].message["content"] == "a long"


async def test_what_follows_a_stop_string_still_extends_the_tokens() -> None:
    client = scripted(["Thought: hm\nObservation: x", "done"])
    async with asking(client) as caller:
        answer = await caller.ask([user("hello")], stop=["\nObservation:"])
        assert answer["content"] == "Thought: hm"
        await caller.ask([user("hello"), answer, user("Observation: y")])
        steps = caller.session.take_steps()
    check_exact(steps, client)
    assert steps[1].fork is None


async def test_a_full_context_and_a_spent_budget_are_said_and_remembered() -> None:
    client = scripted(counted, max_context_tokens=120)
    async with asking(client, max_calls=2) as caller:
        body: dict[str, Any] = {"model": "m", "messages": [user("x" * 200)]}
        status, said = await caller.post(body)
        assert (status, said["error"]["code"]) == (400, "context_length_exceeded")
        assert caller.session.cut is TruncationReason.CONTEXT_WINDOW
        await caller.ask([user("x")])
        assert caller.session.cut is None
        status, said = await caller.post({**body, "messages": [user("y")]})
        assert (status, said["error"]["code"]) == (400, "max_calls")
        assert caller.session.cut is TruncationReason.BUDGET


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (QueueFullError("full"), 429),
        (DeadlineError("a completion", "model", 1.0), 504),
        (InferenceError("gone"), 502),
        (RuntimeError("a bug"), 500),
    ],
)
async def test_a_backend_that_fails_is_an_error_of_the_api_and_a_retry_samples_anew(
    error: Exception, status: int
) -> None:
    client = scripted(counted, fault=lambda call: error if call.index == 0 else None)
    async with asking(client) as caller:
        body = {"model": "m", "messages": [user("hello")]}
        found, said = await caller.post(body, FIRST)
        assert (found, bool(said["error"]["message"])) == (status, True)
        assert (await caller.ask([user("hello")], RETRY))["content"] == "answer 1"
        assert len(caller.session.take_steps()) == 1
        assert len(caller.session.failures) == 1


async def test_messages_that_the_template_cannot_spell_are_the_programs_fault() -> None:
    plain = template_of(tiny_tokenizer(), "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    async with asking(scripted(counted), plain) as caller:
        status, said = await caller.post(
            {"model": "m", "messages": [user("hello")], "tools": [TOOL]}
        )
    assert status == 400
    assert "tools" in said["error"]["message"]


async def test_the_end_of_a_session_breaks_off_what_is_sampled() -> None:
    client = scripted(counted)
    client.gate.clear()
    async with asking(client) as caller:
        task = asyncio.create_task(caller.post({"model": "m", "messages": [user("hello")]}))
        await client.begun.wait()
        await caller.session.end()
        status, said = await task
        assert caller.session.take_steps() == ()
        assert (status, said["error"]["type"]) == (503, "server_error")
        assert (await caller.post({"model": "m", "messages": [user("hello")]}))[0] == 401


async def test_what_a_real_model_babbles_is_extended_exactly() -> None:
    """Random bytes are hardly ever text: what is sent back must not be encoded again."""
    tokenizer = tiny_tokenizer()
    inference = InferenceSpec(SamplingConfig(max_tokens=6))
    model = tiny_model(max_position_embeddings=512)
    async with LocalChatClient(model, tokenizer, max_slots=4, max_context_tokens=512) as engine:
        client = Recorded(engine)
        template = HFChatTemplate(tokenizer)
        async with asking(client, template, inference=inference, seed=3) as caller:

            async def talk(name: str) -> None:
                messages: list[Any] = [user(name)]
                for _ in range(4):
                    messages += [await caller.ask(messages), user("go on")]

            await asyncio.gather(talk("ann"), talk("bob"), talk("ann"))
            steps = caller.session.take_steps()
    assert len(steps) == len(client.responses) == 12
    assert len({request.sampling.seed for request in client.requests}) == 12
    sampled = [response.trace for response in client.responses]
    assert all(step.trace in sampled for step in steps)
    rollout = Rollout("r", (*steps, EnvironmentStep(0, tuple(range(12)), "", "a", "", 1.0, True)))
    items = build_items([rollout], {("r", 0): 1.0})
    trained = sum(int(item.action_mask.sum()) for item in items)
    assert trained == sum(len(trace.completion_token_ids) for trace in sampled if trace)
    extended = [s for s in steps if s.fork is None or "go on from" in s.fork.detail]
    assert len(extended) >= 9 - sum(
        s.fork is not None and s.fork.reason is not ForkReason.HISTORY_REWRITTEN for s in steps
    )


def test_api_errors_know_their_type() -> None:
    assert ApiError(429, "slow").body()["error"]["type"] == "rate_limit_error"
    assert ApiError(500, "oh").body()["error"]["type"] == "server_error"
    assert ApiError(401, "who").body()["error"]["type"] == "invalid_request_error"
