"""The LLM harness: from the context to tokens, one model call, and back to an action."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field

from msgspec.structs import replace

from ludic.agents.compaction import Compactor
from ludic.agents.model_calls import ModelCall, TurnTaker
from ludic.context.base import ContextStrategy
from ludic.context.compacting import CompactingDialog
from ludic.inference.client import ChatClient, ToolRequest
from ludic.inference.sampling import InferenceSpec
from ludic.inference.templates.chat_template import ChatTemplate
from ludic.parsers import Parser, ParseResult
from ludic.plumbing.records import Record
from ludic.types import AgentStep, FinishReason, Info, Obs, TruncationReason

CUT_FEEDBACK = "Your reply was cut off at its length limit. Answer again, and more briefly."

FULL_FEEDBACK = "Your turn was ended without an answer: its tool calls filled the window."


class ActResult(Record, frozen=True):
    """One turn of an agent: every model call of it, and what its last one was read as.

    `parse.action` is None when the turn gave no action. `truncation` is set when the turn could
    not be finished, because the next prompt no longer fits the model's context.
    """

    steps: tuple[AgentStep, ...]
    parse: ParseResult
    truncation: TruncationReason | None = None


@dataclass(eq=False, repr=False)
class Agent(TurnTaker):
    """A model with a memory and a parser: one model call per turn.

    A protocol calls `reset` and `on_env_reset` at an episode's beginning, then `act` and
    `on_after_step` in turn. Prompts extend the previous call's tokens wherever the context only
    grew and the template allows it; where not, the step's `fork` says why.

    The n-th model call since `reset` samples with `derive_seed(seed, "call", n)`. `system_prompt`
    is used where `reset` is given none.

    A subclass with another kind of turn overrides `act` and builds it from `begin_turn`,
    `call_model`, `record` and `conclude`.
    """

    client: ChatClient
    model: str
    ctx: ContextStrategy
    parser: Parser
    chat_template: ChatTemplate
    _: KW_ONLY
    inference: InferenceSpec = field(default_factory=InferenceSpec)
    system_prompt: str | None = None
    request_timeout_s: float | None = 300.0

    def __post_init__(self) -> None:
        dialog = self.ctx if isinstance(self.ctx, CompactingDialog) else None
        self.compactor = None if dialog is None else Compactor(self, dialog)
        self._begin(None, None)

    @property
    def context_limit(self) -> int | None:
        """What the client takes, or the window of the context if that is smaller."""
        window = None if self.compactor is None else self.compactor.dialog.window
        limits = (self.client.max_context_tokens, window)
        return min((limit for limit in limits if limit is not None), default=None)

    def reset(
        self,
        system_prompt: str | None = None,
        *,
        seed: int | None = None,
        conversation_id: str | None = None,
    ) -> None:
        """Forgets the last episode. `conversation_id` lets a backend keep the calls together."""
        self._begin(seed, conversation_id)
        self.ctx.reset(self.system_prompt if system_prompt is None else system_prompt)

    def on_env_reset(self, obs: Obs, info: Info) -> None:
        """The episode begins with `obs`."""
        self.ctx.on_env_reset(obs, info)

    def on_after_step(self, obs: Obs, info: Info) -> None:
        """The environment, or the parser as feedback, answers with `obs`."""
        self.ctx.on_after_step(obs, info)

    async def compact(self) -> Info | None:
        """Called before each turn: shortens a dialogue that outgrows its window, if the context
        does that. It is then a turn of its own: `steps_of_turn` are its model calls, and what is
        returned is the `info` of its step."""
        return await self.compactor.compact() if self.compactor is not None else None

    async def act(self) -> ActResult:
        """Takes one turn."""
        self.begin_turn()
        call = await self.call_model()
        if call is None:
            return self.out_of_context()
        self.record(call)
        return self.conclude(call)

    async def close(self) -> None:
        """Frees what the episode opened; the agent can begin another. Protocols call it at an
        episode's end, also after a failure."""

    def _begin(self, seed: int | None, conversation_id: str | None) -> None:
        self.begin_calls(seed, conversation_id)
        if self.compactor is not None:
            self.compactor.begin()

    async def call_model(self, tools: ToolRequest | None = None) -> ModelCall | None:
        """Samples one assistant message; None when its prompt leaves no room in the context."""
        recorded = getattr(self.client, "is_full", None)  # as for compactions
        if recorded and recorded(self.conversation_id, len(self._steps)):
            return None
        call = await self.complete(tuple(self.ctx.on_before_act()), tools, self.previous_call)
        if call is not None:
            self.ctx.on_after_act(call.parsed.message)
            if self.compactor is not None:
                call = self.compactor.after_call(call)
            self.previous_call = call
        return call

    def conclude(self, call: ModelCall) -> ActResult:
        """Reads the turn's last message. A completion cut by length gives no action, even if its
        text would parse: it gets what the parser gives to no answer at all, and never a bonus."""
        parse = self.parser(call.parsed.message["content"])
        if call.response.finish_reason is FinishReason.LENGTH:
            no_answer = self.no_answer(CUT_FEEDBACK)
            parse = replace(no_answer, reward=min(parse.reward, no_answer.reward))
        return ActResult(tuple(self._steps), parse)

    def no_answer(self, feedback: str | None = None) -> ParseResult:
        """The result of a turn that ended without an answer. It gets the parser's penalty: were
        it free to run on, or to call tools to the end, a policy would learn to, wherever its
        other prospects are bad."""
        return ParseResult(None, min(self.parser("").reward, 0.0), feedback)

    def out_of_context(self) -> ActResult:
        """For `act`: the turn's result when there was no room for the next call. Calls that used
        up the room without an answer are punished; a prompt that never fitted is nobody's doing.
        Where the dialogue can be compacted, only the turn is over, and not the episode."""
        if self._steps and self.compactor is not None:
            return ActResult(tuple(self._steps), self.no_answer(FULL_FEEDBACK))
        parse = self.no_answer() if self._steps else ParseResult(None)
        return ActResult(tuple(self._steps), parse, TruncationReason.CONTEXT_WINDOW)
