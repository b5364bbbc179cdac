"""What vLLM finds by name, since it takes no objects: Ludic's code inside its processes.

That code needs torch and vLLM, so it lives in a higher layer (`ludic.distributed.in_vllm`), and
this file is the only place that names it. A test holds that every name leads somewhere.
"""

PLUGIN = "ludic.distributed.in_vllm.plugin:register"
"""The entry point in vLLM's group `vllm.general_plugins`, as `pyproject.toml` declares it."""
WORKER_EXTENSION = "ludic.distributed.in_vllm.worker.WorkerExtension"
"""The class that `--worker-extension-cls` adds to vLLM's workers."""
BACKEND = "ludic"
"""The weight transfer engine that the plugin registers."""

# Methods of the worker extension, for `/collective_rpc`.
RECEIPT = "ludic_receipt"
ADAPTER_LIMITS = "ludic_adapter_limits"
ADAPTER_RECEIPT = "ludic_adapter_receipt"
PLACE = "ludic_place"
