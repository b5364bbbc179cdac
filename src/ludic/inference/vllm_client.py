"""`VLLMChatClient` by its short path; it lives in `ludic.inference.vllm.client`."""

from ludic.inference.vllm.client import VLLMChatClient as VLLMChatClient
