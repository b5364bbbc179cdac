"""The sizes of a few published models, so that a plan needs no download."""

from __future__ import annotations

import json
from importlib.resources import files

from ludic.errors import ConfigError
from ludic.memory.shape import ModelShape

_FACTS = json.loads((files("ludic.plan") / "shapes.json").read_text(encoding="utf-8"))


def shape_named(model: str) -> ModelShape:
    """The sizes of a model by its name, with or without an owner and a suffix (`-Instruct`)."""
    plain = model.rpartition("/")[2].lower().replace("-coder", "").replace("-math", "")
    for name in sorted(_FACTS, key=len, reverse=True):
        if plain == name.lower() or plain.startswith(name.lower() + "-"):
            shape = ModelShape.of(_FACTS[name])
            assert shape is not None
            return shape
    raise ConfigError(
        f"the sizes of {model!r} are not here: download its config.json, or give one of "
        f"{', '.join(sorted(_FACTS))} as --shape"
    )
