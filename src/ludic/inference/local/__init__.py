"""The in-process engine: samples from the very module that is being trained."""

from ludic.inference.local.client import LocalChatClient

__all__ = ["LocalChatClient"]
