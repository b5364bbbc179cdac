"""Where a run's streams are: by its settings, the environment or its folder. Imports no torch."""

from __future__ import annotations

import json
import os
import re
import secrets
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from urllib.parse import urlsplit

from ludic.errors import ConfigError, PipelineError
from ludic.inference.addresses import find_key, without_user
from ludic.launch.processes import private_file
from ludic.pipeline.local_redis import LocalRedis, find_redis_server
from ludic.pipeline.store import MAX_NAME, PipelineConfig
from ludic.runs.settings import PipelineSection, RunConfig
from ludic.runs.settings.base import read_key
from ludic.runs.settings.from_python import given_names
from ludic.runs.storage import EVALUATIONS

URL_VARIABLE = "LUDIC_REDIS_URL"
FILE = "pipeline.json"
KEY = "key"


def section_of(config: RunConfig) -> PipelineSection:
    """Returns the run's pipeline, with defaults where it names none."""
    return config.pipeline or PipelineSection()


def check_pipeline(config: RunConfig) -> None:
    """Raises if a run over Redis asks for what only one process can do."""
    training = config.training
    rules = (
        (not training.overlap, "training.overlap: actors sample ahead by themselves"),
        (not training.dynamic_sampling, "training.dynamic_sampling: leave it out"),
        (not training.past_opponents, "training.past_opponents: leave it out"),
        (not training.workers, "training.workers: its actors are processes already"),
    )
    for ok, what in rules:
        if not ok:
            raise ConfigError(f"a run over Redis ([pipeline], --async) cannot have {what}")
    if starts_redis(section_of(config)):
        find_redis_server()  # said now, and not after the cold start
    if given := given_names(config.plain()):
        raise ConfigError(
            f"actors are other processes, and {', '.join(given)} is an object of this script: put "
            "it into a module, and name it as module:name"
        )


def starts_redis(section: PipelineSection) -> bool:
    """Whether the run starts a Redis of its own, since nothing names another."""
    return section.url is None and section.url_env is None and not os.environ.get(URL_VARIABLE)


def run_name(config: RunConfig, folder: Path | None) -> str:
    """Returns the name of the run's keys: as it says, or that of its folder."""
    section = section_of(config)
    if section.name is not None:
        return section.name
    name = folder.resolve().name if folder is not None else config.run.name
    return re.sub(r"[^A-Za-z0-9._+-]", "-", name)[:MAX_NAME] or "run"


def fingerprint(config: RunConfig) -> str:
    """Returns what two trainers of one run have in common: everything that may not change when it
    is resumed."""
    plain = config.plain()
    free = ("steps", "checkpoint_every", "keep_checkpoints", "batch_timeout_s", "rank_timeout_s")
    for table, keys in (("training", free), ("logging", ("loggers", "keep_rollouts"))):
        plain[table] = {k: v for k, v in plain[table].items() if k not in keys}
    for table in ("pipeline", "cluster"):
        plain.pop(table, None)
    text = json.dumps(plain, sort_keys=True)
    return blake2b(text.encode(), digest_size=16).hexdigest()


def find_pipeline(
    config: RunConfig,
    folder: Path | None = None,
    url: str | None = None,
    *,
    own: LocalRedis | None = None,
) -> PipelineConfig:
    """Returns the address of a run's streams: in this process's `own` Redis, or as given, as in
    LUDIC_REDIS_URL, as its settings say, or that of the Redis that its trainer has started."""
    if url is not None and urlsplit(url).password is not None:
        raise ConfigError(
            f"the URL of {without_user(url)} has a password, which an argument shows to everyone "
            f"on this machine: put it into the environment variable {URL_VARIABLE}"
        )
    section, name = section_of(config), run_name(config, folder)
    if own is not None:
        return PipelineConfig(own.url, name, patience_s=section.patience_s)
    if not url and section.url_env and not os.environ.get(section.url_env):
        raise ConfigError(f"pipeline.url_env={section.url_env!r}: that variable is not set")
    url = url or os.environ.get(section.url_env or "") or section.url
    url = url or os.environ.get(URL_VARIABLE)
    if url is None and folder is not None:
        with suppress(OSError, ValueError, KeyError):
            address = json.loads((folder / FILE).read_text(encoding="utf-8"))
            url, name = str(address["url"]), str(address["name"])
    if url is None and folder is not None and config.pipeline:
        raise PipelineError(
            f"the run in {folder} has no Redis at the moment: {where_it_stands(config, folder)}"
        )
    if url is None:
        raise PipelineError(
            "no Redis is known: give its URL with --url, in the environment variable "
            f"{URL_VARIABLE}, or as pipeline.url; if the run has started its own, name the "
            "run's folder while it is running"
        )
    return PipelineConfig(url, name, patience_s=section.patience_s)


def where_it_stands(config: RunConfig, folder: Path) -> str:
    """Returns which part of a run its folder shows it to be in: what it has not finished yet."""
    if (folder / "summary.json").is_file():
        return "it has ended"
    done = {stage for stage in EVALUATIONS if (folder / "eval" / f"{stage}.json").is_file()}
    cold_start = config.sft is not None and config.sft.steps > 0
    if "before" not in done:
        what = "the evaluation before its training"
    elif cold_start and "after_sft" not in done:
        what = "its cold start, or the evaluation after it"
    elif (folder / FILE).is_file():
        return "it is in RL, with its actors"
    elif last_step(folder / "checkpoints" / "rl") < config.training.steps:
        what = "RL has not begun, or was stopped"
        return f"{what} (`ludic train --resume` resumes it)"
    else:
        return "it is in the evaluation after RL: its actors have left"
    return f"it is in {what}, and its actors start with RL"


def last_step(folder: Path) -> int:
    """Returns the number of the newest checkpoint in a folder; 0 without any."""
    steps = [name.name.removeprefix("step-") for name in folder.glob("step-*")]
    return max((int(step) for step in steps if step.isdigit()), default=0)


def write_address(folder: Path, pipeline: PipelineConfig) -> Path:
    """Tells this user's other processes where the run's Redis is. Only this user can read it: it
    has the password."""
    private_file(folder / FILE, json.dumps({"url": pipeline.url, "name": pipeline.run}))
    return folder / FILE


def key_of_servers(config: RunConfig, folder: Path | None) -> tuple[Path | None, str | None]:
    """Returns the key to the run's registered servers, and the file that has it: the one that the
    run names, or else one in its folder that whoever comes first draws."""
    section = config.inference
    file = section.api_key_file
    if section.api_key_env is not None or (file is None and folder is None):
        return None, read_key(section, "inference")
    if file is None and folder is not None:
        file = str(folder / KEY)
        draw_key(folder / KEY)
    return Path(str(file)), find_key(None, file, "inference")


def draw_key(path: Path) -> None:
    """Writes a random key that only this user can read, unless there is one. Several processes may
    do so at once: they get the same."""
    draft = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    private_file(draft, secrets.token_urlsafe(32))
    try:
        with suppress(FileExistsError):
            os.link(draft, path)  # which, unlike a rename, replaces nothing
    finally:
        draft.unlink()
