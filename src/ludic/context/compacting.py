"""A dialogue that is summarised when it outgrows its window, and goes on from the summary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from ludic.context.full_dialog import FullDialog
from ludic.errors import ConfigError
from ludic.types import Message

REQUEST = (
    "This dialogue is about to outgrow its window. Write a summary of it: the task, what was done, "
    "what was learned, and what is still to do. From now on you will see only this summary, your "
    "notes and the last turns."
)
AGAIN = "That is no complete summary. Write it again, and more briefly."


class CompactingDialog(FullDialog):
    """Shows everything until a prompt is longer than `share` of the window; then the model is
    asked for a summary, which takes the place of all but the last turns.

    The dialogue then begins with the system prompt, the request with the agent's notes, and the
    model's summary; the last `keep_turns` turns follow, as many of them as fill no more than half
    of what a prompt may fill. A turn is an observation and all that follows it up to the next one.
    What was replaced is forgotten here: the rollout has it.

    Args:
        window: The longest prompt plus completion, in tokens; by default, what the model takes.
        share: The part of the window that a prompt may fill before the dialogue is compacted; less
            where an answer, the request and a summary would not fit into the rest.
        summary_tokens: The longest summary.
        keep_turns: How many of the last turns are shown besides the summary.
        request: What the model is asked.
    """

    def __init__(
        self,
        window: int | None = None,
        *,
        share: float = 0.75,
        summary_tokens: int = 512,
        keep_turns: int = 2,
        request: str = REQUEST,
    ) -> None:
        super().__init__()
        rules = (
            (window is None or window >= 2, f"window={window}: must be at least 2, or None"),
            (0 < share <= 1, f"share={share}: must be above 0 and at most 1"),
            (summary_tokens >= 1, f"summary_tokens={summary_tokens}: must be at least 1"),
            (keep_turns >= 0, f"keep_turns={keep_turns}: must be >= 0"),
            (bool(request.strip()), "request: must say something"),
        )
        for holds, rule in rules:
            if not holds:
                raise ConfigError(f"CompactingDialog: {rule}")
        self.window, self.share, self.summary_tokens = window, share, summary_tokens
        self.keep_turns, self.request = keep_turns, request
        self.notes: Callable[[], str] | None = None
        """Returns the notes of the agent, if it takes any."""
        self.max_note_chars = 0
        """How long they may get."""
        self._opening: tuple[Message, ...] = ()
        self.grown = False
        """Whether the model spoke since the dialogue began or was compacted."""

    @property
    def turns(self) -> int:
        """How many turns could be dropped: those after the last summary."""
        return len(self._parts()[1])

    def reset(self, system_prompt: str | None = None) -> None:
        super().reset(system_prompt)
        self._opening, self.grown = (), False

    def on_after_act(self, message: Message) -> None:
        super().on_after_act(message)
        self.grown = True

    def question(self, notes: str = "") -> Message:
        """The request for a summary, below `notes` if there are any."""
        return {"role": "user", "content": "\n\n".join(filter(None, (notes, self.request)))}

    def asking(self, left_out: int, asked: Sequence[Message]) -> tuple[Message, ...]:
        """What the model is shown when it is `asked` for a summary: the dialogue without its oldest
        `left_out` turns, and without an observation that waits for an answer."""
        head, turns, _ = self._parts()
        return (*head, *self._opening, *chain.from_iterable(turns[left_out:]), *asked)

    def beginning(self, summary: Message | None, kept: int) -> tuple[Message, ...]:
        """The dialogue with the notes and `summary` for all but the last `kept` turns; without a
        summary, these turns are dropped, which the next message says."""
        head, turns, waiting = self._parts()
        rest = [*chain.from_iterable(turns[len(turns) - kept :]), *waiting]
        notes = self.notes() if self.notes else ""
        if summary is not None:
            return (*head, self.question(notes), summary, *rest)
        said = [notes, f"[{len(turns) - kept} turns were dropped here]"]
        if rest and rest[0]["role"] == "user":
            said.append(rest.pop(0)["content"])
        first: Message = {"role": "user", "content": "\n\n".join(filter(None, said))}
        return (*head, *self._opening, first, *rest)

    def begin_again(self, summary: Message | None, kept: int) -> tuple[Message, ...]:
        """Makes `beginning` the dialogue."""
        head, messages = self._parts()[0], self.beginning(summary, kept)
        self._messages = list(messages)
        if summary is not None:
            self._opening = messages[len(head) : len(head) + 2]
        self.grown = False
        return messages

    def _parts(self) -> tuple[list[Message], list[list[Message]], list[Message]]:
        """The system prompt, the turns after the last summary, and what waits for an answer."""
        self._settle()
        start = sum(message["role"] == "system" for message in self._messages[:1])
        head, body = self._messages[:start], self._messages[start + len(self._opening) :]
        turns: list[list[Message]] = []
        for message in body:
            if message["role"] == "user" or not turns:
                turns.append([])
            turns[-1].append(message)
        waiting = turns.pop() if turns and [m["role"] for m in turns[-1]] == ["user"] else []
        return head, turns, waiting
