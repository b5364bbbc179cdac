"""The job files are what `sbatch` and `kubectl` can read, and start or resume the run."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from ludic.errors import ConfigError
from ludic.launch.job_files import JobSizes, kuberay_job, slurm_job
from ludic.runs.pipeline import attaching

AWKWARD = 'runs/it\'s "mine" $HOME'
SIZES = JobSizes(
    "two-digits",
    start=("ludic", "launch", "run.toml", "--out", AWKWARD),
    resume=("ludic", "launch", "--resume", AWKWARD),
    stop=("ludic", "launch", "--stop", AWKWARD),
    folder=AWKWARD,
    nodes=3,
    gpus_per_node=8,
)
STAND_IN = """#!/bin/bash
[ "$1" != show ] || echo node-a
echo "$(basename "$0")|$*" >> "$CALLS"
if [ "$(basename "$0")" = srun ]; then
    while [ "$1" != -- ]; do shift; done; shift
    exec "$@"
fi
if [ -n "${SLOW:-}" ] && [ "$2" = run.toml ]; then
    touch "$CALLS.began"; while [ ! -e "$CALLS.stop" ]; do sleep 0.05; done; exit 7
fi
[ "$2" != --stop ] || touch "$CALLS.stop"
"""


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Any]:
    """A job file, and programs that write down how they were called."""
    (tmp_path / "bin").mkdir()
    for name in ("srun", "scontrol", "ludic"):
        (tmp_path / "bin" / name).write_text(STAND_IN)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "job.sh").write_text(slurm_job(SIZES))
    variables = {"SLURM_JOB_NODELIST": "node-[a-c]", "SLURM_JOB_ID": "12", "CALLS": "calls"}
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    return {"cwd": tmp_path, "env": {**os.environ, **variables, "PATH": path}}


def calls(job: dict[str, Any]) -> list[str]:
    return Path(job["cwd"], "calls").read_text().splitlines()


def shellcheck() -> str:
    """The one beside this Python, else the system's; where a package brings it, it must be."""
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if (program := shutil.which("shellcheck", path=beside)) is not None:
        return program
    if (sys.platform, platform.machine()) == ("linux", "x86_64"):
        pytest.fail("shellcheck is missing: `make setup` installs it here")
    pytest.skip("without shellcheck: install the system's")


def check_script(text: str, path: Path) -> None:
    path.write_text(text)
    subprocess.run(["bash", "-n", path], check=True, timeout=60)
    subprocess.run([shellcheck(), path], check=True, timeout=60)


@pytest.mark.parametrize("sizes", [SIZES, replace(SIZES, nodes=1, gpus_per_node=0)])
def test_bash_and_shellcheck_find_nothing_wrong(sizes: JobSizes, tmp_path: Path) -> None:
    check_script(slurm_job(sizes), tmp_path / "job.sh")
    assert ("--gpus-per-node" in slurm_job(sizes)) == (sizes.gpus_per_node > 0)


def test_a_job_starts_the_run_and_one_that_is_started_again_resumes_it(job: dict[str, Any]) -> None:
    subprocess.run(["bash", "job.sh"], check=True, timeout=60, **job)
    assert f"ludic|launch run.toml --out {AWKWARD}" in calls(job)
    assert "--address node-a:20012 --min-nodes 3 --num-cpus=8 --num-gpus=8" in calls(job)[1]
    (job["cwd"] / AWKWARD).mkdir(parents=True)
    (job["cwd"] / AWKWARD / "run.json").write_text("{}")
    subprocess.run(["bash", "job.sh"], check=True, timeout=60, **job)
    assert calls(job)[-1] == f"ludic|launch --resume {AWKWARD}"


def test_before_its_time_is_over_a_run_is_stopped_and_waited_for(job: dict[str, Any]) -> None:
    job["env"]["SLOW"] = "1"
    process = subprocess.Popen(["bash", "job.sh"], **job)
    try:
        while not (job["cwd"] / "calls.began").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(timeout=60) == 7, "the run's own status"
    finally:
        process.kill()
    assert calls(job)[-1] == f"ludic|launch --stop {AWKWARD}"


def test_a_ray_job_has_limits_deadlines_and_an_end() -> None:
    job = yaml.safe_load(kuberay_job(SIZES))
    spec = job["spec"]
    assert (job["kind"], job["metadata"]["name"]) == ("RayJob", "two-digits")
    assert spec["preRunningDeadlineSeconds"] == 1800
    assert spec["activeDeadlineSeconds"] == 86400
    assert spec["backoffLimit"] == 2
    assert spec["shutdownAfterJobFinishes"] is True
    cluster = spec["rayClusterSpec"]
    assert cluster["workerGroupSpecs"][0]["replicas"] == 2
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        wanted = {"cpu": "8", "memory": "32Gi", "nvidia.com/gpu": "8"}
        assert container["resources"] == {"requests": wanted, "limits": wanted}
    assert "workerGroupSpecs" not in yaml.safe_load(kuberay_job(replace(SIZES, nodes=1)))["spec"]


def test_the_entrypoint_survives_two_shells(job: dict[str, Any]) -> None:
    entrypoint = yaml.safe_load(kuberay_job(SIZES))["spec"]["entrypoint"]
    subprocess.run(["bash", "-c", entrypoint], check=True, timeout=60, **job)
    assert calls(job) == [f"ludic|launch run.toml --out {AWKWARD}"]


def test_a_run_file_becomes_a_job_file_with_room_for_its_roles(tmp_path: Path) -> None:
    sizes = "cluster={trainer_nodes=2, ranks_per_node=8, servers=10, gpus_per_server=2}"
    settings = [sizes, "inference.backend=vllm"]
    text = attaching.job_file("slurm", "tic-tac-toe", settings, out=tmp_path / "run")
    assert "#SBATCH --nodes=5" in text
    assert "#SBATCH --gpus-per-node=8" in text
    assert f"ludic launch --resume {tmp_path / 'run'}" in text
    assert not (tmp_path / "run").exists()
    check_script(text, tmp_path / "job.sh")
    job = yaml.safe_load(attaching.job_file("kuberay", "tic-tac-toe", settings, out=tmp_path))
    assert job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"] == 4
    with pytest.raises(ConfigError, match="choose slurm or kuberay"):
        attaching.job_file("pbs", "tic-tac-toe", settings)
