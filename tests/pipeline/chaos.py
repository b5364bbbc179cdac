"""Kills actors, trainer and Redis at random moments, and counts what became of every unit.

    python -m tests.pipeline.chaos --kills 60 --groups 200 --drop-kills 20

Some kills of Redis cost it all its data ("empty"). A second run drops what is too old, and before
most of its kills of the trainer units come damaged and are dropped ("drop").

The children are forked from a process that has imported everything, so that kills hit work and not
imports. The last line is a JSON object: `groups`, `kills`, `lost` (units that are neither trained
on nor dropped with a reason), `doubled` (units that were trained on twice), and `same_weights`
(whether the final weights are those of a run that was never killed). `drops` is the same of the
second run, with `lost_prompts` and `doubled_prompts`: a unit that is dropped is asked for again
under another number, and one of the two must be trained on, once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_model

from ludic.errors import LudicError
from ludic.pipeline import LocalRedis, PipelineConfig
from ludic.pipeline.store import Store, entries
from ludic.plumbing.files import replacing
from tests.pipeline.world import Recorded, act, make_source, make_trainer, recorded, trained_units

GROUPS_PER_UPDATE = 2
EVERY = 3
LEASE_S = 1.0
MAX_FAILURES = 2
_fork = multiprocessing.get_context("fork")


def trainer_main(config: PipelineConfig, folder: Path, updates: int, drops: bool) -> None:
    """One trainer, from its newest checkpoint to the end."""
    attempts = len(list(folder.glob("attempt-*")))
    (folder / f"attempt-{attempts}").touch()

    async def train() -> None:
        source = make_source(
            config,
            groups_per_update=GROUPS_PER_UPDATE,
            every=EVERY,
            lease_s=LEASE_S,
            kind=Recorded,
            max_lag=2,
            wait_s=300.0,
            stale="drop" if drops else "wait",
            in_order=not drops,
        )
        assert isinstance(source, Recorded)
        source.record = folder / "record"
        # In the background for every other attempt: both ways must hold.
        background = attempts % 2 == 1
        trainer = make_trainer(source, folder / "checkpoints", every=EVERY, background=background)
        await trainer.train(updates - 1)
        async with asyncio.timeout(600):  # all kills come before the end, however quick it is
            while not (folder / "harassed").exists():  # noqa: ASYNC110  (another process makes it)
                await asyncio.sleep(0.05)
        await trainer.train(1)
        books = source.ledger
        report = {"trained": books.trained, "dropped": dict(books.dropped), "next": books.next}
        report["outstanding"] = sorted(books.outstanding)
        report["waiting"] = [asked.of for asked in books.waiting if asked.of is not None]
        await source.close("all updates are done")
        save_model(trainer.model, str(folder / "weights"))
        with replacing(folder / "done.json") as file:  # which others wait for
            file.write_text(json.dumps(report))

    asyncio.run(train())


def actor_main(config: PipelineConfig, name: str, latency_s: float) -> None:
    asyncio.run(act(config, name=name, lease_s=LEASE_S, latency_s=latency_s))


@dataclass
class Household:
    """The processes of one run. A child that ends by itself with an error is started again."""

    folder: Path
    updates: int
    actors: int
    latency_s: float
    drops: bool = False
    redis: LocalRedis = field(init=False)
    children: dict[str, Any] = field(default_factory=dict)
    starts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    damaged: int = 0

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self.redis = LocalRedis(self.folder / "redis")
        self.redis.start()
        self.config = PipelineConfig(self.redis.url, "chaos", patience_s=120.0, call_s=5.0)

    def start(self, name: str) -> None:
        self.starts[name] += 1
        work: tuple[Callable[..., None], tuple[Any, ...]]
        if name == "trainer":
            work = (trainer_main, (self.config, self.folder, self.updates, self.drops))
        else:
            work = (actor_main, (self.config, f"{name}-{self.starts[name]}", self.latency_s))
        child = _fork.Process(target=work[0], args=work[1], name=name, daemon=True)
        child.start()
        self.children[name] = child

    def start_all(self) -> None:
        for name in ("trainer", *(f"actor{i}" for i in range(self.actors))):
            self.start(name)

    def tend(self) -> None:
        """Starts again what ended; an end that was no kill of ours is noted."""
        for name, child in list(self.children.items()):
            if child.exitcode is None or (name == "trainer" and self.is_done):
                continue
            if child.exitcode not in (0, -signal.SIGKILL):
                self.failures.append(f"{name} ended with status {child.exitcode}")
                if len(self.failures) > MAX_FAILURES:
                    raise SystemExit(f"too many ended by themselves: {self.failures}")
            if child.exitcode != 0 or name == "trainer":
                self.start(name)

    def kill(self, name: str) -> None:
        if name in ("redis", "empty"):
            self.redis.kill()
            if name == "empty":
                shutil.rmtree(self.redis.folder)
            time.sleep(random.random() * 0.5)
            self.redis.start()
            return
        if name == "drop":
            self.damage(60.0)
            name = "trainer"
        child = self.children[name]
        if child.exitcode is None:
            os.kill(child.pid, signal.SIGKILL)
        child.join(10)

    def damage(self, seconds: float) -> None:
        """Sends a damaged group, and returns when the trainer has dropped it."""
        store, deadline = Store(self.config), time.monotonic() + seconds
        units: dict[int, str] = {}
        while time.monotonic() < deadline and not self.is_done:
            self.tend()
            for entry, number, _ in entries(store.run("take", "saboteur", 1, 60_000, "0-0")[1]):
                store.run("append", "saboteur", entry, number, b"noise", 0)
                units[number] = entry
            notes = store.facts()["units"]
            if any(notes.get(number, "c")[0] not in "qd" for number in units):
                self.damaged += 1
                break
            time.sleep(0.01)
        store.run("leave", "saboteur")
        store.close()

    @property
    def is_done(self) -> bool:
        return (self.folder / "done.json").is_file()

    def end(self) -> None:
        for child in self.children.values():
            if child.exitcode is None:
                os.kill(child.pid, signal.SIGKILL)
            child.join(10)
        self.redis.stop()


def progress(record: Path) -> int:
    return record.read_bytes().count(b'"step"') if record.is_file() else 0


def until_done(house: Household, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    (house.folder / "harassed").touch()
    while not house.is_done:
        house.tend()
        if time.monotonic() > deadline:
            raise SystemExit(f"the run was not done after {seconds:.0f} s: {house.failures[-5:]}")
        time.sleep(0.05)


def harass(house: Household, kinds: list[str], kills: int, chance: random.Random) -> dict[str, Any]:
    """Kills at random moments until the run is done; returns the kills, by kind."""
    killed: Counter[str] = Counter()
    moments = sorted(chance.uniform(0, house.updates * 0.9) for _ in range(kills))
    deadline = time.monotonic() + 60 + 30 * kills
    for moment in moments:
        # Most come at a random point of the training, the others while it recovers.
        soon = chance.random() < 0.4
        wait = time.monotonic() + chance.random() * 0.6
        while time.monotonic() < wait or not (soon or progress(house.folder / "record") >= moment):
            house.tend()
            if house.is_done or time.monotonic() > deadline:
                break
            time.sleep(0.01)
        if house.is_done:
            break
        name = chance.choice(kinds)
        house.kill(name)
        killed[name.rstrip("0123456789")] += 1
        print(f"kill {killed.total()}: {name}", file=sys.stderr, flush=True)
    until_done(house, 600)
    return dict(killed)


def account(house: Household) -> dict[str, Any]:
    """What became of every unit, and of every prompt."""
    report = json.loads((house.folder / "done.json").read_text())
    trained = [n for units in trained_units(house.folder / "record").values() for n in units]
    counts = Counter(trained)
    asked = set(range(report["next"])) - set(report["outstanding"])
    stands_in = {e["asked"]: e["of"] for e in recorded(house.folder / "record") if "asked" in e}

    def first(number: int) -> int:
        while (of := stands_in.get(number)) is not None:
            number = of
        return number

    prompts = Counter(map(first, trained))
    open_ones = {first(n) for n in (*report["outstanding"], *report["waiting"])}
    all_prompts = {first(n) for n in range(report["next"])}
    return {
        "groups": len(counts),
        "lost": len(asked - set(trained)) - sum(report["dropped"].values()),
        "doubled": counts.total() - len(counts),
        "lost_prompts": len(all_prompts - prompts.keys() - open_ones),
        "doubled_prompts": prompts.total() - len(prompts) + len(prompts.keys() & open_ones),
        "dropped": report["dropped"],
        "trainers": house.starts["trainer"],
        "failures": len(house.failures),
    }


def lived_through(house: Household, kinds: list[str], kills: int, seed: int) -> dict[str, Any]:
    began = time.monotonic()
    try:
        house.start_all()
        killed = harass(house, kinds, kills, random.Random(seed))
    finally:
        house.end()
    found = {"kills": sum(killed.values()), "killed": killed, **account(house)}
    return {**found, "seconds": round(time.monotonic() - began, 1)}


def chaos(
    folder: Path, kills: int, drop_kills: int, groups: int, seed: int, actors: int = 4
) -> dict[str, Any]:
    """Runs the same training twice, once in peace, and compares; then one with drops."""
    updates = groups // GROUPS_PER_UPDATE
    peace = Household(folder / "peace", updates, actors, latency_s=0.0)
    try:
        peace.start_all()
        until_done(peace, 600)
    finally:
        peace.end()
    names = [f"actor{i}" for i in range(actors)]
    house = Household(folder / "chaos", updates, actors, latency_s=0.02)
    found = lived_through(house, ["redis", "empty", "trainer", *names], kills, seed)
    before, after = (load_file(h.folder / "weights") for h in (peace, house))
    found["same_weights"] = all(torch.equal(before[name], after[name]) for name in before)
    dropping = Household(folder / "drops", updates, actors, latency_s=0.02, drops=True)
    kinds = ["drop"] * 4 + ["redis", "empty", *names[:2]]
    found["drops"] = lived_through(dropping, kinds, drop_kills, seed + 1)
    found["drops"]["damaged"] = dropping.damaged
    return found


def is_clean(found: dict[str, Any]) -> bool:
    return not any(
        part[name]
        for part in (found, found["drops"])
        for name in ("lost", "doubled", "lost_prompts", "doubled_prompts")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--drop-kills", type=int, default=20)
    parser.add_argument("--groups", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="ludic-chaos-") as temporary:
        where = args.folder or Path(temporary)
        found = chaos(where, args.kills, args.drop_kills, args.groups, args.seed)
    print(json.dumps(found), flush=True)
    whole = (found["kills"], found["drops"]["kills"]) == (args.kills, args.drop_kills)
    sys.exit(0 if whole and found["same_weights"] and is_clean(found) else 1)


if __name__ == "__main__":
    try:
        main()
    except LudicError as exc:
        sys.exit(str(exc))
