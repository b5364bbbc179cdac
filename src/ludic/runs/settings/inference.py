"""Where tokens come from."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, ValidationInfo, field_validator, model_validator

from ludic.distributed.vllm.placement import PlaneName
from ludic.runs.settings.base import Address, Arguments, KeyedSection, Section


class SamplingSection(Section):
    """How tokens are sampled, as in `SamplingConfig`. A completion ends with a text in
    `stop` or a token in `stop_token_ids`, or as the model ends it."""

    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    min_p: float = Field(default=0.0, ge=0, le=1)
    max_tokens: int | None = Field(default=64, ge=1)
    stop: list[str] = []
    stop_token_ids: list[NonNegativeInt] = []


OWN_FLAGS = {
    "model": "model.name",
    "served-model-name": "nothing: the run names it",
    "host": "inference.servers, for a server that you start yourself",
    "port": "inference.servers, for a server that you start yourself",
    "dtype": "model.precision",
    "max-model-len": "inference.max_context_tokens",
    "max-num-seqs": "inference.slots",
    "gpu-memory-utilization": "inference.vllm.gpu_memory",
    "enforce-eager": "inference.vllm.eager",
    "logprobs-mode": "nothing: training needs processed_logprobs",
    "weight-transfer-config": "nothing: updates go through it",
    "worker-extension-cls": "nothing: updates go through it",
    "enable-lora": 'inference.publish_lora = "adapter"',
    "max-lora-rank": "model.lora.rank",
    "hf-token": "the environment variable HF_TOKEN",
    "api-key": "nothing: a server that is started for the run listens on loopback alone",
}
"""Flags of vLLM that a run sets itself, and by which of its keys."""


class VLLMSection(Section):
    """The vLLM server that is started for the run. `gpu_memory` is its share of the GPU's memory
    (left out, it is computed such that a trainer on the same GPU has room, and is vLLM's own
    default on another), `eager` leaves CUDA graphs out, `kv_cache_gib` is the CPU build's cache,
    and after `start_timeout_s` a server that is not healthy yet is given up. `flags` are any others
    of vLLM by name, `{ max-num-batched-tokens = 8192, enable-prefix-caching = false }`."""

    gpu_memory: float | None = Field(default=None, gt=0, le=1)
    eager: bool | None = None
    kv_cache_gib: int = Field(default=1, ge=1)
    start_timeout_s: float = Field(default=600.0, gt=0)
    flags: dict[str, bool | int | float | str | Arguments] = {}

    @field_validator("flags")
    @classmethod
    def _not_the_runs_own(cls, flags: dict[str, Any]) -> dict[str, Any]:
        for name in flags:
            plain = flag_name(name)
            own = plain if plain in OWN_FLAGS else plain.removeprefix("no-")
            if own in OWN_FLAGS:
                raise ValueError(f"{name} is set by the run: use {OWN_FLAGS[own]}")
        return flags

    def flag(self, name: str) -> Any:
        """Returns the value of one of `flags` by vLLM's spelling; None if it is not there."""
        return {flag_name(given): value for given, value in self.flags.items()}.get(name)

    def arguments(self) -> tuple[str, ...]:
        """Returns the `flags` as vLLM's command takes them."""
        arguments: list[str] = []
        for name, value in self.flags.items():
            plain = flag_name(name)
            if isinstance(value, bool):
                arguments.append(f"--{plain}" if value else f"--no-{plain}")
            else:
                text = json.dumps(value) if isinstance(value, dict) else str(value)
                arguments += [f"--{plain}", text]
        return tuple(arguments)


def flag_name(name: str) -> str:
    """Returns a flag as vLLM spells it: `max_num_seqs` and `--max-num-seqs` are `max-num-seqs`."""
    return name.lstrip("-").replace("_", "-")


PUBLISHING = ("publish_plane", "publish_address", "publish_port")


class InferenceSection(KeyedSection):
    """Where tokens come from: the in-process engine, or vLLM. Without addresses in `servers`, a
    vLLM server is started for the run, by the Python in `vllm_python` (default: this one). With
    `servers = "registered"` they are those that say in Redis that they serve this run (`ludic serve
    --register`): they may come and go while it runs. With
    `publish_lora = "adapter"`, vLLM gets the LoRA adapter alone after each update, and not all
    weights with the adapter merged into them. `publish_plane` is the way that the weights take;
    left out, it follows from where the servers are. A broadcast (`"nccl"` between GPUs, `"gloo"`)
    and `"http"`, by which each host fetches the weights once, for all of its workers, meet at
    `publish_address` and `publish_port` of this machine, which the servers must reach;
    left out, any address and port that will do. With `publish_differences` only what changed since
    the version that all servers confirmed is sent. If the servers want a key, it is in the
    environment variable `api_key_env` or in the file `api_key_file`; a run file holds no secret,
    and an address neither user nor password."""

    backend: Literal["local", "vllm"] = "local"
    servers: list[Address] | Literal["registered"] = []
    vllm_python: str | None = None
    publish_lora: Literal["merged", "adapter"] = "merged"
    publish_plane: PlaneName = "auto"
    publish_address: str | None = None
    publish_port: int | None = Field(default=None, ge=1, le=65535)
    publish_differences: bool = False
    slots: int | None = Field(default=None, ge=1)
    max_context_tokens: int | None = Field(default=None, ge=8)
    deterministic: bool | None = None
    sampling: SamplingSection = SamplingSection()
    vllm: VLLMSection = VLLMSection()

    @model_validator(mode="after")
    def _for_vllm(self) -> InferenceSection:
        started = self.backend == "vllm" and self.servers in ([], "registered")
        if self.vllm != VLLMSection() and not started:
            raise ValueError(
                "[inference.vllm] is for a server that is started for the run: set backend = "
                '"vllm" and name no servers'
            )
        publishing = [key for key in PUBLISHING if getattr(self, key) not in (None, "auto")]
        if publishing and self.backend != "vllm":
            raise ValueError(
                f'{publishing[0]} is for backend = "vllm"; the in-process engine shares the weights'
            )
        if publishing and self.publish_lora == "adapter":
            raise ValueError(
                f'{publishing[0]} is for whole weights, and publish_lora = "adapter" sends a '
                "folder: leave one of them out"
            )
        whole = self.backend == "vllm" and self.publish_lora == "merged"
        if self.publish_differences and (not whole or self.publish_plane == "ipc"):
            raise ValueError(
                'publish_differences is for whole weights to vLLM servers (backend = "vllm", '
                'publish_lora = "merged"), and not for publish_plane = "ipc", where nothing '
                "travels: leave it out"
            )
        if self.publish_plane in ("shared_memory", "ipc") and publishing[1:]:
            raise ValueError(
                f'{publishing[1]} belongs to a broadcast: set publish_plane = "nccl", "gloo" or '
                '"http", or leave it out'
            )
        if not self.servers and (self.api_key_env or self.api_key_file):
            raise ValueError("api_key_env and api_key_file are for servers: name them in `servers`")
        return self

    @field_validator("publish_lora")
    @classmethod
    def _goes_to_vllm(cls, value: str, others: ValidationInfo) -> str:
        if value == "adapter" and others.data.get("backend") != "vllm":
            raise ValueError('needs backend = "vllm"; the in-process engine shares the adapter')
        return value
