"""The processes that a run over Redis is made of, as roles: trainer, servers, actors."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ludic.launch import Role
from ludic.runs.settings import ClusterSection

RESTARTS = 3
LAUNCHED = "LUDIC_LAUNCHED"
"""Set for a trainer whose actors are somebody else's concern."""


@dataclass(frozen=True, slots=True)
class Environment:
    """What all roles have in common: the run's folder, and what its commands are run with."""

    run: Path
    python: str = sys.executable
    folder: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    secrets: Path | None = None

    def role(self, name: str, *words: str, **options: object) -> Role:
        return Role(
            name,
            (self.python, "-m", "ludic", *words),
            role_log(self.run, name),
            folder=self.folder,
            secrets=self.secrets,
            **{"variables": self.variables, **options},  # type: ignore[arg-type]
        )


def role_log(folder: Path, name: str) -> Path:
    """Returns where a role writes what it has to say."""
    return folder / "logs" / f"{name}.log"


def actor_role(
    environment: Environment,
    number: int,
    *,
    servers: Sequence[str] = (),
    tokenizer: Path | None = None,
    restarts: int = RESTARTS,
    cpus: float = 1.0,
    gpus: float = 0.0,
) -> Role:
    """An actor. Where the trainer has started a server of its own, its address and tokenizer are
    given."""
    name = f"actor-{number}"
    words = ["actor", str(environment.run), "--name", name]
    for url in servers:
        words += ["--server", url]
    if tokenizer is not None:
        words += ["--tokenizer", str(tokenizer)]
    return environment.role(name, *words, kind="actor", restarts=restarts, cpus=cpus, gpus=gpus)


def trainer_role(environment: Environment, cluster: ClusterSection, *, gpus: bool) -> Role:
    """The trainer: all ranks of it."""
    ranks = cluster.ranks_per_node
    return environment.role(
        "trainer",
        *("train", "--resume", str(environment.run)),
        kind="trainer",
        nodes=cluster.trainer_nodes,
        processes=ranks,
        cpus=float(ranks),
        gpus=float(ranks) if gpus else 0.0,
        restarts=cluster.restarts,
        finishes=True,
        variables={**environment.variables, LAUNCHED: "1"},
    )


def server_role(environment: Environment, cluster: ClusterSection, number: int) -> Role:
    """A server, which takes its settings from the run and registers with it."""
    name, engine = f"server-{number}", ("--engine", "local")
    if cluster.server_engine == "vllm":
        engine = ("--log", str(role_log(environment.run, f"{name}-vllm")))
    return environment.role(
        name,
        *("serve", "--register", str(environment.run), "--name", name, *engine),
        # Others may ask it for samples there; those who have the weights' key, for weights, too.
        *("--host", "{address}", "--port", "{port}", "--pass-on", "{address}"),
        kind="server",
        gpus=cluster.gpus_per_server,
        restarts=cluster.restarts,
    )
