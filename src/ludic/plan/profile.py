"""The constants of a machine, where each comes from, and how they follow from measurements; and the
sizes of a few published models, so that a plan needs no download."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

import msgspec
import numpy as np

from ludic.errors import ConfigError
from ludic.memory.shape import ModelShape

ORIGINS = ("measured", "measured on another machine", "data sheet", "assumed")
_HERE = files("ludic.plan")
_SHIPPED = _HERE / "profiles"
FIGURES: dict[str, str] = json.loads((_HERE / "figures.json").read_text(encoding="utf-8"))
"""What a profile has to say, and what each figure is; those that end in `_s` are seconds."""
_BY_FLOPS = ("decode_row_s", "decode_crowd_s", "pass_flop_s")
_BY_MEMORY = (
    *("decode_weight_s", "decode_width_s", "decode_cache_s", "decode_adapter_s"),
    *("pass_element_s", "pass_adapter_s"),
)


@dataclass(frozen=True, slots=True)
class Figure:
    """A constant, where it comes from (one of `ORIGINS`), and details."""

    value: float
    origin: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class Profile:
    """A machine: its constants by the names of `FIGURES`, and when and with which versions they
    were measured."""

    name: str
    machine: str
    date: str
    versions: Mapping[str, str]
    figures: Mapping[str, Figure]

    def __getitem__(self, name: str) -> float:
        return self.figures[name].value

    def with_figures(self, origin: str, source: str = "", **values: float) -> Profile:
        """The profile with some figures replaced."""
        changed = {name: Figure(value, origin, source) for name, value in values.items()}
        return replace(self, figures={**self.figures, **changed})

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(msgspec.to_builtins(self), indent=1) + "\n", encoding="utf-8")


def shipped() -> list[str]:
    """The names of the profiles that come with the library."""
    return sorted(f.name.removesuffix(".json") for f in _SHIPPED.iterdir())


def load_profile(name: str | Path) -> Profile:
    """A profile by the name of a shipped one, or from a file that `ludic calibrate` wrote."""
    place = _SHIPPED / f"{name}.json" if str(name) in shipped() else Path(name)
    try:
        facts = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError(
            f"{name} is not a profile: give one of {', '.join(shipped())}, or a file that "
            "`ludic calibrate RUN --profile FILE` wrote"
        ) from exc
    try:
        profile = msgspec.convert(facts, Profile)
        if like := facts.get("like"):
            profile = scaled(load_profile(like), profile)
    except (msgspec.ValidationError, KeyError, TypeError) as exc:
        raise ConfigError(f"the profile {name} cannot be read: {exc}") from exc
    missing = [key for key in FIGURES if key not in profile.figures]
    wrong = [key for key, f in profile.figures.items() if not 0 <= f.value < float("inf")]
    if missing or wrong:
        raise ConfigError(
            f"the profile {name} lacks {missing or 'nothing'} and has impossible values for "
            f"{wrong or 'nothing'}: write it again with `ludic calibrate RUN --profile FILE`"
        )
    return profile


def scaled(measured: Profile, sheet: Profile) -> Profile:
    """A machine of which only a data sheet is known: what was measured on another, in proportion
    to operations or to bandwidth; the host's figures as they are."""
    flops = measured["peak_tflops"] / sheet["peak_tflops"]
    memory = measured["hbm_tb_s"] / sheet["hbm_tb_s"]
    figures = dict(measured.figures)
    for names, ratio in ((_BY_FLOPS, flops), (_BY_MEMORY, memory)):
        for name in names:
            source = f"{measured.name}'s, times {ratio:.2f} by the data sheets"
            figures[name] = Figure(measured[name] * ratio, "data sheet", source)
    for name, figure in figures.items():
        if figure.origin == "measured":
            figures[name] = Figure(figure.value, "measured on another machine", measured.name)
    return replace(sheet, figures={**figures, **sheet.figures})


Measured = tuple[Mapping[str, float], float]
"""What a time depends on, by the names of figures, and the seconds."""
_ROUNDS = 20_000


def fit(rows: Sequence[Measured], given: Mapping[str, float] | None = None) -> dict[str, float]:
    """The constants of `rows`, besides those that are `given`. By coordinate descent, so that a
    constant which the rows do not tell stays 0."""
    given = given or {}
    names = sorted({name for features, _ in rows for name in features} - set(given))
    sizes = np.array(
        [[features.get(n, 0.0) / seconds for n in names] for features, seconds in rows]
    )
    stated = [sum(given.get(n, 0.0) * f for n, f in features.items()) for features, _ in rows]
    goal = np.array([1 - part / seconds for part, (_, seconds) in zip(stated, rows, strict=True)])
    scale = np.sqrt((sizes**2).sum(axis=0))
    scale[scale == 0] = 1.0
    columns = sizes / scale
    constants = np.zeros(len(names))
    rest = goal.copy()
    for _ in range(_ROUNDS):
        moved = 0.0
        for index in range(len(names)):
            column = columns[:, index]
            better = max(constants[index] + float(column @ rest), 0.0)
            rest -= (better - constants[index]) * column
            moved = max(moved, abs(better - constants[index]))
            constants[index] = better
        if moved < 1e-10:
            break
    return {name: float(value) for name, value in zip(names, constants / scale, strict=True)}


_FACTS = json.loads((_HERE / "shapes.json").read_text(encoding="utf-8"))


def shape_named(model: str) -> ModelShape:
    """The sizes of a model by its name, with or without an owner and a suffix (`-Instruct`)."""
    plain = model.rpartition("/")[2].lower().replace("-coder", "").replace("-math", "")
    for name in sorted(_FACTS, key=len, reverse=True):
        if plain == name.lower() or plain.startswith(name.lower() + "-"):
            shape = ModelShape.of(_FACTS[name])
            assert shape is not None
            return shape
    raise ConfigError(
        f"the sizes of {model!r} are not known: download its config.json, or give one of "
        f"{', '.join(sorted(_FACTS))} as --shape"
    )
