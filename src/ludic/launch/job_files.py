"""What starts a launched run under SLURM or on Kubernetes: the text of a job file, from sizes.

Both files start a Ray cluster for this run alone, run one command on it, and end it. A job that is
started again resumes what it finds in the run's folder.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import indent

from ludic.errors import ConfigError

RAY_PORT = 20_000
"""From here on Ray takes none by itself: its workers have 10002 to 19999."""
STOP_EARLY_S = 600
"""How long before the end of its time a run is told to stop, with a checkpoint."""


@dataclass(frozen=True, slots=True)
class JobSizes:
    """What a run asks of a cluster: `nodes` alike, of which the first also has the driver.

    `start`, `resume` and `stop` are the run's commands, and `folder` is where it is kept, on
    storage that all nodes see. Within `wait_minutes` the nodes must be there, and within `hours`
    the run must end. On Kubernetes, pods have the `image`, and the volume of `claim` at `mount`; a
    job that fails is started again `retries` times.
    """

    name: str
    start: Sequence[str]
    resume: Sequence[str]
    stop: Sequence[str]
    folder: str
    nodes: int = 1
    gpus_per_node: int = 0
    cpus_per_node: int = 8
    memory_gib: int = 32
    hours: float = 24.0
    wait_minutes: int = 30
    retries: int = 2
    image: str = "rayproject/ray:2.60.0-py311"
    claim: str = "shared"
    mount: str = "/shared"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,45}[a-z0-9])?", self.name):
            raise ConfigError(
                f"a job's name={self.name!r}: use up to 47 small letters, digits and -, a letter "
                "first"
            )
        for field in ("nodes", "cpus_per_node", "memory_gib", "wait_minutes"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field}={getattr(self, field)}: must be at least 1")
        if self.hours * 3600 <= 2 * STOP_EARLY_S:
            raise ConfigError(
                f"hours={self.hours:g}: a run is told to stop {STOP_EARLY_S} s before its time is "
                "over, so give it more than twice that"
            )

    @property
    def command(self) -> str:
        """A line of shell that starts the run, or resumes it if its folder is there."""
        there = shlex.quote(f"{self.folder}/run.json")
        return f"if [ -e {there} ]; then exec {shlex.join(self.resume)}; else exec " + (
            f"{shlex.join(self.start)}; fi"
        )


def slurm_job(sizes: JobSizes) -> str:
    """Returns a job file for `sbatch`."""
    minutes = round(sizes.hours * 60)
    gpus = f"#SBATCH --gpus-per-node={sizes.gpus_per_node}\n" if sizes.gpus_per_node else ""
    ray_gpus = f" --num-gpus={sizes.gpus_per_node}" if sizes.gpus_per_node else ""
    return f"""#!/bin/bash
#SBATCH --job-name={sizes.name}
#SBATCH --nodes={sizes.nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --cpus-per-task={sizes.cpus_per_node}
{gpus}#SBATCH --mem={sizes.memory_gib}G
#SBATCH --time={minutes}
#SBATCH --signal=B:USR1@{STOP_EARLY_S}
#SBATCH --requeue
# Submit it from the run's working folder, with its Python environment active: both are passed on.
# https://slurm.schedmd.com/sbatch.html: --signal, --requeue
# https://docs.ray.io/en/latest/cluster/vms/user-guides/community/slurm.html: ray symmetric-run
# Names are taken as they are, and commands are for the inner shell.
# shellcheck disable=SC2016
set -u

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# Of jobs that share a head's address one after the other, none meets what another left behind.
port=$(({RAY_PORT} + SLURM_JOB_ID % 10000))
export SRUN_CPUS_PER_TASK={sizes.cpus_per_node}
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT={sizes.wait_minutes * 60}

stop() {{
    interrupted=yes
    {shlex.join(sizes.stop)}
}}
trap stop USR1

srun ray symmetric-run --address "$head:$port" --min-nodes {sizes.nodes} \\
    --num-cpus={sizes.cpus_per_node}{ray_gpus} -- \\
    bash -c {shlex.quote(sizes.command)} &
run=$!
# The signal ends a wait, not the run, which writes its checkpoint first.
while true; do
    interrupted=
    wait "$run"
    status=$?
    [ -n "$interrupted" ] || exit "$status"
done
"""


_POD = """\
template:
  spec:
    restartPolicy: Never
    containers:
    - name: ray
      image: {image}
      workingDir: {mount}
      # https://kubernetes.io/docs/concepts/configuration/manage-resources-containers
      resources:
        requests: {size}
        limits: {size}
      volumeMounts:
      - {{name: shared, mountPath: {mount}}}
      - {{name: memory, mountPath: /dev/shm}}
    volumes:
    - {{name: shared, persistentVolumeClaim: {{claimName: {claim}}}}}
    - {{name: memory, emptyDir: {{medium: Memory, sizeLimit: {half}}}}}
"""


def kuberay_job(sizes: JobSizes) -> str:
    """Returns a RayJob for `kubectl apply`; it needs KubeRay 1.6 or newer."""
    size = {"cpu": f"{sizes.cpus_per_node}", "memory": f"{sizes.memory_gib}Gi"}
    if sizes.gpus_per_node:
        size["nvidia.com/gpu"] = f"{sizes.gpus_per_node}"
    half = f"{max(sizes.memory_gib // 2, 1)}Gi"
    texts = {"image": sizes.image, "mount": sizes.mount, "claim": sizes.claim, "half": half}
    pod = _POD.format(size=json.dumps(size), **{k: json.dumps(v) for k, v in texts.items()})
    workers = f"""\
    workerGroupSpecs:
    - groupName: nodes
      replicas: {sizes.nodes - 1}
      minReplicas: {sizes.nodes - 1}
      maxReplicas: {sizes.nodes - 1}
      rayStartParams: {{}}
{indent(pod, "      ")}"""
    return f"""\
# Each field: https://ray-project.github.io/kuberay/reference/api (RayJobSpec, RayClusterSpec)
apiVersion: ray.io/v1
kind: RayJob
metadata:
  name: {sizes.name}
spec:
  entrypoint: {json.dumps(f"bash -c {shlex.quote(sizes.command)}")}
  # A cluster that is not complete by then is given up; since KubeRay 1.6.
  preRunningDeadlineSeconds: {sizes.wait_minutes * 60}
  # What has not ended by then is ended.
  activeDeadlineSeconds: {round(sizes.hours * 3600)}
  # A try that fails is followed by another on a new cluster, which resumes the run.
  backoffLimit: {sizes.retries}
  # Nothing is left behind but what is in the run's folder.
  shutdownAfterJobFinishes: true
  ttlSecondsAfterFinished: 60
  rayClusterSpec:
    # Nobody starts anything on this cluster without its token.
    authOptions: {{mode: token}}
    headGroupSpec:
      rayStartParams: {{}}
{indent(pod, "      ")}{workers if sizes.nodes > 1 else ""}"""
