"""Frozen dataclasses that are cheap to make behave like any others."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import FrozenInstanceError, dataclass, field, replace
from typing import Any

import pytest

from ludic.plumbing.frozen import changed, quick


@quick
@dataclass(frozen=True, slots=True)
class Quick:
    """Every kind of field that is supported."""

    a: int
    b: str = "b"
    c: dict[str, int] = field(default_factory=dict)
    d: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.a < 0:
            raise ValueError("a is negative")


@dataclass(frozen=True, slots=True)
class Plain:
    """The same, made by Python alone."""

    a: int
    b: str = "b"
    c: dict[str, int] = field(default_factory=dict)
    d: tuple[int, ...] = ()


class Derived(Quick):
    """Has room for attributes of any name."""


@dataclass(frozen=True, slots=True)
class Longer(Quick):
    """A dataclass with one field more."""

    e: int = 5


GIVEN: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((1,), {}),
    ((1, "x", {"k": 1}, (2,)), {}),
    ((), {"a": 1, "d": (3,)}),
    ((1, "x"), {"c": {"k": 2}}),
]


@pytest.mark.parametrize(("args", "kwargs"), GIVEN)
def test_it_takes_the_same_arguments_and_holds_the_same_values(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    ours, pythons = Quick(*args, **kwargs), Plain(*args, **kwargs)
    assert type(ours) is Quick
    assert repr(ours) == repr(pythons).replace("Plain", "Quick")
    assert ours == Quick(*args, **kwargs)
    assert copy.copy(ours) == pickle.loads(pickle.dumps(ours)) == replace(ours) == ours


def test_it_has_the_signature_of_the_plain_one() -> None:
    assert inspect.signature(Quick).parameters.keys() == inspect.signature(Plain).parameters.keys()
    assert Quick.__init__.__annotations__ == Plain.__init__.__annotations__
    for arguments in ({}, {"a": 1, "z": 2}):
        with pytest.raises(TypeError):
            Quick(**arguments)  # type: ignore[arg-type]


def test_two_objects_do_not_share_what_a_factory_made() -> None:
    assert Quick(1).c is not Quick(1).c


def test_it_cannot_be_changed() -> None:
    for one in (Quick(1), changed(Quick(1), b="x"), Longer(1)):
        with pytest.raises(FrozenInstanceError):
            one.a = 2  # type: ignore[misc]
        with pytest.raises(FrozenInstanceError):
            del one.a
        assert hash(replace(one, c=())) == hash(replace(one, c=()))  # type: ignore[arg-type]


def test_it_is_checked_when_it_is_made_and_not_when_it_is_changed() -> None:
    with pytest.raises(ValueError, match="negative"):
        Quick(-1)
    with pytest.raises(ValueError, match="negative"):
        replace(Quick(1), a=-1)
    assert changed(Quick(1, "x"), a=-1).a == -1


def test_a_changed_copy_leaves_the_first_as_it_was() -> None:
    first = Quick(1, "x", {"k": 1})
    second = changed(first, b="y")
    assert (first.b, second.b) == ("x", "y")
    assert second == Quick(1, "y", {"k": 1})
    with pytest.raises(TypeError, match="colour"):
        changed(first, colour="red")


def test_derived_classes_stay_what_they_are() -> None:
    derived, longer = Derived(1, c={"k": 1}), Longer(1, e=7)
    assert (type(derived), derived.c) == (Derived, {"k": 1})
    assert (type(longer), longer.e, longer.b) == (Longer, 7, "b")
    assert changed(longer, e=8) == Longer(1, e=8)
    with pytest.raises(ValueError, match="negative"):
        Derived(-1)


def test_fields_that_are_given_by_name_stay_so() -> None:
    @quick
    @dataclass(frozen=True, slots=True)
    class Keywords:
        a: int = field(kw_only=True)
        b: int = 0
        c: list[int] = field(default_factory=list, kw_only=True)

    assert Keywords(1, a=2) == Keywords(a=2, b=1, c=[])
    assert changed(Keywords(1, a=2), a=3) == Keywords(1, a=3)
    with pytest.raises(TypeError, match="positional"):
        Keywords(1, 2)  # type: ignore[call-arg]

    class Derived(Keywords):
        """Made by Python's own `__init__`."""

    assert Derived(1, a=2).a == 2


def test_fields_of_another_kind_are_refused() -> None:
    @dataclass(frozen=True, slots=True)
    class Later:
        a: int = field(init=False)

    with pytest.raises(TypeError, match="fields of `__init__` only"):
        quick(Later)
