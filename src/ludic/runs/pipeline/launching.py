"""The driver of a launched run: has its roles placed, watches over them, and ends with it.

Beside the run's own files its folder then has `logs/`, a file for each role, and `launch/`:

state.json      who drives it and how its roles are, renewed every few seconds; gone with the driver
events.jsonl    one line for every placement, restart and loss
stop            asks the driver to stop the run, with a checkpoint
secrets.json    variables for the roles, which only this user can read; gone with the driver
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ludic.errors import ConfigError, LaunchError, PipelineError
from ludic.launch import Engine, Event, LocalEngine, Role, Supervisor
from ludic.launch.processes import free_port, private_file
from ludic.pipeline import LocalRedis, PipelineConfig
from ludic.pipeline.servers import record_role
from ludic.pipeline.status import PipelineStatus, read_status
from ludic.pipeline.store import Store
from ludic.runs.interruption import handling
from ludic.runs.model import algorithm_of
from ludic.runs.pipeline import address
from ludic.runs.pipeline.elastic import Elastic
from ludic.runs.pipeline.roles import Environment, actor_role, role_log, server_role, trainer_role
from ludic.runs.results.terminal import command_name, say, warn
from ludic.runs.settings import ClusterSection, PipelineSection, RunConfig
from ludic.runs.storage import RunFolder, forget_holder, locked

TICK_S, LOOK_S, LOST_S = 0.5, 2.0, 30.0
STOP_S = 600.0
"""How long the trainer gets to finish its step and write a checkpoint when it is told to stop."""
REDIS_RESTARTS = 10


def check_cluster(config: RunConfig) -> RunConfig:
    """Returns the run as it is launched; raises if it cannot be."""
    cluster, inference = config.cluster or ClusterSection(), config.inference
    listed = inference.servers not in ([], "registered")
    if cluster.servers and (inference.backend != "vllm" or listed):
        raise ConfigError(
            f"cluster.servers={cluster.servers} are started for the run: set inference.backend = "
            '"vllm", and leave inference.servers out'
        )
    if inference.backend == "vllm" and not cluster.servers and inference.servers == []:
        raise ConfigError(
            'inference.backend = "vllm": say how many servers to start with cluster.servers, or '
            "name running ones in inference.servers"
        )
    for name in cluster.variables:
        if name not in os.environ:
            raise ConfigError(f"cluster.variables names {name}, which is not set here")
    if cluster.servers:
        inference = inference.model_copy(update={"servers": "registered"})
    pipeline = config.pipeline or PipelineSection()
    config = config.model_copy(
        update={"cluster": cluster, "pipeline": pipeline, "inference": inference}
    )
    address.check_pipeline(config)
    return config


@contextmanager
def driving(folder: RunFolder) -> Iterator[None]:
    """Makes this process the run's driver; raises if it has one. One on another host whose state is
    not renewed for `LOST_S` counts as lost with its host."""
    files = folder.path / "launch"
    files.mkdir(exist_ok=True)
    state = files / "state.json"

    def beat() -> dict[str, Any]:
        with suppress(OSError, ValueError):
            return dict(json.loads(state.read_text(encoding="utf-8"))["driver"])
        return {}

    before, deadline = beat(), time.monotonic() + LOST_S
    while before and before.get("host") != socket.gethostname() and beat() == before:
        if time.monotonic() > deadline:
            forget_holder(files)
            break
        time.sleep(TICK_S)
    if not before:
        forget_holder(files)
    with locked(files):
        yield


class Launch:
    """A run's processes from placement to end. `go` blocks."""

    def __init__(self, config: RunConfig, folder: RunFolder, *, resumed: bool = False) -> None:
        assert config.cluster is not None
        self.config, self.folder, self.cluster = config, folder, config.cluster
        self._resumed = resumed
        self.path = folder.path.resolve()
        self._files = self.path / "launch"
        self._secrets = self._files / "secrets.json"
        self._python = config.cluster.python or sys.executable
        self._cwd = Path(config.cluster.folder or Path.cwd())
        self._environment = Environment(self.path, self._python, self._cwd, secrets=self._secrets)
        self._stopping: float | None = None
        self._interrupts = 0
        self._roles: dict[str, dict[str, Any]] = {}
        self._beats = 0
        self._failure: str | None = None
        self._store: Store | None = None
        self._redis: LocalRedis | None = None
        self._redis_restarts = 0

    @property
    def begun(self) -> bool:
        """Whether any role was placed: its log may say what went wrong."""
        return bool(self._roles)

    # From the beginning to the end

    def go(self) -> None:
        """Trains the run in the folder to its end, or until it is stopped."""
        word, mark = secrets.token_hex(8), self._files / "mark"
        with ExitStack() as stack:
            stack.enter_context(driving(self.folder))
            stack.callback((self._files / "state.json").unlink, missing_ok=True)
            self._write_state()
            if self._resumed:
                self.folder.take_up(self.config)
            mark.write_text(word, encoding="utf-8")
            (self._files / "stop").unlink(missing_ok=True)
            engine = self._engine(mark, word)
            stack.callback(engine.close)
            roles = self._first_roles(engine)
            actors = [self._actor(n + 1) for n in range(self.cluster.actors_min)]
            if why := engine.shortage([*roles, *actors]):
                raise LaunchError(f"this run does not fit: {why}")
            store = stack.enter_context(self._joined(engine))
            supervisor = Supervisor(
                engine,
                tell=self._tell,
                patience_s=self.cluster.patience_s,
                again=lambda role: self._wants(role, store),
            )
            stack.callback(supervisor.close)
            stack.enter_context(handling(self._interrupted, signal.SIGINT, signal.SIGTERM))
            for role in roles:
                supervisor.add(role)
            self._watch(supervisor, store)
        self._conclude()

    def _engine(self, mark: Path, word: str) -> Engine:
        if self.cluster.engine == "local":
            return LocalEngine()
        from ludic.launch.ray_engine import Expected, RayEngine

        engine = RayEngine(Expected(self._python, self._cwd, mark, word))
        try:
            engine.check_nodes()
        except BaseException:
            engine.close()
            raise
        return engine

    def _first_roles(self, engine: Engine) -> list[Role]:
        device = self.config.model.device
        self._on_gpus = engine.gpus > 0 if device is None else not device.startswith("cpu")
        environment, cluster = self._environment, self.cluster
        servers = [server_role(environment, cluster, n + 1) for n in range(cluster.servers)]
        # What needs the most in one place is placed first.
        return [trainer_role(environment, cluster, gpus=self._on_gpus), *servers]

    def _actor(self, number: int) -> Role:
        samples_here = self.config.inference.backend == "local"
        return actor_role(
            self._environment,
            number,
            restarts=self.cluster.restarts,
            cpus=self.cluster.cpus_per_actor,
            gpus=1.0 if samples_here and self._on_gpus else 0.0,
        )

    @contextmanager
    def _joined(self, engine: Engine) -> Iterator[Store]:
        """Has a Redis for the run, and its address and other variables where roles read them."""
        config, section = self.config, address.section_of(self.config)
        with ExitStack() as stack:
            if address.starts_redis(section):
                host = getattr(engine, "address", None)  # of one host alone it is a unix socket
                port = 0 if host is None else free_port(host)
                self._redis = LocalRedis(self.path / "redis", host, port)
                stack.enter_context(self._redis)
            pipeline = address.find_pipeline(config, self.path, own=self._redis)
            store = Store(PipelineConfig(pipeline.url, pipeline.run, patience_s=2.0, call_s=5.0))
            stack.callback(store.close)
            for file in (self._secrets, self.path / address.FILE):
                stack.callback(file.unlink, missing_ok=True)
            address.write_address(self.path, pipeline)
            variables = {name: os.environ[name] for name in self.cluster.variables}
            variables[section.url_env or address.URL_VARIABLE] = pipeline.url
            private_file(self._secrets, json.dumps(variables))
            self._store = store
            try:
                yield store
            finally:
                self._store = None

    def _watch(self, supervisor: Supervisor, store: Store) -> None:
        log = Tail(role_log(self.path, "trainer"), role_log(self.path, "trainer-rank0"))
        training, size = self.config.training, algorithm_of(self.config).group_size or 1
        # Redis keeps what was trained on until a checkpoint has it.
        updates = 1 + (training.checkpoint_every or training.steps)
        elastic = Elastic(self.cluster, updates * training.rollouts_per_update // size)
        looked, acting = 0.0, False
        while supervisor.outcome("trainer") is None:
            time.sleep(TICK_S)
            supervisor.tick()
            log.show()
            self._tend_redis()
            if self._failure is not None or self._asked_to_stop(supervisor):
                return
            if time.monotonic() - looked < LOOK_S:
                continue
            looked = time.monotonic()
            self._write_state()
            if (status := self._look(store)) is None:
                continue
            # Before its first word, and its first policy, an earlier end may stand there.
            if not acting and status.trainer_alive and not status.ended:
                acting = True
                for number in range(self.cluster.actors_min):
                    supervisor.add(self._actor(number + 1))
            elif acting and not status.ended:
                elastic.adjust(supervisor, status, self._actor)
        log.show()

    def _look(self, store: Store) -> PipelineStatus | None:
        with suppress(PipelineError):
            return read_status(store)
        return None

    def _tend_redis(self) -> None:
        """Starts our Redis again, where it was: what it had confirmed is on its disk."""
        redis = self._redis
        if redis is None or redis.process is None or (status := redis.process.poll()) is None:
            return
        if self._redis_restarts >= REDIS_RESTARTS:
            raise LaunchError(f"Redis ended {REDIS_RESTARTS + 1} times: see {redis.folder}")
        self._redis_restarts += 1
        redis.process.end()
        sentence = f"redis ended with status {status}, and is restarted"
        try:
            redis.start()
        except (PipelineError, OSError) as exc:  # late, or ended again: the next tick sees that
            sentence += f", which failed: {exc}"
        self._tell(Event("redis", "restarted", sentence, (), self._redis_restarts))

    def _conclude(self) -> None:
        resume = f"{command_name()} launch --resume {self.folder.path}"
        if self._failure is not None:
            raise LaunchError(
                f"{self._failure} (logs: {self.path / 'logs'}); resume it with: {resume}"
            )
        if self._stopping is not None and not self.folder.has("summary.json"):
            say(f"stopped; resume it with: {resume}")

    # Stopping

    def _interrupted(self, *_: object) -> None:
        """The first Ctrl-C or SIGTERM stops the run with a checkpoint, the second ends it."""
        self._interrupts += 1
        if self._interrupts > 1:
            raise KeyboardInterrupt
        os.write(2, b"\nstopping after this step, with a checkpoint; again to end at once\n")

    def _asked_to_stop(self, supervisor: Supervisor) -> bool:
        """Whether it is time to leave: nothing runs that could be stopped, or not in time."""
        if self._stopping is None:
            if not self._interrupts and not (self._files / "stop").exists():
                return False
            self._stopping = time.monotonic()
            if not supervisor.running("trainer"):
                return True
            supervisor.send("trainer", signal.SIGINT)
        elif not supervisor.running("trainer"):
            return True
        return time.monotonic() - self._stopping > STOP_S

    # What others can see

    def _wants(self, role: Role, store: Store) -> bool:
        """Whether a role that ended is to be started again."""
        if role.kind == "trainer":
            forget_holder(self.path)
            return self._stopping is None
        status = self._look(store) if role.kind == "actor" else None
        return status is None or not status.ended

    def _tell(self, event: Event) -> None:
        (warn if event.is_bad else say)(event.sentence)
        if event.is_last:
            self._failure = event.sentence
        node = ", ".join(dict.fromkeys(event.nodes))
        with suppress(PipelineError):  # it is only shown
            if self._store is not None:
                record_role(self._store, event.role, node, event.what, event.restarts)
        self._roles[event.role] = {"what": event.what, "node": node, "restarts": event.restarts}
        line = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "unix": time.time(), **asdict(event)}
        with open(self._files / "events.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _write_state(self) -> None:
        self._beats += 1
        driver = {"pid": os.getpid(), "host": socket.gethostname(), "beats": self._beats}
        self.folder.write_json("launch/state.json", {"driver": driver, "roles": self._roles})


class Tail:
    """Shows what is written to whichever of these files there is, from now on."""

    def __init__(self, *paths: Path) -> None:
        self._places = {path: path.stat().st_size if path.is_file() else 0 for path in paths}

    def show(self) -> None:
        """Prints what is new."""
        for path, place in self._places.items():
            with suppress(OSError), open(path, "rb") as file:
                file.seek(place)
                if text := file.read():
                    self._places[path] = place + len(text)
                    sys.stdout.write(text.decode(errors="replace"))
                    sys.stdout.flush()
