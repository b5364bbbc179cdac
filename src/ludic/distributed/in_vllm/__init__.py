"""What runs inside vLLM's workers; `vllm_plugin` beside this folder is how vLLM finds it."""
