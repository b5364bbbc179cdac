"""What is trained."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from ludic.plumbing.precision import Precision
from ludic.runs.settings.base import Arguments, Section


class LoraSection(Section):
    """Train an adapter of this rank instead of all weights (needs the extra `peft`)."""

    rank: int = Field(default=16, ge=1)
    alpha: float = 32.0
    target_modules: list[str] | Literal["all-linear"] = "all-linear"


class ModelSection(Section):
    """`tiny` is the embedded model; anything else is a folder, a name on the hub, or an earlier run
    by its folder: `runs/first`, or one of its models, `runs/first:sft` or `runs/first:step-40`.
    `precision` is what trainer and engine compute in; left out, it is
    float32 on a CPU. `dtype` is the older word for it, and names the type of the weights only.
    `chat_template` is a file with a Jinja template to use in place of the tokenizer's: many a
    model's own cannot show tools."""

    name: str = "tiny"
    revision: str | None = None
    dtype: Literal["float32", "bfloat16"] | None = None
    precision: Precision | None = None
    device: str | None = None
    kwargs: Arguments = {}
    lora: LoraSection | None = None
    tool_parser: str | None = None
    chat_template: str | None = None

    @field_validator("precision")
    @classmethod
    def _fits_dtype(cls, value: Precision | None, others: ValidationInfo) -> Precision | None:
        dtype = others.data.get("dtype")
        if value and dtype and (value == "bfloat16") != (dtype == "bfloat16"):
            raise ValueError(f"contradicts dtype = {dtype!r}: leave dtype out")
        return value
