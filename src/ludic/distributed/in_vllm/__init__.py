"""The code that runs inside vLLM's processes. vLLM finds it by the names in
`ludic.inference.vllm.flags`."""
