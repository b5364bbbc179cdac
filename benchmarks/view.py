"""A run of 100,000 rollouts in `ludic view`: `python -m benchmarks.view`.

The rollouts have four turns of some thirty words each, with tokens, log-probs and what a trainer
made of them. A server of its own process indexes them; then the first page of the table (what can
be filtered by, and fifty rows) and single rollouts, with tokens and credit, are asked for over
HTTP. `first_page_ms` is of a server that was just started beside a finished index, so that nothing
is remembered; `rollout_ms` is a median. `peak_mb` is the most memory that the server ever held.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np

from ludic.rollouts.lines import as_stored
from ludic.rollouts.storage import rollout_line
from ludic.rollouts.token_log import TokenLog, UpdateTokens
from ludic.saw import build_items
from ludic.types import AgentStep, EnvironmentStep, FinishReason, Rollout, Step, TokenTrace
from ludic.types import VersionSpan as Span

NEEDS = ("starlette", "uvicorn")
KINDS = 64
PER_BLOCK = 256
PER_UPDATE = 512
WORDS = [f"{a}{b}" for a in ("ba", "ko", "li", "ru", "te", "vo") for b in ("n", "ra", "sti", "mel")]


def make_run(folder: Path, count: int) -> None:
    """Writes rollouts and token records of `KINDS` kinds, again and again under other names."""
    (folder / "rollouts").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"schema": 1, "run": {"name": "many"}}))
    draw = random.Random(0)
    kinds = [make_rollout(draw, number) for number in range(KINDS)]
    lines = [rollout_line(kind) for kind in kinds]
    path = folder / "rollouts" / "train.jsonl.zst"
    with open(path, "wb") as file:
        for start in range(0, count, PER_BLOCK):
            block = []
            for number in range(start, min(start + PER_BLOCK, count)):
                name = f"step-{number // PER_UPDATE}/{number % PER_UPDATE}/0".encode()
                group = f"step-{number // PER_UPDATE}/group-{number % PER_UPDATE // 8}".encode()
                line = lines[number % KINDS].replace(b"THE-NAME", name)
                block.append(line.replace(b"THE-GROUP", group))
            file.write(as_stored(path, b"".join(block)))
    with TokenLog(folder / "rollouts" / "train.tokens.jsonl.zst") as log:
        for update in range(0, count, PER_UPDATE):
            numbers = range(update, min(update + PER_UPDATE, count))
            named = [
                kinds[n % KINDS].labelled(id=f"step-{n // PER_UPDATE}/{n % PER_UPDATE}/0/agent")
                for n in numbers
            ]
            credit = {(r.id, turn): 0.5 for r in named for turn in range(4)}
            items = build_items(named, credit)
            values = np.zeros(sum(item.turns[-1].end for item in items), np.float32)
            log.write(UpdateTokens(update // PER_UPDATE + 1, items, values, values))


def make_rollout(draw: random.Random, number: int) -> Rollout:
    steps: list[Step] = []
    history: tuple[int, ...] = ()
    for turn in range(4):
        said = " ".join(draw.choices(WORDS, k=30))
        asked = " ".join(draw.choices(WORDS, k=20))
        prompt = history + tuple(draw.randrange(50_000) for _ in range(40))
        sampled = tuple(draw.randrange(50_000) for _ in range(45))
        trace = TokenTrace(
            prompt, sampled, tuple(-draw.random() for _ in sampled), (Span(0, 45, number),)
        )
        steps.append(
            AgentStep(
                turn,
                ({"role": "user", "content": asked},),
                {"role": "assistant", "content": said},
                FinishReason.STOP,
                trace,
            )
        )
        last = turn == 3
        reward = float(draw.random() < 0.5) if last else 0.0
        steps.append(
            EnvironmentStep(
                turn,
                (len(steps) - 1,),
                asked,
                said[:12],
                asked[::-1],
                reward,
                terminated=last,
                reward_components={"env": reward, "format": 0.0},
                info={"result": "win" if reward else "loss"} if last else {},
            )
        )
        history = prompt + sampled
    return Rollout(
        "THE-NAME/agent", tuple(steps), episode_id="THE-NAME", group_id="THE-GROUP", env_seed=number
    )


class Client:
    """Asks a server, and times it."""

    def __init__(self, port: int, token: str, process: subprocess.Popen[str]) -> None:
        self.port, self.process = port, process
        self.headers = {"Cookie": f"ludic-view-{port}={token}"}

    def ask(self, name: str, **params: Any) -> tuple[Any, float]:
        """The answer, and the milliseconds that it took."""
        began = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request("GET", f"/api/{name}?{urlencode(params)}", headers=self.headers)
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        took = 1000 * (time.perf_counter() - began)
        if answer.status != 200:
            raise SystemExit(f"{name}: {answer.status} {body[:300]!r}")
        return json.loads(body), took

    def peak_mb(self) -> float:
        """The most memory that the server's process has held."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) / 1024


@contextmanager
def server(folder: Path) -> Iterator[Client]:
    """`ludic view`, as a user starts it."""
    command = [sys.executable, "-u", "-m", "ludic", "view", str(folder), "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            found = re.search(r":(\d+)/\?token=(\S+)", process.stdout.readline())
            if found is None:
                raise SystemExit("ludic view printed no address")
            yield Client(int(found[1]), found[2], process)
        finally:
            process.terminate()


def main() -> None:
    """Makes the run, indexes it, asks for pages."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=25, help="rollouts to open")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ludic-view-") as temporary:
        folder = Path(temporary) / "many"
        make_run(folder, args.rollouts)
        files = sum(path.stat().st_size for path in (folder / "rollouts").iterdir())
        print(f"{args.rollouts} rollouts, {files / 2**20:.0f} MB on disk", flush=True)
        figures: dict[str, float] = {}
        peaks = []
        with server(folder) as client:
            began = time.perf_counter()
            while True:
                state, _ = client.ask("state", run="many")
                done = int(state["version"].partition(":")[0])
                if done >= 2 * args.rollouts and state["progress"] is None:
                    break
                time.sleep(0.1)
            figures["index_rollouts_per_s"] = round(args.rollouts / (time.perf_counter() - began))
            peaks.append(client.peak_mb())
        size = (folder / ".view.sqlite").stat().st_size
        with server(folder) as client:
            client.ask("runs")
            page: dict[str, Any] = {}
            _, facets = client.ask("facets", run="many")
            page, rows = client.ask("rollouts", run="many", source="train", limit=50)
            assert page["total"] == args.rollouts
            figures["first_page_ms"] = round(facets + rows, 1)
            others: dict[str, tuple[str, dict[str, Any]]] = {
                "histogram_ms": ("histogram", {}),
                "sorted_ms": ("rollouts", {"sort": "reward", "order": "asc"}),
                "search_ms": ("rollouts", {"q": "bara kosti"}),
                "filtered_ms": ("rollouts", {"outcome": "win", "tokens.min": 1}),
                "neighbours_ms": ("neighbours", {"id": page["rows"][7]["id"]}),
            }
            for name, (what, params) in others.items():
                figures[name] = round(client.ask(what, run="many", **params)[1], 1)
            draw, times = random.Random(1), []
            for _ in range(args.rounds):
                number = draw.randrange(args.rollouts)
                name = f"step-{number // PER_UPDATE}/{number % PER_UPDATE}/0/agent"
                found, took = client.ask("rollout", run="many", id=name)
                assert found["updates"] == [number // PER_UPDATE + 1]
                times.append(took)
            figures["rollout_ms"] = round(statistics.median(times), 1)
            peaks.append(client.peak_mb())
        figures["peak_mb"] = round(max(peaks), 1)
        figures["index_mb"] = round(size / 2**20, 1)
    for name, value in figures.items():
        print(f"{name:22} {value}")
    print(json.dumps({"rollouts": args.rollouts, **figures}))


if __name__ == "__main__":
    main()
