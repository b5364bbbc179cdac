"""The engine of a cluster: Ray finds the nodes and starts one small actor on each, which runs our
command there. Ray carries no data. The only file that imports Ray."""

from __future__ import annotations

import json
import logging
import os
import platform
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ludic
from ludic.errors import LaunchError, MissingExtraError
from ludic.launch.local import together
from ludic.launch.processes import Processes, free_port
from ludic.launch.roles import Ended, Placement, Role, Running, Waiting

try:
    import ray
    from ray.exceptions import RayError, RayTaskError
    from ray.util.placement_group import (
        placement_group,
        placement_group_table,
        remove_placement_group,
    )
    from ray.util.scheduling_strategies import (
        NodeAffinitySchedulingStrategy,
        PlacementGroupSchedulingStrategy,
    )
except ImportError as exc:
    raise MissingExtraError("ray", "ray") from exc

ANSWER_S = 60.0
"""How long a node may take for an answer."""
SILENT_S = 60.0
"""A node whose actor has not answered for this long counts as lost."""
_LOOK = """
import json, os, platform, sys
import ludic
mark = open(sys.argv[1], encoding="utf-8").read() if os.path.isfile(sys.argv[1]) else ""
print(json.dumps([platform.python_version(), ludic.__version__, mark]))
"""


@dataclass(frozen=True, slots=True)
class Expected:
    """What every node must have: this Python with the driver's versions, the working folder, and
    the file `mark`, which the driver wrote into the folder that all share."""

    python: str
    folder: Path
    mark: Path
    word: str
    versions: tuple[str, str] = (platform.python_version(), ludic.__version__)


class Runner:
    """A Ray actor: runs one node's share of one role, on that node."""

    def __init__(self) -> None:
        self._processes: Processes | None = None
        self._address = str(ray.util.get_node_ip_address())

    def look(self, expected: Expected, good: Sequence[str]) -> tuple[str, str, str | None]:
        """Returns this node's id and address, and what is wrong with it. It is not looked at again
        if it is among the `good` ones."""
        node, wrong = str(ray.get_runtime_context().get_node_id()), None
        if node not in good:
            wrong = _wrong_with(expected)
        return node, self._address, wrong and f"node {self._address} {wrong}"

    def meet(self) -> tuple[str, int]:
        """Returns where the ranks of a gang can meet on this node."""
        return self._address, free_port(self._address)

    def start(self, role: Role, node: int, master: tuple[str, int] | None) -> None:
        """Starts the role's processes."""
        self._processes = Processes(role, node, address=self._address, master=master)

    def poll(self) -> tuple[int, str] | None:
        """See `Processes.poll`."""
        assert self._processes is not None
        return self._processes.poll()

    def send(self, sign: int) -> None:
        """Sends a signal to the first process."""
        if self._processes is not None:
            self._processes.send(signal.Signals(sign))

    def end(self, grace_s: float) -> None:
        """Ends the processes."""
        if self._processes is not None:
            self._processes.end(grace_s)


def _wrong_with(expected: Expected) -> str | None:
    """What this node lacks, as words that follow its name."""
    if not expected.folder.is_dir():
        return f"has no folder {expected.folder}: set cluster.folder to one that all nodes have"
    python = f"{expected.python} (cluster.python)"
    try:
        answer = subprocess.run(
            [expected.python, "-c", _LOOK, str(expected.mark)],
            cwd=expected.folder,
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            check=True,
        )
        *versions, word = json.loads(answer.stdout)
    except subprocess.CalledProcessError as exc:
        errors = " ".join(exc.stderr.split()[-20:])
        return f"cannot import Ludic with {python}: {errors}"
    except (OSError, ValueError, subprocess.TimeoutExpired) as exc:
        return f"cannot run {python}: {exc}"
    for what, theirs, ours in zip(("Python", "Ludic"), versions, expected.versions, strict=True):
        if theirs != ours:
            return f"has {what} {theirs}, and the driver has {ours}: install the same on every node"
    if word != expected.word:
        return (
            f"does not see the run folder {expected.mark.parent}: keep runs (--out, run.folder) on "
            "storage that all nodes share"
        )
    return None


class RayEngine:
    """Places roles on the Ray cluster that this process is on, or that RAY_ADDRESS names."""

    def __init__(self, expected: Expected) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            ray.init(
                address="auto", log_to_driver=False, logging_level=logging.ERROR, namespace="ludic"
            )
        except (ConnectionError, RuntimeError, ValueError) as exc:
            raise LaunchError(
                "there is no Ray cluster here: start one with `ray start --head` (and `ray start "
                "--address HOST:6379` on the other nodes), or set cluster.engine = "
                f'"local" ({str(exc).splitlines()[0]})'
            ) from exc
        self.address = str(ray.util.get_node_ip_address())
        self.expected = expected
        self._good: list[str] = []

    @property
    def gpus(self) -> float:
        return float(sum(node["Resources"].get("GPU", 0.0) for node in _nodes()))

    def check_nodes(self) -> None:
        """Looks at every node; raises if one lacks what a role needs."""
        places = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in _nodes()]
        runners = [_runner(cpus=0.0, gpus=0.0, strategy=place) for place in places]
        try:
            asked = [runner.look.remote(self.expected, ()) for runner in runners]
            for node, _, wrong in ray.get(asked, timeout=2 * ANSWER_S):
                if wrong:
                    raise LaunchError(wrong)
                self._good.append(node)
        except RayError as exc:
            raise LaunchError(f"a node of the cluster does not answer: {exc}") from exc
        finally:
            for runner in runners:
                ray.kill(runner)

    def start(self, role: Role) -> Placement:
        return _Placed(role, self)

    def shortage(self, roles: list[Role]) -> str | None:
        nodes = [node["Resources"] for node in _nodes()]
        for unit, size in (("GPU", "gpus"), ("CPU", "cpus")):
            asked: dict[str, float] = {}
            for role in roles:
                asked[role.kind] = asked.get(role.kind, 0.0) + role.nodes * getattr(role, size)
            has = sum(node.get(unit, 0.0) for node in nodes)
            if (total := sum(asked.values())) > has:
                parts = ", ".join(f"{count:g} {kind}" for kind, count in asked.items() if count)
                return f"asked for {total:g} {unit}s ({parts}), the cluster has {has:g}"
        for role in roles:
            fit = sum(
                node.get("CPU", 0.0) >= role.cpus and node.get("GPU", 0.0) >= role.gpus
                for node in nodes
            )
            if fit < role.nodes:
                return f"{role.name} asked for {role.wants}; {fit} of {len(nodes)} nodes have that"
        return None

    def free(self) -> str:
        """What nobody uses, in words."""
        unused = ray.available_resources()
        return f"{unused.get('CPU', 0):g} CPUs and {unused.get('GPU', 0):g} GPUs are free"

    def close(self) -> None:
        ray.shutdown()


class _Placed:
    """A role in Ray: first a placement group, then a `Runner` in each of its bundles, which is
    looked at, started and asked how it stands. Nothing here waits but `end`."""

    def __init__(self, role: Role, engine: RayEngine) -> None:
        self._role, self._engine = role, engine
        share = {"CPU": role.cpus, "GPU": role.gpus}
        bundle = {unit: amount for unit, amount in share.items() if amount}
        strategy = "STRICT_SPREAD" if role.nodes > 1 else "STRICT_PACK"
        self._group = placement_group([bundle] * role.nodes, strategy=strategy)
        self._runners: list[Any] = []
        self._asked: list[Any] = []
        self._asked_at = time.monotonic()
        self._stage = "placing"
        self._running = Running(())

    def poll(self) -> Waiting | Running | Ended:
        try:
            return self._poll()
        except RayTaskError as exc:  # what our own code raised on the node: of both kinds at once
            return Ended(None, str(exc.cause))
        except LaunchError as exc:
            return Ended(None, str(exc))
        except RayError as exc:
            return Ended(None, f"its node, or what ran it there, is gone ({type(exc).__name__})")

    def _poll(self) -> Waiting | Running | Ended:
        if self._stage == "placing":
            if placement_group_table(self._group)["state"] != "CREATED":
                return Waiting(f"it asked for {self._role.wants}; {self._engine.free()}")
            self._runners = [self._runner(index) for index in range(self._role.nodes)]
            good = list(self._engine._good)
            self._ask(
                "looking", (r.look.remote(self._engine.expected, good) for r in self._runners)
            )
        answers = self._answers()
        if answers is None:
            return self._running if self._stage == "running" else Waiting()
        match self._stage:
            case "looking":
                self._running = Running(tuple(f"{at} ({node[:6]})" for node, at, _ in answers))
                if wrong := next((wrong for _, _, wrong in answers if wrong), None):
                    return Ended(None, wrong)
                self._engine._good += [node for node, _, _ in answers]
                if self._role.world > 1:
                    self._ask("meeting", [self._runners[0].meet.remote()])
                else:
                    self._start(None)
            case "meeting":
                self._start(answers[0])
            case "starting":
                self._ask_all()
                return self._running
            case "running":
                self._ask_all()
                return together(answers, self._running)
        return Waiting()

    def _start(self, master: tuple[str, int] | None) -> None:
        runners = enumerate(self._runners)
        self._ask("starting", (r.start.remote(self._role, i, master) for i, r in runners))

    def _ask_all(self) -> None:
        self._ask("running", (runner.poll.remote() for runner in self._runners))

    def _ask(self, stage: str, asked: Iterable[Any]) -> None:
        self._stage, self._asked, self._asked_at = stage, list(asked), time.monotonic()

    def _answers(self) -> list[Any] | None:
        """What was answered, once all have; raises what one of them raised."""
        ready, missing = ray.wait(self._asked, num_returns=len(self._asked), timeout=0)
        answers = ray.get(ready, timeout=ANSWER_S)
        if not missing:
            return [answers[ready.index(ref)] for ref in self._asked]
        if time.monotonic() - self._asked_at > SILENT_S + ANSWER_S:
            raise LaunchError(f"{self._role.name}'s node has not answered for {SILENT_S:g} s")
        return None

    def _runner(self, index: int) -> Any:
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        return _runner(cpus=self._role.cpus, gpus=self._role.gpus, strategy=strategy)

    def send(self, sign: signal.Signals) -> None:
        if self._runners:
            self._runners[0].send.remote(int(sign))

    def end(self, grace_s: float) -> None:
        with suppress(RayError):
            ended = [runner.end.remote(grace_s) for runner in self._runners]
            if ended:
                ray.wait(ended, num_returns=len(ended), timeout=grace_s + 10.0)
        for runner in self._runners:
            with suppress(RayError):
                ray.kill(runner)
        with suppress(RayError):
            remove_placement_group(self._group)


def _runner(*, cpus: float, gpus: float, strategy: Any) -> Any:
    options = {"num_cpus": cpus, "num_gpus": gpus, "max_restarts": 0, "max_concurrency": 4}
    return ray.remote(Runner).options(scheduling_strategy=strategy, **options).remote()


def _nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]
