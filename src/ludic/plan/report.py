"""What a plan shows: the table, the `[cluster]` lines of the best, and where figures come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil

from ludic.memory.plan import GIB
from ludic.plan.profile import FIGURES, ORIGINS, Profile
from ludic.plan.search import Goal, Job, Option

_HEAD = (
    *("GPUs", "trainer", "servers", "GiB a rank", "GiB a server", "s an update"),
    *("waiting", "passes", "publish", "tokens/s", "lag", "GPU-hours", "limited by"),
)


_UNITS = {"_gb_s": " GB/s", "_tb_s": " TB/s", "_s": " s", "_gib": " GiB", "_tflops": " TFLOP/s"}


def gpu_hours(option: Option, updates: int) -> float:
    """GPU-hours until this many updates are done."""
    return option.split.gpus * option.result.update_s * updates / 3600


def table(job: Job, options: Mapping[int, Option | str]) -> str:
    """A line for each number of GPUs; text instead of an option says why nothing fits."""
    free = job.free / GIB
    rows: list[Sequence[str]] = [_HEAD]
    notes = []
    for gpus, option in options.items():
        if isinstance(option, str):
            rows.append((str(gpus), *["-"] * (len(_HEAD) - 2), "memory"))
            notes.append(option)
            continue
        split, result = option.split, option.result
        servers = f"{split.servers} x {split.gpus_per_server}" if split.servers else "in process"
        rows.append(
            (
                *(str(gpus), str(split.ranks), servers),
                f"{option.taken / GIB:.1f} to {option.trainer.total / GIB:.1f} of {free:.0f}",
                f"{option.server_bytes / GIB:.1f} of {free:.0f}" if split.servers else "-",
                *(_seconds(result.update_s), _seconds(result.wait_s), _seconds(result.train_s)),
                *(_seconds(result.publish_s), f"{result.tokens_per_s:,.0f}"),
                f"{result.lag_mean:.1f}, {result.lag_max} at most",
                *(_hours(gpu_hours(option, job.workload.updates)), option.limit),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(r, widths, strict=True)) for r in rows]
    legend = (
        "a rank is expected to take the first number and may take the second; waiting, passes and "
        f"publish are seconds of an update; lag is how many updates old a "
        f"sample is; GPU-hours are those of all {job.workload.updates} updates"
    )
    return "\n".join([*(line.rstrip() for line in lines), legend, *notes])


def _hours(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def chosen(job: Job, options: Mapping[int, Option | str], goal: Goal) -> Option | None:
    """The best of what fits: the most tokens a second, the soonest update, or the fewest GPU-hours;
    of equals the one with fewer GPUs."""
    fitting = [option for option in options.values() if isinstance(option, Option)]
    keys: dict[Goal, Callable[[Option], float]] = {
        "tokens_per_s": lambda o: -o.result.tokens_per_s,
        "updates": lambda o: o.result.update_s,
        "cost": lambda o: gpu_hours(o, job.workload.updates),
    }
    return min(fitting, key=lambda o: (keys[goal](o), o.split.gpus), default=None)


def cluster_lines(job: Job, option: Option) -> str:
    """The table of the run file that makes this split."""
    split, node = option.split, int(job.costs.profile["gpus_per_node"])
    if not split.servers:
        return "# one GPU: the run file needs no [cluster]"
    nodes = ceil(split.ranks / node)
    engine = "local" if split.gpus <= node else "ray"
    return "\n".join(
        [
            "[cluster]",
            f'engine = "{engine}"',
            f"trainer_nodes = {nodes}",
            f"ranks_per_node = {split.ranks // nodes}",
            f"servers = {split.servers}",
            f"gpus_per_server = {split.gpus_per_server}",
            f"actors_min = {option.actors}",
            f"actors_max = {2 * option.actors}",
            "cpus_per_actor = 1",
        ]
    )


def explained(profile: Profile, assumed: Mapping[str, str]) -> str:
    """Where each figure comes from, and what was assumed of the run (`assumed`)."""
    lines = [f"{profile.name}: {profile.machine}, {profile.date}"]
    lines += [f"  {name} {version}" for name, version in profile.versions.items()]
    for origin in ORIGINS:
        figures = {n: f for n in FIGURES if (f := profile.figures[n]).origin == origin}
        if figures:
            lines.append(f"{origin}:")
        for name, figure in figures.items():
            source = f" ({figure.source})" if figure.source else ""
            unit = next((text for end, text in _UNITS.items() if name.endswith(end)), "")
            lines.append(f"  {FIGURES[name]}: {figure.value:.4g}{unit}{source}")
    lines.append("of the run:")
    lines += [f"  {name}: {text}" for name, text in assumed.items()]
    return "\n".join(lines)
