"""Where tokens come from."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, ValidationInfo, field_validator

from ludic.runs.settings.base import Section


class SamplingSection(Section):
    """As in `SamplingConfig`; the defaults may be trained on. A completion ends with a text in
    `stop` or a token in `stop_token_ids`, or as the model ends it."""

    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    min_p: float = Field(default=0.0, ge=0, le=1)
    max_tokens: int | None = Field(default=64, ge=1)
    stop: list[str] = []
    stop_token_ids: list[NonNegativeInt] = []


class InferenceSection(Section):
    """Where tokens come from: the in-process engine, or vLLM. Without addresses in `servers`, a
    vLLM server is started for the run, by the Python in `vllm_python` (default: this one). With
    `publish_lora = "adapter"`, vLLM gets the LoRA adapter alone after each update, and not all
    weights with the adapter merged into them."""

    backend: Literal["local", "vllm"] = "local"
    servers: list[str] = []
    vllm_python: str | None = None
    publish_lora: Literal["merged", "adapter"] = "merged"
    slots: int = Field(default=64, ge=1)
    max_context_tokens: int | None = Field(default=None, ge=8)
    deterministic: bool | None = None
    sampling: SamplingSection = SamplingSection()

    @field_validator("publish_lora")
    @classmethod
    def _goes_to_vllm(cls, value: str, others: ValidationInfo) -> str:
        if value == "adapter" and others.data.get("backend") != "vllm":
            raise ValueError('needs backend = "vllm"; the in-process engine shares the adapter')
        return value
