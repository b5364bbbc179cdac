"""Models besides the one that is trained: a reference, teachers, other players."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from ludic.runs.settings.base import Arguments
from ludic.runs.settings.parts import as_list
from ludic.runs.settings.servers import Address, KeyedSection


class OtherModelSection(KeyedSection):
    """A model by name, as in `[model]`, or behind the address of a server."""

    model: str | None = None
    server: Address | None = None
    served_name: str | None = None
    revision: str | None = None
    device: str | None = None
    kwargs: Arguments = {}

    @model_validator(mode="after")
    def _one_source(self) -> OtherModelSection:
        if (self.model is None) == (self.server is None):
            raise ValueError("give either a `model` (as model.name) or the address of a `server`")
        of_server = {"served_name", "api_key_env", "api_key_file"}
        unfit = {"revision", "device", "kwargs"} if self.server is not None else of_server
        if said := [name for name in sorted(unfit) if getattr(self, name)]:
            this, other = ("model", "server") if self.server is None else ("server", "model")
            raise ValueError(f"{said[0]} belongs to a `{other}`, and this is a `{this}`")
        return self


class ReferenceSection(OtherModelSection):
    """The model to stay near. `model = "start"` is the policy as the reinforcement begins with it;
    anything else is as in `[model]`, or a vLLM `server` (`served_name`: what it calls the model;
    left out, its first one). The KL is in the loss by `kl_coeff` among the algorithm's arguments,
    or in the reward by `kl_in_reward`, its coefficient; `horizon` says how far ahead a token is
    charged for the KL."""

    kl_in_reward: float = Field(default=0.0, ge=0)
    horizon: Literal["token", "turn", "rollout"] = "rollout"


class TeacherSection(OtherModelSection):
    """A teacher for the algorithm `opd`: a model as in `[model]`, or a vLLM `server`. With several
    `[[teacher]]` tables, each says for which `envs` (names of the run's environments) or `tasks`
    (their task keys; `*` stands for anything) it is; one that says neither is for the rest."""

    envs: list[str] = []
    tasks: list[str] = []


Teachers: TypeAlias = Annotated[list[TeacherSection], BeforeValidator(as_list)]


class PlayerSection(OtherModelSection):
    """Another model that plays in the run's episodes and is not trained: a seat of the protocol
    takes it by its `name`, `client = "…"`. A `server` is vLLM (`api = "vllm"`), or any other with
    OpenAI's completions, which is sent text; its `tokenizer` is named as a model is, or the run's.
    `temperature` and `max_tokens` are those of the run unless given."""

    name: str = Field(min_length=1)
    api: Literal["vllm", "openai"] = "vllm"
    tokenizer: str | None = None
    temperature: float | None = Field(default=None, ge=0)
    max_tokens: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _known_to_its_server(self) -> PlayerSection:
        if self.api == "openai" and self.served_name is None:
            raise ValueError('api = "openai" needs a `server` and its `served_name` of the model')
        if self.tokenizer is not None and self.server is None:
            raise ValueError("tokenizer belongs to a `server`; a `model` has its own")
        return self


Players: TypeAlias = Annotated[list[PlayerSection], BeforeValidator(as_list)]
