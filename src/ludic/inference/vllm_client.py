"""A short import path for `VLLMChatClient`, which lives in `ludic.inference.vllm.client`."""

from ludic.inference.vllm.client import VLLMChatClient as VLLMChatClient
