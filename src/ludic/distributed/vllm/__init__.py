"""Publishing to vLLM servers."""
