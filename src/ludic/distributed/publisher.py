"""`BroadcastPolicyPublisher` by its short path; it lives in `ludic.distributed.vllm.publisher`."""

from ludic.distributed.vllm.publisher import BroadcastPolicyPublisher as BroadcastPolicyPublisher
