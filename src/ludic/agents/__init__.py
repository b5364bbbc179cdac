"""The LLM harness: prompt, call, parse, tools."""

from ludic.agents.base_agent import ActResult as ActResult
from ludic.agents.base_agent import Agent as Agent
from ludic.agents.harness import HarnessAgent as HarnessAgent
from ludic.agents.react_agent import ReActAgent as ReActAgent
from ludic.agents.tool_agent import ExternalToolHandler as ExternalToolHandler
from ludic.agents.tool_agent import ToolAgent as ToolAgent
from ludic.agents.tools import StatefulTool as StatefulTool
from ludic.agents.tools import Tool as Tool
from ludic.agents.tools import ToolResult as ToolResult
