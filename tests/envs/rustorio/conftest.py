"""A small game in Rustorio's manner, built once for all tests of this folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ludic.envs.code_exec.sandbox.pool import SandboxPool
from ludic.envs.rustorio import RustorioEnv

HERE = Path(__file__).parent
MODE = "bakery::gamemodes::FirstDay"
STAGES = {
    "wheat": "bakery::Batch<bakery::goods::Wheat, 6>",
    "oven": "bakery::buildings::Oven",
}
HEAD = f"""\
use bakery::{{GameMode, Tick, buildings::Oven}};
type Start = <{MODE} as GameMode>::StartingResources;
type Victory = <{MODE} as GameMode>::VictoryResources;
"""


def program(body: str, before: str = "") -> str:
    """An answer with `body` as the player's function, and items `before` it."""
    main = f"pub fn user_main(mut tick: Tick, start: Start) -> (Tick, Victory) {{\n{body}\n}}"
    return f"```rust\n{before}\n{HEAD}{main}\n```"


WINS = """
    let Start { bricks, mut field } = start;
    let mut oven = Oven::build(&tick, bricks);
    stages::oven(&oven);
    let wheat = field.reap::<6>(&mut tick);
    stages::wheat(&wheat);
    oven.wheat(&tick).add(wheat);
    tick.advance_by(15);
    let bread = oven.bread(&tick).take().unwrap();
    (tick, bread)"""
"""Reaps in 12 ticks, and bakes three loaves in 15 more."""


@pytest.fixture(scope="session")
def crate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The game's crate, in a folder that cargo may write to."""
    folder = tmp_path_factory.mktemp("game") / "games"
    shutil.copytree(HERE / "bakery", folder)
    return folder / "bakery"


@pytest.fixture(scope="session")
def programs() -> Iterator[SandboxPool]:
    with SandboxPool("bubblewrap", workers=1) as pool:
        yield pool


@pytest.fixture
def make(crate: Path, programs: SandboxPool) -> Callable[..., RustorioEnv]:
    """An environment over the bakery whose episode has begun."""

    def made(**settings: Any) -> RustorioEnv:
        given = {"stages": STAGES, "pool": programs, **settings}
        env = RustorioEnv(crate=str(crate), mode=MODE, **given)
        env.reset(seed=0)
        return env

    return made
