"""The roles that a run file stands for, and how many actors it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from ludic.errors import ConfigError
from ludic.runs.pipeline.elastic import wanted
from ludic.runs.pipeline.launching import check_cluster
from ludic.runs.pipeline.roles import Environment, actor_role, server_role, trainer_role
from ludic.runs.settings import ClusterSection, RunConfig, find_run

ENVIRONMENT = Environment(Path("/shared/run"), "/opt/python", secrets=Path("/shared/secrets"))


def config(*overrides: str) -> RunConfig:
    return find_run("tic-tac-toe", overrides)[0]


def test_the_trainer_is_a_gang_with_a_gpu_for_each_rank() -> None:
    cluster = ClusterSection(trainer_nodes=2, ranks_per_node=8, restarts=5)
    role = trainer_role(ENVIRONMENT, cluster, gpus=True)
    assert (role.nodes, role.processes, role.cpus, role.gpus) == (2, 8, 8.0, 8.0)
    assert role.finishes
    assert role.restarts == 5
    assert role.command[0] == "/opt/python"
    assert role.command[-2:] == ("--resume", "/shared/run")
    assert trainer_role(ENVIRONMENT, cluster, gpus=False).gpus == 0.0


def test_an_actor_is_named_and_told_of_servers_that_the_trainer_started() -> None:
    role = actor_role(ENVIRONMENT, 3, servers=["http://a:1"], tokenizer=Path("/shared/vllm"))
    assert role.name == "actor-3"
    assert role.command[3:] == (
        *("actor", "/shared/run", "--name", "actor-3"),
        *("--server", "http://a:1", "--tokenizer", "/shared/vllm"),
    )
    assert role.log == Path("/shared/run/logs/actor-3.log")
    assert not role.finishes


def test_a_server_registers_and_listens_where_it_is_placed() -> None:
    run = config('inference.backend="vllm"', "cluster={servers=2, gpus_per_server=4}")
    launched = check_cluster(run)
    assert launched.inference.servers == "registered"
    assert launched.cluster is not None
    role = server_role(ENVIRONMENT, launched.cluster, 1)
    assert role.gpus == 4.0
    command = " ".join(role.command)
    assert "serve --register /shared/run --name server-1 " in command
    assert "--host {address} --port {port} --pass-on {address}" in command


def test_no_role_has_a_secret_in_what_an_engine_records() -> None:
    role = trainer_role(ENVIRONMENT, ClusterSection(), gpus=False)
    assert role.secrets == Path("/shared/secrets")
    assert dict(role.variables) == {"LUDIC_LAUNCHED": "1"}


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["cluster={servers=2}"], r"cluster.servers=2 .* set inference.backend"),
        (['inference.backend="vllm"', "cluster={}"], "say how many servers"),
        (['cluster={variables=["NOT_SET_HERE"]}'], "NOT_SET_HERE, which is not set here"),
        (["cluster={actors_min=3, actors_max=2}"], "actors_max=2 is below actors_min=3"),
        (['cluster={engine="slurm"}'], "engine"),
        (["cluster={}", "training.overlap=true"], "cannot have training.overlap"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_cluster(config(*overrides))


def test_actors_are_added_while_the_trainer_waits_and_removed_while_groups_pile_up() -> None:
    def to(now: int, waited_s: float, untaken: int, finished: int) -> int:
        return wanted(now, 2, 4, waited_s=waited_s, untaken=untaken, finished=finished, update=8)

    assert to(2, 30.0, 5, 0) == 3, "hungry, and there is work that nobody has taken"
    assert to(4, 30.0, 5, 0) == 4, "no more than the most"
    assert to(3, 30.0, 0, 0) == 3, "another actor would have nothing to do"
    assert to(3, 0.0, 0, 8) == 2, "a whole update waits"
    assert to(2, 0.0, 0, 8) == 2, "no fewer than the least"
    assert to(3, 0.0, 0, 7) == 3
    assert to(1, 0.0, 0, 0) == to(1, 0.0, 0, 8) == 1, "one that was given up is not replaced"
