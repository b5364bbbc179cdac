"""Chat templates: messages to token ids, extended without re-tokenising sampled text."""
