"""Chat templates: messages to token ids, extended without tokenising again what was sampled."""
