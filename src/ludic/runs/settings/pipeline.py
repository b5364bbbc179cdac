"""Actors and trainer as separate processes."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from ludic.pipeline.ledger import Bounds
from ludic.pipeline.reading import StalePolicy
from ludic.runs.settings.base import Section


def _redis(address: str) -> str:
    if not address.startswith(("redis://", "rediss://", "unix://")):
        raise ValueError("the URL of a Redis begins with redis://, rediss:// or unix://")
    return address


class PipelineSection(Section):
    """The reinforcement as processes: actors that sample, and a trainer, joined by Redis. `ludic
    train RUN --async` is this table with its defaults. Without a `url`, a Redis is started for
    the run; a URL with a password is in the environment variable `url_env`. `name` is that of the
    run's keys; left out, it is that of its folder. `actors` are started with the trainer; more may
    join from anywhere with `ludic actor`. With `stale = "wait"`, actors wait so that no sample is
    older than `training.max_lag` updates; with `"drop"` and `"correct"` they run ahead, and what is
    older is dropped and its prompt put back, or trained on with the loss's corrections. Batches
    have groups in the order of their requests (`in_order`), or as they arrive. At most `max_groups`
    groups and about `max_bytes` are between actors and trainer. After `lease_s` without a word, an
    actor's work is given to another. `policy_folder` is where actors that sample in-process find
    the weights; it must be one that they share."""

    actors: int = Field(default=2, ge=0)
    url: Annotated[str, AfterValidator(_redis)] | None = None
    url_env: str | None = None
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._+-]+$", max_length=200)
    stale: StalePolicy = "wait"
    in_order: bool = True
    max_groups: int | None = Field(default=None, ge=1)
    max_bytes: int = Field(default=Bounds().bytes, ge=1)
    lease_s: float = Field(default=15.0, gt=0)
    patience_s: float = Field(default=300.0, gt=0)
    policy_folder: str | None = None

    @model_validator(mode="after")
    def _one_address(self) -> PipelineSection:
        if self.url is not None and self.url_env is not None:
            raise ValueError("give url or url_env, not both")
        return self
