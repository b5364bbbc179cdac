"""Python objects get a name: their place, how they were made, or one that only their run knows."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from ludic import grpo
from ludic.envs import TicTacToeEnv
from ludic.errors import ConfigError
from ludic.parsers import compose_parsers, think_prefix_parser, xml_parser
from ludic.plumbing.given import bind_objects, given, is_bound, place_of, recipe_of, unplaced_name
from ludic.registry import ENVS, PARSERS
from ludic.workers.threads import EnvThreads


class Coin:
    """Defined in a module, so that any process can import it."""


def test_a_class_of_a_module_is_named_by_its_place() -> None:
    assert place_of(json.JSONDecoder) == "json.decoder:JSONDecoder"
    assert place_of(Coin) == f"{__name__}:Coin"
    assert place_of(TicTacToeEnv)


def test_what_nobody_else_could_import_has_no_place() -> None:
    class Local: ...

    hidden = type("Coin", (), {"__module__": __name__})
    script = type("Guess", (), {"__module__": "__main__"})
    for thing in (Local, lambda: None, hidden, script, partial(Coin), Coin()):
        assert place_of(thing) is None
        assert unplaced_name(thing).startswith("object:")


def test_a_name_without_a_place_says_where_it_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    import __main__

    script = type("Guess", (), {"__module__": "__main__"})
    monkeypatch.setattr(__main__, "__file__", "/somewhere/guess.py", raising=False)
    assert unplaced_name(script) == "object:guess:Guess"
    monkeypatch.delattr(__main__, "__file__")
    assert unplaced_name(script) == "object:__main__:Guess"


async def test_an_object_stands_for_its_name_only_while_it_is_in_use() -> None:
    name = "object:guess:Guess"
    with bind_objects({name: Coin}):
        assert ENVS.get(name) is Coin
        assert isinstance(ENVS.make(name), Coin)
        seen = await EnvThreads().run(
            lambda: is_bound(name), what="an answer", whom="a thread", timeout_s=60
        )
        assert seen
    assert not is_bound(name)
    with pytest.raises(ConfigError, match=r"environment 'object:guess:Guess'.*ludic\.resume"):
        ENVS.get(name)
    with pytest.raises(ConfigError, match="Python object"):
        given(name)


def test_presets_and_parsers_remember_how_they_were_made() -> None:
    assert recipe_of(grpo(8, clip=(0.9, 1.1))) == ("grpo", {"group_size": 8, "clip": (0.9, 1.1)})
    assert recipe_of(xml_parser("move")) == ("xml", {"tag": "move"})
    both = compose_parsers(think_prefix_parser(), xml_parser("move"))
    name, arguments = recipe_of(both) or ("", {})
    assert name == "compose"
    assert [recipe_of(part) for part in arguments["parsers"]] == [
        ("think_prefix", {}),
        ("xml", {"tag": "move"}),
    ]


def test_a_changed_algorithm_is_no_longer_the_preset() -> None:
    from dataclasses import replace

    assert recipe_of(replace(grpo(8), name="mine")) is None
    assert recipe_of(grpo(8).with_partial_groups()) is None


@pytest.mark.parametrize(
    ("kind", "arguments", "said"),
    [
        ("xml", {"tga": "move"}, r"no argument 'tga'; did you mean 'tag'\? there are: tag, exact"),
        ("xml", {}, "missing a required argument: 'tag'"),
        ("boxed", {"zzz": 1}, "there are: success_reward, error_reward"),
    ],
)
def test_an_argument_that_a_part_does_not_have_is_answered_with_those_it_has(
    kind: str, arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        PARSERS.make(kind, **arguments)
