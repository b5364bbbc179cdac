"""vLLM servers: starting them, asking them, choosing among them."""
