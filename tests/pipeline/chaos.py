"""Kills actors, trainer and Redis at random moments, and counts what became of every unit.

    python -m tests.pipeline.chaos --kills 60 --groups 200

The children are forked from a process that has imported everything, so that kills hit work and not
imports. The last line is a JSON object: `groups`, `kills`, `lost` (units that are neither trained
on nor dropped with a reason), `doubled` (units that were trained on twice), and `same_weights`
(whether the final weights are those of a run that was never killed).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import multiprocessing
import os
import random
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
from tests.pipeline.world import Recorded, act, make_source, make_trainer, trained_units

GROUPS_PER_UPDATE = 2
EVERY = 3
LEASE_S = 1.0
MAX_FAILURES = 2
_fork = multiprocessing.get_context("fork")


def trainer_main(config: PipelineConfig, folder: Path, updates: int) -> None:
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
        )
        assert isinstance(source, Recorded)
        source.record = folder / "record"
        # In the background for every other attempt: both ways must hold.
        background = attempts % 2 == 1
        trainer = make_trainer(source, folder / "checkpoints", every=EVERY, background=background)
        await trainer.train(updates)
        books = source.ledger
        report = {"trained": books.trained, "dropped": dict(books.dropped), "next": books.next}
        report["outstanding"] = sorted(books.outstanding)
        await source.close("all updates are done")
        save_model(trainer.model, str(folder / "weights"))
        (folder / "done.json").write_text(json.dumps(report))

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
    redis: LocalRedis = field(init=False)
    children: dict[str, Any] = field(default_factory=dict)
    starts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self.redis = LocalRedis(self.folder / "redis")
        self.redis.start()
        self.config = PipelineConfig(self.redis.url, "chaos", patience_s=120.0, call_s=5.0)

    def start(self, name: str) -> None:
        self.starts[name] += 1
        work: tuple[Callable[..., None], tuple[Any, ...]]
        if name == "trainer":
            work = (trainer_main, (self.config, self.folder, self.updates))
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
        if name == "redis":
            self.redis.kill()
            time.sleep(random.random() * 0.5)
            self.redis.start()
            return
        child = self.children[name]
        if child.exitcode is None:
            os.kill(child.pid, signal.SIGKILL)
        child.join(10)

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
    return len(record.read_bytes().splitlines()) if record.is_file() else 0


def until_done(house: Household, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not house.is_done:
        house.tend()
        if time.monotonic() > deadline:
            raise SystemExit(f"the run was not done after {seconds:.0f} s: {house.failures[-5:]}")
        time.sleep(0.05)


def chaos(folder: Path, kills: int, groups: int, seed: int, actors: int = 4) -> dict[str, Any]:
    """Runs the same training twice, once in peace, and compares."""
    chance = random.Random(seed)
    updates = groups // GROUPS_PER_UPDATE
    peace = Household(folder / "peace", updates, actors, latency_s=0.0)
    try:
        peace.start_all()
        until_done(peace, 600)
    finally:
        peace.end()
    house = Household(folder / "chaos", updates, actors, latency_s=0.02)
    killed: Counter[str] = Counter()
    moments = sorted(chance.uniform(0, updates * 0.9) for _ in range(kills))
    began = time.monotonic()
    try:
        house.start_all()
        deadline = time.monotonic() + 60 + 30 * kills
        for moment in moments:
            # Most come at a random point of the training, the others while it recovers.
            soon = chance.random() < 0.4
            wait = time.monotonic() + chance.random() * 0.6
            while time.monotonic() < wait or not (
                soon or progress(house.folder / "record") >= moment
            ):
                house.tend()
                if house.is_done or time.monotonic() > deadline:
                    break
                time.sleep(0.01)
            if house.is_done:
                break
            name = chance.choice(["redis", "trainer", *(f"actor{i}" for i in range(actors))])
            house.kill(name)
            killed[name.rstrip("0123456789")] += 1
            print(f"kill {killed.total()}: {name}", file=sys.stderr, flush=True)
        until_done(house, 600)
    finally:
        house.end()
    report = json.loads((house.folder / "done.json").read_text())
    trained = [n for units in trained_units(house.folder / "record").values() for n in units]
    counts = Counter(trained)
    asked = set(range(report["next"])) - set(report["outstanding"])
    lost = len(asked - set(trained)) - sum(report["dropped"].values())
    before, after = (load_file(h.folder / "weights") for h in (peace, house))
    return {
        "groups": len(counts),
        "kills": killed.total(),
        "lost": lost,
        "doubled": sum(n - 1 for n in counts.values()),
        "dropped": report["dropped"],
        "same_weights": all(torch.equal(before[name], after[name]) for name in before),
        "killed": dict(killed),
        "trainers": house.starts["trainer"],
        "failures": len(house.failures),
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--groups", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="ludic-chaos-") as temporary:
        found = chaos(args.folder or Path(temporary), args.kills, args.groups, args.seed)
    print(json.dumps(found), flush=True)
    clean = not found["lost"] and not found["doubled"] and found["same_weights"]
    sys.exit(0 if clean and found["kills"] == args.kills else 1)


if __name__ == "__main__":
    try:
        main()
    except LudicError as exc:
        sys.exit(str(exc))
