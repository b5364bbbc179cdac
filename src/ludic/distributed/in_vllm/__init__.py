"""What runs inside vLLM's processes; it finds this by the names in `ludic.inference.vllm.flags`."""
