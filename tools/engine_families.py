"""Which model families the in-process engine serves: tried on a small random model of each.

python -m tools.engine_families             prints what it finds for every causal family
python -m tools.engine_families llama lfm2  only these
python -m tools.engine_families --write     writes the table into docs/local_engine.md
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import numpy as np
import torch
from torch import nn

from ludic.errors import ConfigError
from ludic.inference.client import TokenCompletionRequest
from ludic.inference.local import LocalChatClient
from ludic.inference.sampling import SamplingConfig
from ludic.types import ChatResponse
from tools.families import SMALL, families, tiny
from tools.family_table import FamilyTable, Verdict

WINDOW = 24
"""Longer than the text of the engine's own check, shorter than what is sampled here."""
SIZES = SMALL | dict.fromkeys(("sliding_window", "attention_window_size"), WINDOW)
PROMPTS, NEW = (3, 20, 40), 12


class NoText:
    """A tokenizer for models without one."""

    eos_token_id = None

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return ""


def tried(name: str) -> Verdict:
    """The verdict on a family: log-probs of sampled tokens compared with those of a plain pass."""
    try:
        model = tiny(name, SIZES)
        with torch.no_grad():
            model(input_ids=torch.arange(3, 13)[None], use_cache=False)
    except Exception as exc:
        return Verdict("not built", f"{type(exc).__name__}: {exc}")
    for deterministic, how in ((True, "served"), (False, "fast mode only")):
        try:
            answers = asyncio.run(_sampled(model, deterministic))
        except ConfigError as exc:
            if deterministic and "set deterministic=False" in str(exc):
                continue
            return Verdict("refused", _reason(str(exc)))
        except Exception as exc:
            return Verdict("wrong", f"{type(exc).__name__}: {exc}")
        gap = max(_gap(model, answer) for answer in answers)
        if not gap < 1e-3:
            return Verdict("wrong", f"log-probs differ from the model's own by {gap:.3g}")
        return Verdict(how)
    raise AssertionError("either mode gives a verdict")


async def _sampled(model: nn.Module, deterministic: bool) -> list[ChatResponse]:
    rng = np.random.default_rng(0)
    options: Any = {"deterministic": deterministic, "max_context_tokens": 64, "max_slots": 16}
    async with LocalChatClient(model, NoText(), **options) as client:
        asked = [
            TokenCompletionRequest(
                "tiny",
                tuple(rng.integers(3, 96, length).tolist()),
                SamplingConfig(max_tokens=NEW, seed=length),
                extensions={"ignore_eos": True},
            )
            for length in PROMPTS
        ]
        return list(await asyncio.gather(*map(client.complete_tokens, asked)))


@torch.no_grad()
def _gap(model: Any, answer: ChatResponse) -> float:
    assert answer.trace is not None
    ids, n = torch.tensor(answer.trace.token_ids), len(answer.trace.prompt_token_ids)
    logits = model(input_ids=ids[None], use_cache=False).logits[0, n - 1 : -1].float()
    own = logits.log_softmax(-1).gather(1, ids[n:, None])[:, 0]
    return float((own - torch.tensor(answer.trace.completion_logprobs)).abs().max())


def _reason(why: str) -> str:
    """Without the way out, which is the same for all and stands above the table."""
    for way_out in ("; sample", ": sample", "; the in-process engine serves", ": it needs"):
        why = why.partition(f"{way_out} ")[0]
    return why


TABLE = FamilyTable(
    "engine_families",
    "local_engine.md",
    "###",
    {
        "served": "Served",
        "fast mode only": "Served in fast mode only",
        "refused": "Refused by the engine",
        "not built": "Not tried with the engine",
    },
    reasons=("refused",),
)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    TABLE.command(tried, families, __doc__)
