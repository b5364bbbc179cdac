"""What starts a launched run under SLURM or on Kubernetes: the text of a job file, from sizes.
The files themselves are the templates beside this one.

Both files start a Ray cluster for this run alone, run one command on it, and end it. A job that is
started again resumes what it finds in the run's folder.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass

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

    @property
    def command(self) -> str:
        """A line of shell that starts the run, or resumes it if its folder is there."""
        there = shlex.quote(f"{self.folder}/run.json")
        start, resume = shlex.join(self.start), shlex.join(self.resume)
        return f"if [ -e {there} ]; then exec {resume}; else exec {start}; fi"


def slurm_job(sizes: JobSizes) -> str:
    """Returns a job file for `sbatch`."""
    return _filled("slurm.sh.jinja", sizes)


def kuberay_job(sizes: JobSizes) -> str:
    """Returns a RayJob for `kubectl apply`; it needs KubeRay 1.6 or newer."""
    size = {"cpu": f"{sizes.cpus_per_node}", "memory": f"{sizes.memory_gib}Gi"}
    if sizes.gpus_per_node:
        size["nvidia.com/gpu"] = f"{sizes.gpus_per_node}"
    half = f"{max(sizes.memory_gib // 2, 1)}Gi"
    return _filled("kuberay.yaml.jinja", sizes, size=size, half=half)


def _filled(template: str, sizes: JobSizes, **more: object) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("ludic.launch", ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "quote": shlex.quote, "join_words": shlex.join, "json": json.dumps, "round_off": round
    }  # fmt: skip
    computed = {"command": sizes.command, "ray_port": RAY_PORT, "stop_early_s": STOP_EARLY_S}
    return environment.get_template(template).render(asdict(sizes) | computed | more)
