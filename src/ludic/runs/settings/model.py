"""What is trained."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ludic.runs.settings.base import Arguments, Section


class LoraSection(Section):
    """Train an adapter of this rank instead of all weights (needs the extra `peft`)."""

    rank: int = Field(default=16, ge=1)
    alpha: float = 32.0
    target_modules: list[str] | Literal["all-linear"] = "all-linear"


class ModelSection(Section):
    """`tiny` is the embedded model; anything else is a folder, a name on the hub, or an earlier run
    by its folder: `runs/first`, or one of its models, `runs/first:sft` or `runs/first:step-40`."""

    name: str = "tiny"
    revision: str | None = None
    dtype: Literal["float32", "bfloat16"] | None = None
    device: str | None = None
    kwargs: Arguments = {}
    lora: LoraSection | None = None
    tool_parser: str | None = None
