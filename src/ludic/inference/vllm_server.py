"""`python -m ludic.inference.vllm_server`: starts vLLM's own server, ready for training."""

from ludic.inference.vllm.server import VLLMServer as VLLMServer
from ludic.inference.vllm.server import main

if __name__ == "__main__":
    raise SystemExit(main())
