"""What every table of a run file has in common."""

from __future__ import annotations

import math
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict


class Section(BaseModel):
    """A table of the run file. Unknown keys are errors, and so are NaN and infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _without_nan(value: Any) -> Any:
    """Raises if there is a NaN among a part's arguments, which most checks would let through."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if isinstance(item, float) and math.isnan(item):
            raise ValueError(f"{key} is not a number (nan)")
        if isinstance(item, (dict, list)):
            _without_nan(item)
    return value


Arguments: TypeAlias = Annotated[dict[str, Any], AfterValidator(_without_nan)]


class PartSection(Section):
    """A registered part by name, with its arguments."""

    kind: str
    kwargs: Arguments = {}
