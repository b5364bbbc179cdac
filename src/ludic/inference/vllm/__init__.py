"""vLLM servers: starting them, talking to them, choosing among them."""
