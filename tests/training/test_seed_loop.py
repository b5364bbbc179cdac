"""The example training loop of the first documents, as it stands there."""

from __future__ import annotations

import ast
from typing import Any

from ludic.inference.tiny import tiny_model
from tests.rollouts.worlds import GuessEnv, protocols, request, runtime

LOOP = """
from ludic.training import (
    RolloutEngine, RolloutBatchSource, Trainer, TrainerConfig, make_grpo
)

engine = RolloutEngine(env_registry={...}, protocol_registry={...})
algo = make_grpo(group_size=8)

batch_source = RolloutBatchSource(
    engine=engine,
    request_fn=make_requests,
    algorithm=algo,
    max_steps=512,
)

trainer = Trainer(
    model=model,
    algo=algo,
    batch_source=batch_source,
    cfg=TrainerConfig(learning_rate=2e-5),
)

await trainer.train(num_steps=1000)
"""


def single_agent(_: Any, **kwargs: Any) -> Any:
    """A protocol that brings its own model, since the loop's engine has none."""
    return protocols()["single_agent"](runtime(), **kwargs)


async def test_the_documents_training_loop_runs_as_it_stands() -> None:
    loop = LOOP.replace("env_registry={...}", "env_registry=envs").replace(
        "protocol_registry={...}", "protocol_registry=protocols"
    )
    # Only the number of steps is another one.
    loop = loop.replace("num_steps=1000", "num_steps=2")
    names: dict[str, Any] = {
        "envs": {"guess": GuessEnv},
        "protocols": {"single_agent": single_agent},
        "make_requests": lambda: [request()],
        "model": tiny_model(),
    }
    before = {n: p.detach().clone() for n, p in names["model"].named_parameters()}
    code = compile(loop, "<loop>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    await eval(code, names)
    trainer = names["trainer"]
    assert trainer.step == 2
    assert any(not p.equal(before[n]) for n, p in trainer.model.named_parameters())
    trainer.close()
