"""The LLM harness: prompt, call, parse, tools."""

from ludic.agents.base_agent import ActResult, Agent
from ludic.agents.react_agent import ReActAgent
from ludic.agents.tool_agent import ExternalToolHandler, ToolAgent
from ludic.agents.tools import StatefulTool, Tool, ToolResult

__all__ = [
    "ActResult",
    "Agent",
    "ExternalToolHandler",
    "ReActAgent",
    "StatefulTool",
    "Tool",
    "ToolAgent",
    "ToolResult",
]
