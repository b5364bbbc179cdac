"""Reason, act, observe: a bounded tool loop whose last round must answer."""

from __future__ import annotations

from ludic.agents.tool_agent import ToolAgent


class ReActAgent(ToolAgent):
    """A tool loop of at most `max_rounds` model calls, the last of which must answer.

    The model is told so in the answers of the last tools that are run. The tools stay in the
    prompt, so that its tokens still extend the earlier ones; calls in the last round are not run.
    """

    default_rounds = 6
    last_round_notice = "No tool calls are left in this turn. Give your answer now."
