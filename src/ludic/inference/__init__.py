"""Inference: the client's contract, sampling, chat templates, tool parsers, and the backends.

The backends are imported when they are first asked for, so that `import ludic.inference` needs
neither torch nor transformers nor aiohttp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ludic.inference.client import (
    ChatClient,
    TokenCompletionRequest,
    ToolRequest,
    VersionedClient,
)
from ludic.inference.sampling import InferenceSpec, ReturnSpec, SamplingConfig
from ludic.inference.templates.chat_template import ChatTemplate, ParsedCompletion
from ludic.inference.templates.hf import HFChatTemplate, load_tokenizer
from ludic.inference.templates.tool_parsers import (
    HermesToolParser,
    JSONToolParser,
    ToolParse,
    ToolParser,
    get_tool_parser,
)
from ludic.inference.vllm.extensions import VLLMExtensions
from ludic.lazy import late_names
from ludic.registry import list_tool_parsers, register_tool_parser

if TYPE_CHECKING:
    from ludic.inference.local import LocalChatClient as LocalChatClient
    from ludic.inference.openai.client import OpenAIChatClient as OpenAIChatClient
    from ludic.inference.scripted_client import ScriptedCall as ScriptedCall
    from ludic.inference.scripted_client import ScriptedChatClient as ScriptedChatClient
    from ludic.inference.vllm.client import VLLMChatClient as VLLMChatClient

__getattr__ = late_names(
    __name__,
    {
        "LocalChatClient": "ludic.inference.local",
        "OpenAIChatClient": "ludic.inference.openai.client",
        "ScriptedCall": "ludic.inference.scripted_client",
        "ScriptedChatClient": "ludic.inference.scripted_client",
        "VLLMChatClient": "ludic.inference.vllm.client",
    },
)

__all__ = [
    "ChatClient",
    "ChatTemplate",
    "HFChatTemplate",
    "HermesToolParser",
    "InferenceSpec",
    "JSONToolParser",
    "LocalChatClient",
    "OpenAIChatClient",
    "ParsedCompletion",
    "ReturnSpec",
    "SamplingConfig",
    "ScriptedCall",
    "ScriptedChatClient",
    "TokenCompletionRequest",
    "ToolParse",
    "ToolParser",
    "ToolRequest",
    "VLLMChatClient",
    "VLLMExtensions",
    "VersionedClient",
    "get_tool_parser",
    "list_tool_parsers",
    "load_tokenizer",
    "register_tool_parser",
]


def __dir__() -> list[str]:
    return __all__
