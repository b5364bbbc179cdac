"""Launched runs from outside: beginning one, leaving it in the background, watching, stopping."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen
from typing import Any

from ludic.errors import ConfigError, DeadlineError, LaunchError
from ludic.launch.job_files import JobSizes, kuberay_job, slurm_job
from ludic.runs.pipeline.launching import STOP_S, Launch, Tail, check_cluster, driving
from ludic.runs.pipeline.roles import role_log
from ludic.runs.results.terminal import command_name, say
from ludic.runs.run import Run
from ludic.runs.storage import RunFolder
from ludic.workers.watched_process import last_words

BEGIN_S = 300.0
SILENT_S = 60.0
"""A driver that has not renewed its state for this long is gone."""


def job_file(
    system: str, run: str, overrides: Sequence[str] = (), *, out: str | Path | None = None
) -> str:
    """Returns what starts the same launch under SLURM or on Kubernetes, and resumes it if it is
    started again. A node has a GPU for each of the trainer's ranks on it, or as many as a server
    takes; servers, and actors that sample by themselves, fill further nodes like that."""
    if system not in ("slurm", "kuberay"):
        raise ConfigError(f"--write {system}: choose slurm or kuberay")
    plan = Run.from_file(run, overrides, out=out)
    config, folder = check_cluster(plan.config), str(plan.folder.path)
    assert config.cluster is not None
    cluster, on_cpu = config.cluster, (config.model.device or "").startswith("cpu")
    ranks, actors = cluster.ranks_per_node, cluster.actors_max or cluster.actors_min
    each = cluster.gpus_per_server if cluster.servers else 0.0
    gpus = max(0 if on_cpu else ranks, ceil(each))
    servers = ceil(cluster.servers / (gpus // each)) if each else 0
    sampling = 0 if on_cpu or config.inference.backend != "local" else ceil(actors / gpus)
    nodes = cluster.trainer_nodes + servers + sampling
    processors = cluster.servers + actors * cluster.cpus_per_actor
    command = ["ludic", "launch"]
    sizes = JobSizes(
        name=re.sub("[^a-z0-9]+", "-", f"ludic-{config.run.name}".lower())[:47].strip("-"),
        start=[*command, run, *overrides, "--out", folder],
        resume=[*command, "--resume", folder],
        stop=[*command, "--stop", folder],
        folder=folder,
        nodes=nodes,
        gpus_per_node=gpus,
        cpus_per_node=ranks + ceil(processors / nodes) + 1,
    )
    return slurm_job(sizes) if system == "slurm" else kuberay_job(sizes)


def launch_run(run: Run, *, detach: bool = False) -> None:
    """Launches what is left of a run. If a new one fails before there is anything to keep, its
    folder is removed."""
    config, folder = check_cluster(run.config), run.folder
    if not run.resumed:
        folder.make(config, modules=run.modules)
    elif detach:  # the driver in the background reads the settings from there
        with driving(folder):
            folder.take_up(config)
    say(f"run folder: {folder.path}")
    launch = Launch(config, folder, resumed=run.resumed)
    try:
        if detach:
            _leave(folder)
        else:
            launch.go()
    except Exception:
        if not run.resumed and not launch.begun:
            folder.abandon()
        raise


def _leave(folder: RunFolder) -> None:
    """Starts a driver that outlives this process, and returns once it has begun."""
    log = role_log(folder.path, "driver")
    log.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "ludic", "launch", "--resume", str(folder.path)]
    with open(log, "ab") as output:
        driver = Popen(command, stdin=DEVNULL, stdout=output, stderr=STDOUT, start_new_session=True)
    deadline = time.monotonic() + BEGIN_S
    while not _is_driven_by(driver.pid, folder):
        if (status := driver.poll()) is not None:
            if status == 0:  # it was quicker than this look
                return
            raise LaunchError(f"the driver ended with status {status}: {last_words(log, 2)}")
        if time.monotonic() > deadline:
            driver.kill()
            raise DeadlineError("the driver to begin", f"process {driver.pid}", BEGIN_S)
        time.sleep(0.2)
    name, path = command_name(), folder.path
    say(f"running in the background; watch it with: {name} launch --attach {path}")
    say(f"stop it with: {name} launch --stop {path}")


def _is_driven_by(pid: int, folder: RunFolder) -> bool:
    """Whether this driver has a role to watch over: before that, it may still be refused."""
    state = _state(folder)
    return state is not None and state["driver"]["pid"] == pid and bool(state["roles"])


def attach(path: Path) -> None:
    """Shows what a launched run says until it ends; Ctrl-C only ends the showing."""
    folder = _driven(path)
    own = role_log(folder.path, "driver")  # if detached; with the trainer's words
    trainer = [role_log(folder.path, name) for name in ("trainer", "trainer-rank0")]
    logs = Tail(own) if own.is_file() else Tail(*trainer)
    try:
        for _ in _while_driven(folder):
            logs.show()
    except KeyboardInterrupt:
        say(f"still running; stop it with: {command_name()} launch --stop {path}")


def stop(path: Path) -> None:
    """Has a launched run stopped with a checkpoint, and waits until it has."""
    folder = _driven(path)
    (folder.path / "launch" / "stop").touch()
    say("stopping after this step, with a checkpoint")
    deadline = time.monotonic() + STOP_S + 2 * SILENT_S
    for _ in _while_driven(folder):
        if time.monotonic() > deadline:
            raise DeadlineError("the run to stop", f"its driver ({path})", STOP_S)
    say(f"stopped; resume it with: {command_name()} launch --resume {path}")


def _state(folder: RunFolder) -> dict[str, Any] | None:
    return folder.read_json("launch/state.json") if folder.has("launch/state.json") else None


def _driven(path: Path) -> RunFolder:
    folder = RunFolder.open(path)
    if _state(folder) is None:
        raise ConfigError(
            f"the run in {path} has no driver now: `ludic launch --resume {path}` starts one"
        )
    return folder


def _while_driven(folder: RunFolder) -> Any:
    """Yields twice a second while the run has a driver that is heard of."""
    state, heard = None, time.monotonic()
    while True:
        try:
            now = _state(folder)
        except ConfigError:  # it went between two looks
            now = None
        if now is None:
            return
        if now != state:
            state, heard = now, time.monotonic()
        elif time.monotonic() - heard > SILENT_S:
            who = "process {pid} on {host}".format_map(now["driver"])
            raise LaunchError(f"the run's driver, {who}, has been silent for {SILENT_S:g} s")
        yield now
        time.sleep(0.5)
