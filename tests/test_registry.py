"""Names: registering, finding, listing, and what is said when a name is wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import ludic.plumbing.naming as naming
import ludic.registry as registry
from ludic.errors import ConfigError, DuplicateNameError, UnknownNameError
from ludic.registry import Entry, Registry, stored_names
from ludic.workers.threads import EnvThreads

PACKAGE = '''
class LampEnv:
    """A lamp that can be switched on.

    More about lamps.
    """

    def __init__(self, watts: int = 40) -> None:
        self.watts = watts

number = 3
'''


@pytest.fixture
def envs() -> Registry:
    """A registry with one built-in, apart from the global ones."""
    return Registry(
        "environment",
        {"ordered": Entry("collections:OrderedDict", "A dict that remembers.")},
        "ludic_tests.envs",
    )


@pytest.fixture
def installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another distribution on the path, which announces environments as entry points."""
    (tmp_path / "lamps.py").write_text(PACKAGE)
    info = tmp_path / "lamps-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lamps\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[ludic_tests.envs]\n"
        "lamp = lamps:LampEnv\n"
        "ordered = lamps:LampEnv\n"
        "gone = lamps:NoSuchEnv\n"
        "absent = no_such_module_anywhere:Env\n"
        "number = lamps:number\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("lamps", None)


def test_a_registered_factory_is_called_with_the_arguments(envs: Registry) -> None:
    envs.register("pair", lambda left, right=2: (left, right))
    assert envs.make("pair", left=1) == (1, 2)


def test_register_is_a_decorator_that_gives_back_what_it_decorates(envs: Registry) -> None:
    @envs.register("box")
    class Box:
        """Holds things.

        And more.
        """

    assert isinstance(Box(), Box)
    assert isinstance(envs.make("box"), Box)
    assert envs.describe()["box"] == "Holds things."


def test_a_description_goes_before_the_docstring(envs: Registry) -> None:
    envs.register("d", dict, description="Said by hand.")
    assert envs.describe()["d"] == "Said by hand."


def test_a_wrong_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError) as caught:
        registry.make_env("tictactoe")
    assert "did you mean 'tic_tac_toe'" in str(caught.value)
    with pytest.raises(UnknownNameError, match="'react'"):
        registry.make_agent("reakt")
    runtime: Any = None
    with pytest.raises(UnknownNameError, match="'single_agent'"):
        registry.make_protocol("singel_agent", runtime)


@given(name=st.text())
@example(name=":")
@example(name="0:")
@example(name="a b:c")
def test_any_unknown_name_is_an_unknown_name_error(name: str) -> None:
    registry_of_one = Registry("thing", {"only": Entry("collections:deque", "")}, "ludic_tests.x")
    if name != "only" and not naming._PLACE.fullmatch(name):
        with pytest.raises(UnknownNameError, match="thing"):
            registry_of_one.get(name)


def test_a_name_that_is_taken_cannot_be_registered_again(envs: Registry) -> None:
    envs.register("mine", dict)
    with pytest.raises(DuplicateNameError, match=r"'mine' already exists \(registered by"):
        envs.register("mine", dict)
    with pytest.raises(DuplicateNameError, match=r"'ordered' already exists \(built in\)"):
        envs.register("ordered", dict)


def test_a_name_taken_back_is_free_again(envs: Registry) -> None:
    envs.register("mine", dict)
    envs.unregister("mine")
    assert "mine" not in envs.names()
    envs.register("mine", list)
    with pytest.raises(UnknownNameError):
        envs.unregister("ordered")


@pytest.mark.parametrize("name", ["", "  ", None, 3])
def test_a_name_must_be_text(envs: Registry, name: Any) -> None:
    with pytest.raises(ConfigError, match="must be text"):
        envs.register(name, dict)


def test_an_object_in_the_place_of_a_name_is_told_to_take_one() -> None:
    with pytest.raises(ConfigError, match=r"tool <function .*`register_tool`, and give"):
        registry.get_tool(lambda text: text)  # type: ignore[arg-type]


def test_what_cannot_be_called_cannot_be_registered(envs: Registry) -> None:
    thing: Any = 3
    with pytest.raises(ConfigError, match="cannot be called"):
        envs.register("three", thing)


def test_arguments_that_do_not_fit_are_said_with_those_that_do(envs: Registry) -> None:
    def room(size: int, *, dark: bool = False) -> int:
        return size

    envs.register("room", room)
    with pytest.raises(ConfigError, match=r"'room' cannot be made.*'drak'.*size"):
        envs.make("room", size=3, drak=True)


def test_a_type_error_inside_a_factory_is_not_mistaken_for_wrong_arguments(envs: Registry) -> None:
    def broken() -> None:
        raise TypeError("inner trouble")

    envs.register("broken", broken)
    with pytest.raises(TypeError, match="inner trouble"):
        envs.make("broken")


@pytest.mark.usefixtures("installed_package")
def test_another_packages_entry_point_is_found_listed_and_made(envs: Registry) -> None:
    assert envs.make("lamp", watts=60).watts == 60
    assert envs.describe()["lamp"] == "A lamp that can be switched on."
    with pytest.raises(UnknownNameError, match="'lamp'"):
        envs.get("lamb")


@pytest.mark.usefixtures("installed_package")
def test_a_broken_entry_point_says_so_and_spoils_no_listing(envs: Registry) -> None:
    for name, complaint in {
        "gone": "NoSuchEnv",
        "absent": "no_such_mod",
        "number": "be called",
    }.items():
        with pytest.raises(ConfigError, match=complaint):
            envs.get(name)
        assert "cannot be used" in envs.describe()[name]


@pytest.mark.usefixtures("installed_package")
def test_a_name_from_two_places_is_refused_and_not_chosen_between(envs: Registry) -> None:
    with pytest.raises(DuplicateNameError, match="built in and the package lamps"):
        envs.get("ordered")


def test_a_class_of_the_right_kind_is_found_by_its_place() -> None:
    from ludic.envs.tic_tac_toe import TicTacToeEnv

    env = registry.make_env("ludic.envs.tic_tac_toe:TicTacToeEnv", opponent="perfect")
    assert isinstance(env, TicTacToeEnv)


@pytest.mark.parametrize("kind", [registry.ENVS, registry.AGENTS, registry.PROTOCOLS])
@pytest.mark.parametrize("place", ["os:system", "pickle:loads", "subprocess:Popen", "torch:load"])
def test_for_stored_data_only_a_class_of_the_kind_is_taken_by_its_place(
    kind: Registry, place: str
) -> None:
    with stored_names(), pytest.raises(ConfigError, match="not a class derived from"):
        kind.get(place)


def test_a_run_may_name_a_function_that_makes_an_environment_but_no_class_of_another_kind() -> None:
    import os

    assert registry.ENVS.get("os:getcwd") is os.getcwd
    with pytest.raises(ConfigError, match="not a class derived from LudicEnv"):
        registry.ENVS.get("subprocess:Popen")


@pytest.mark.parametrize(
    "kind",
    [
        *(registry.TOOLS, registry.BOTS, registry.PARSERS, registry.REWARDS),
        *(registry.CONTEXTS, registry.TOOL_PARSERS, registry.ALGORITHMS),
    ],
    ids=lambda kind: str(kind.kind),
)
def test_a_function_is_found_by_its_place_but_never_for_stored_data(kind: Registry) -> None:
    import os

    assert kind.get("os:system") is os.system
    with stored_names(), pytest.raises(ConfigError, match=r"stored data.*register_"):
        kind.get("os:system")
    assert kind.get("os:system") is os.system


async def test_threads_inherit_that_names_are_stored() -> None:
    threads = EnvThreads()

    async def seen() -> Any:
        return await threads.run(
            registry.names_are_stored, what="an answer", whom="a thread", timeout_s=60
        )

    assert not await seen()
    with stored_names():
        assert await seen()


@pytest.mark.parametrize(
    "kind",
    [
        *(registry.ENVS, registry.AGENTS, registry.PROTOCOLS, registry.BOTS, registry.PARSERS),
        *(registry.REWARDS, registry.CONTEXTS, registry.TOOL_PARSERS, registry.ALGORITHMS),
    ],
    ids=lambda kind: str(kind.kind),
)
def test_every_built_in_is_where_the_table_says_and_has_one_line(kind: Registry) -> None:
    lines = kind.describe()
    assert lines
    for name, line in lines.items():
        assert callable(kind.get(name))
        assert line
        assert "\n" not in line


def test_a_spec_is_a_name_or_a_mapping_with_a_kind_and_arguments(envs: Registry) -> None:
    envs.register("pair", lambda left=1, right=2: (left, right))
    assert envs.make_from("pair") == (1, 2)
    assert envs.make_from({"kind": "pair", "left": 5}) == (5, 2)
    with pytest.raises(ConfigError, match="needs a 'kind', one of: ordered, pair"):
        envs.make_from({"left": 5})
    with pytest.raises(ConfigError, match=r"'pair' cannot be made.*'middle'"):
        envs.make_from({"kind": "pair", "middle": 5})


def test_a_place_that_is_not_there_is_said() -> None:
    with pytest.raises(ConfigError, match="no_such_module"):
        registry.make_env("no_such_module:Env")
    with pytest.raises(ConfigError, match="NoSuchEnv"):
        registry.make_env("ludic.envs:NoSuchEnv")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        registry.make_env("a..b:Env")


@pytest.mark.parametrize(
    "name",
    ["tic_tac_toe", "tic_tac_toe_two_player", "dataset_qa", "gsm8k", "math", "key_door"],
)
def test_a_built_in_environment_is_there(name: str) -> None:
    from ludic.envs.env import LudicEnv

    factory: Any = registry.ENVS.get(name)
    assert issubclass(factory, LudicEnv)


@pytest.mark.parametrize("name", ["agent", "tool", "react"])
def test_a_built_in_agent_is_there(name: str) -> None:
    from ludic.agents import Agent

    factory: Any = registry.AGENTS.get(name)
    assert issubclass(factory, Agent)


@pytest.mark.parametrize("name", ["single_agent", "multi_agent", "delegating"])
def test_a_built_in_protocol_is_there(name: str) -> None:
    assert callable(registry.PROTOCOLS.get(name))


def test_a_tool_is_the_function_itself() -> None:
    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    registry.register_tool("test_registry_add", add)
    try:
        assert registry.get_tool("test_registry_add") is add
        assert registry.list_tools()["test_registry_add"] == "Adds."
    finally:
        registry.unregister_tool("test_registry_add")


def test_a_module_that_is_not_found_says_where_to_start() -> None:
    with pytest.raises(ConfigError, match=r"No module named 'nowhere' \(start in the folder of"):
        registry.PARSERS.get("nowhere:parse")
    with pytest.raises(ConfigError, match="cannot be loaded") as caught:
        registry.PARSERS.get("json:nothing")
    assert "start in" not in str(caught.value)
