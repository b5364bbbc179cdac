from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from ludic.agents import ActResult, Agent, ReActAgent, Tool, ToolAgent
from ludic.errors import AgentError, ConfigError, ToolError
from ludic.inference import HFChatTemplate, SamplingConfig, ToolRequest
from ludic.inference.tiny import tiny_tokenizer
from ludic.parsers import ParseResult
from ludic.types import FinishReason, ForkReason, ToolCall, TruncationReason
from tests.agents.scripted import (
    FORKING_TEMPLATE,
    TOOL_TEMPLATE,
    move,
    roles,
    scripted_agent,
    template_of,
    tool_call,
)


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def fail() -> None:
    """Always fails."""
    raise RuntimeError("out of order")


async def ask(task: str) -> str:
    """Asks somebody else.

    Args:
        task: What to do.
    """
    raise AssertionError("external tools are not run by the agent")


async def turn(agent: ToolAgent) -> Any:
    agent.reset("Use the tools.", seed=1, conversation_id="c")
    agent.on_env_reset("What is 2 + 3 + 4?", {})
    return await agent.act()


async def test_tools_run_inside_the_turn_and_every_model_call_is_a_step() -> None:
    agent = scripted_agent([tool_call("add", a=2, b=3), move("5")], ToolAgent, tools=[add])
    act = await turn(agent)
    assert act.parse.action == "5"
    first, second = act.steps
    assert first.message["tool_calls"][0]["function"]["name"] == "add"
    assert [m["content"] for m in first.tool_messages] == ["5"]
    assert first.tool_messages[0]["tool_call_id"] == first.message["tool_calls"][0]["id"]
    assert roles(second) == ["tool"]
    assert first.turn_index == second.turn_index == 0
    assert first.sampling["seed"] != second.sampling["seed"]


async def test_a_long_answer_is_cut_at_the_agents_limit_and_says_how_much() -> None:
    def digits(count: int) -> str:
        """Many digits."""
        return "".join(str(i % 10) for i in range(count))

    script = [tool_call("digits", count=30), tool_call("digits", count=20), move("5")]
    agent = scripted_agent(script, ToolAgent, tools=[digits], max_tool_chars=20)
    first, second, _ = (await turn(agent)).steps
    cut = "0123456789\n[… 10 characters were left out …]\n0123456789"
    assert [m["content"] for m in first.tool_messages] == [cut]
    assert [m["content"] for m in second.tool_messages] == ["01234567890123456789"]


async def test_the_limit_holds_for_complaints_and_can_be_taken_away() -> None:
    def say(words: str) -> str:
        """Repeats."""
        raise ToolError(words)

    for limit, shown in ((50, 100), (None, 20_007)):
        script = [tool_call("say", words="x" * 20_000), move("5")]
        agent = scripted_agent(script, ReActAgent, tools=[say], max_tool_chars=limit)
        content = (await turn(agent)).steps[0].tool_messages[0]["content"]
        assert content.startswith("Error: xxx")
        assert len(content) <= shown
    with pytest.raises(AgentError, match="max_tool_chars=0"):
        scripted_agent([move("5")], ToolAgent, tools=[say], max_tool_chars=0)


async def test_an_agent_of_ones_own_shows_tools_as_a_request() -> None:
    class Told(Agent):
        async def act(self) -> ActResult:
            self.begin_turn()
            call = await self.call_model(ToolRequest([Tool.of(add).schema]))
            assert call is not None
            assert call.tools is not None
            self.record(call)
            return self.conclude(call)

    template = template_of(tiny_tokenizer(), TOOL_TEMPLATE)
    agent = scripted_agent([move("5")], Told, template=template)
    act = await turn(agent)  # type: ignore[arg-type]
    ids = act.steps[0].trace.prompt_token_ids
    assert '"name": "add"' in tiny_tokenizer().decode(ids)


async def test_no_parser_punishes_a_tool_call() -> None:
    agent = scripted_agent([tool_call("add", a=2, b=3), move("5")], ToolAgent, tools=[add])
    assert (await turn(agent)).parse.reward == 0.25


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (tool_call("subtract", a=1), "there is no tool 'subtract'"),
        (tool_call("add", a="x", b=1), "bad arguments for tool 'add': a:"),
        (tool_call("fail"), "tool 'fail' raised RuntimeError: out of order"),
        ("<tool_call>[1, 2]</tool_call>", "a tool call must be a JSON object"),
        ("<tool_call>{oh</tool_call>", "broken JSON"),
        ("<tool_call>", "without </tool_call>"),
    ],
)
async def test_a_tool_call_that_fails_is_answered_and_the_loop_goes_on(
    answer: str, complaint: str
) -> None:
    agent = scripted_agent([answer, move("5")], ToolAgent, tools=[add, fail])
    act = await turn(agent)
    assert act.parse.action == "5"
    assert len(act.steps) == 2
    (message,) = act.steps[0].tool_messages
    assert message["role"] == "tool"
    assert message["content"].startswith("Error: ")
    assert complaint in message["content"]
    (error,) = act.steps[0].tool_call_errors
    assert complaint in error
    assert act.steps[1].tool_call_errors == ()


async def test_a_tool_that_hangs_is_answered_and_the_loop_goes_on() -> None:
    async def hang() -> None:
        await asyncio.sleep(3600)

    agent = scripted_agent(
        [tool_call("hang"), move("5")], ToolAgent, tools=[hang], tool_timeout_s=0.01
    )
    act = await turn(agent)
    assert act.parse.action == "5"
    assert act.steps[0].tool_call_errors == ("tool 'hang' did not answer within 0.01 s",)


async def test_several_calls_of_one_message_are_answered_in_their_order() -> None:
    both = tool_call("add", a=1, b=1) + "\n" + tool_call("add", a=2, b=2)
    agent = scripted_agent([both, move("5")], ToolAgent, tools=[add])
    act = await turn(agent)
    assert [m["content"] for m in act.steps[0].tool_messages] == ["2", "4"]


async def test_external_tools_are_handed_to_the_protocol() -> None:
    seen: list[str] = []

    async def handler(call: ToolCall) -> str:
        seen.append(call["function"]["arguments"]["task"])
        return "nine"

    agent = scripted_agent(
        [tool_call("ask", task="2 + 3 + 4"), move("9")],
        ToolAgent,
        tools=[add],
        external_tools=[ask],
        external_tool_handler=handler,
    )
    act = await turn(agent)
    assert seen == ["2 + 3 + 4"]
    assert act.steps[0].tool_messages[0]["content"] == "nine"
    assert act.parse.action == "9"


async def test_external_calls_of_one_message_run_at_the_same_time() -> None:
    together = asyncio.Barrier(2)

    async def handler(call: ToolCall) -> str:
        async with asyncio.timeout(10):
            await together.wait()
        return str(call["function"]["arguments"]["task"])

    calls = [tool_call("ask", task="a"), tool_call("add", a=1, b=2), tool_call("ask", task="b")]
    agent = scripted_agent(
        ["\n".join(calls), move("1")],
        ToolAgent,
        tools=[add],
        external_tools=[ask],
        external_tool_handler=handler,
    )
    act = await turn(agent)
    assert [m["content"] for m in act.steps[0].tool_messages] == ["a", "3", "b"]


async def test_what_an_external_tool_refuses_is_told_to_the_model() -> None:
    async def handler(call: ToolCall) -> str:
        if call["function"]["arguments"]["task"] == "slow":
            await asyncio.sleep(3600)
        raise ToolError("not today")

    agent = scripted_agent(
        [
            tool_call("ask", task="x"),
            tool_call("ask", nothing=1),
            tool_call("ask", task="slow"),
            move("1"),
        ],
        ToolAgent,
        external_tools=[ask],
        external_tool_handler=handler,
        external_tool_timeout_s=0.01,
    )
    act = await turn(agent)
    refused, wrong, slow = (s.tool_call_errors[0] for s in act.steps[:3])
    assert refused == "not today"
    assert "bad arguments for tool 'ask'" in wrong
    assert slow == "tool 'ask' did not answer within 0.01 s"


async def test_an_external_tool_without_a_handler_is_an_error_that_says_so() -> None:
    agent = scripted_agent([tool_call("ask", task="x")], ToolAgent, external_tools=[ask])
    with pytest.raises(AgentError, match="no external_tool_handler"):
        await turn(agent)


def test_one_name_for_an_internal_and_an_external_tool_is_refused() -> None:
    with pytest.raises(ToolError, match="both internal and external"):
        scripted_agent([""], ToolAgent, tools=[ask], external_tools=[ask])


async def test_past_the_bound_calls_are_not_run_and_the_turn_gives_no_action() -> None:
    ran: list[int] = []

    def count() -> str:
        """Counts."""
        ran.append(1)
        return "counted"

    agent = scripted_agent([tool_call("count")] * 9, ToolAgent, tools=[count], max_tool_rounds=2)
    act = await turn(agent)
    assert len(ran) == 2
    assert len(act.steps) == 3
    assert act.parse.action is None
    assert "not run" in act.steps[-1].tool_messages[0]["content"]


async def test_an_answer_beside_a_refused_call_is_taken() -> None:
    agent = scripted_agent(
        [f"{move('5')}{tool_call('add', a=1, b=1)}"], ToolAgent, tools=[add], max_tool_rounds=0
    )
    act = await turn(agent)
    assert act.parse.action == "5"
    assert act.parse.reward == 0.25


async def test_a_cut_message_calls_no_tools() -> None:
    ran: list[int] = []

    def count() -> str:
        """Counts."""
        ran.append(1)
        return "counted"

    agent = scripted_agent(
        [tool_call("count") + " and then I go on and on"],
        ToolAgent,
        tools=[count],
        sampling=SamplingConfig(max_tokens=len(tool_call("count")) + 4),
    )
    act = await turn(agent)
    assert act.steps[0].finish_reason is FinishReason.LENGTH
    assert not ran
    assert act.parse.action is None


async def test_a_context_that_fills_up_inside_the_turn_is_an_ending_with_the_steps_so_far() -> None:
    def read() -> str:
        """Reads a very long page."""
        return "x" * 5000

    agent = scripted_agent(
        [tool_call("read"), move("5")],
        ToolAgent,
        tools=[read],
        client={"max_context_tokens": 4000},
    )
    act = await turn(agent)
    assert act.truncation is TruncationReason.CONTEXT_WINDOW
    assert len(act.steps) == 1
    assert act.parse.action is None
    assert act.parse.reward == -0.5, "filling the context is no way around the penalty"


async def test_a_prompt_that_never_fitted_is_not_the_models_doing() -> None:
    agent = scripted_agent([move("5")], ToolAgent, tools=[add], client={"max_context_tokens": 10})
    act = await turn(agent)
    assert act.truncation is TruncationReason.CONTEXT_WINDOW
    assert act.parse.reward == 0.0


async def test_a_template_without_a_tool_parser_gets_the_one_that_reads_its_calls() -> None:
    plain = HFChatTemplate(tiny_tokenizer())
    script = [tool_call("add", a=2, b=3), move("5")]
    agents = [scripted_agent(script, ToolAgent, template=plain, tools=[add]) for _ in range(2)]
    act = await turn(agents[0])
    assert [m["content"] for m in act.steps[0].tool_messages] == ["5"]
    assert act.parse.action == "5"
    assert agents[0].chat_template is agents[1].chat_template, "made once, for all agents"
    assert plain.tool_parser is None, "agents without tools read no calls, as before"
    assert scripted_agent(script, ToolAgent, template=plain).chat_template is plain


@pytest.mark.parametrize(
    ("source", "remedy"),
    [
        (TOOL_TEMPLATE.replace("<tool_call>", "<call>"), "model.tool_parser"),
        (TOOL_TEMPLATE.replace("arguments'] | tojson", "arguments'] | string"), "tool_parser="),
        ("{{ messages[0]['content'] }}", "does not show tools"),
    ],
    ids=["other tags", "not JSON", "no tools"],
)
def test_tools_whose_calls_could_not_be_read_are_refused_with_the_remedy(
    source: str, remedy: str
) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = source
    with pytest.raises(ConfigError, match=remedy):
        scripted_agent([""], ToolAgent, template=HFChatTemplate(tokenizer), tools=[add])


async def test_a_react_turn_is_bounded_and_its_last_round_is_told_to_answer() -> None:
    agent = scripted_agent(
        [tool_call("add", a=2, b=3), tool_call("add", a=5, b=4), move("9")],
        ReActAgent,
        tools=[add],
        max_rounds=3,
    )
    act = await turn(agent)
    assert act.parse.action == "9"
    assert len(act.steps) == 3
    assert act.steps[0].tool_messages[0]["content"] == "5"
    assert act.steps[1].tool_messages[0]["content"].startswith("9\n\nNo tool calls are left")


async def test_a_react_agent_that_does_not_answer_in_its_last_round_gives_no_action() -> None:
    agent = scripted_agent([tool_call("add", a=2, b=3)] * 9, ReActAgent, tools=[add], max_rounds=3)
    act = await turn(agent)
    assert len(act.steps) == 3
    assert act.parse.action is None


async def test_calling_tools_for_ever_costs_as_much_as_not_answering() -> None:
    calls = [tool_call("add", a=2, b=3)] * 9
    for cls in (ToolAgent, ReActAgent):
        act = await turn(scripted_agent(calls, cls, tools=[add]))
        silent = await turn(scripted_agent(["I pass."], cls, tools=[add]))
        assert act.parse.action is silent.parse.action is None
        assert act.parse.reward == silent.parse.reward == -0.5


async def test_a_parser_that_rewards_silence_gives_no_bonus_for_a_turn_without_an_answer() -> None:
    agent = scripted_agent(
        [tool_call("add", a=2, b=3)] * 9,
        ToolAgent,
        tools=[add],
        parser=lambda text: ParseResult(None, 1.0, "Say more."),
    )
    assert (await turn(agent)).parse.reward == 0.0


@pytest.mark.parametrize(
    ("cls", "setting"), [(ReActAgent, "max_rounds"), (ToolAgent, "max_tool_rounds")]
)
def test_bounds_that_make_no_sense_are_refused(cls: type[ToolAgent], setting: str) -> None:
    with pytest.raises(AgentError, match=setting):
        scripted_agent([""], cls, **{setting: -1})


@pytest.mark.parametrize("cls", [ToolAgent, ReActAgent])
def test_a_turn_is_bounded_by_its_calls_or_by_its_rounds_of_tools(cls: type[ToolAgent]) -> None:
    assert scripted_agent([""], cls, max_rounds=3).max_tool_rounds == 2
    assert scripted_agent([""], cls, max_tool_rounds=2).max_tool_rounds == 2
    with pytest.raises(AgentError, match="max_rounds and max_tool_rounds"):
        scripted_agent([""], cls, max_rounds=3, max_tool_rounds=2)


async def react_turn(template: Any) -> Any:
    agent = scripted_agent(
        [
            "First the small ones.\n" + tool_call("add", a=2, b=3),
            tool_call("add", a=5, b=4),
            move("9"),
        ],
        ReActAgent,
        template=template,
        tools=[add],
    )
    return await turn(agent)


@pytest.mark.integration
async def test_a_react_turn_with_two_tool_calls_extends_token_by_token_with_a_real_tokenizer(
    smollm2_tokenizer: Any,
) -> None:
    act = await react_turn(template_of(smollm2_tokenizer, TOOL_TEMPLATE))
    assert act.parse.action == "9"
    traces = [s.trace for s in act.steps]
    assert len(traces) == 3
    for before, after in itertools.pairwise(traces):
        n = len(before.token_ids)
        assert after.prompt_token_ids[:n] == before.prompt_token_ids + before.completion_token_ids
        assert len(after.prompt_token_ids) > n
        assert after.extends(before)
    assert [s.fork for s in act.steps] == [None, None, None]
    text = smollm2_tokenizer.decode(traces[-1].token_ids)
    assert text.count("<tool_response>\n5\n</tool_response>") == 1
    assert text.count("<tool_response>\n9\n</tool_response>") == 1
    assert text.endswith("<|im_start|>assistant\n<move>9</move><|im_end|>")


@pytest.mark.integration
async def test_a_template_that_spells_tool_calls_its_own_way_forks_and_the_step_says_so(
    smollm2_tokenizer: Any,
) -> None:
    act = await react_turn(template_of(smollm2_tokenizer, FORKING_TEMPLATE))
    assert act.parse.action == "9"
    assert act.steps[0].fork is None
    for before, after in zip(act.steps, act.steps[1:], strict=False):
        assert after.fork.reason is ForkReason.TOOL_CALL_RERENDERED
        assert not after.trace.extends(before.trace)
    # What was sampled stays what it was: only the later prompts are spelled anew.
    sampled = smollm2_tokenizer.decode(act.steps[1].trace.completion_token_ids)
    assert '{"name": "add", "arguments"' in sampled
    later = smollm2_tokenizer.decode(act.steps[2].trace.prompt_token_ids)
    assert ', "name": "add"}' in later
