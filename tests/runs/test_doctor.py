"""The doctor says yes where sampler and trainer agree, and no where they do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ludic.distributed.interfaces import PublishReport, Weights
from ludic.distributed.local import LocalPolicyPublisher
from ludic.distributed.vllm.canary import MismatchBudget
from ludic.inference.local import LocalChatClient
from ludic.inference.tiny import tiny_model, tiny_tokenizer
from ludic.runs.doctor import DoctorReport, DoctorRow, _Checkup, run_doctor


async def test_an_engine_that_shares_the_module_agrees_with_it_in_every_row() -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    before = {n: p.clone() for n, p in model.named_parameters()}
    async with LocalChatClient(model, tokenizer, max_slots=4) as client:
        report = await run_doctor(
            model,
            tokenizer,
            client,
            publisher=LocalPolicyPublisher(client),
            requests=4,
            max_tokens=6,
        )
        assert await client.get_policy_version() == 2
    assert report.ok, report.table()
    assert len(report.rows) == 8
    assert all(row.tokens > 0 and not row.note for row in report.rows)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


async def test_a_sampler_with_other_weights_is_found_out() -> None:
    tokenizer = tiny_tokenizer()
    async with LocalChatClient(tiny_model(seed=1), tokenizer, max_slots=4) as client:
        report = await run_doctor(tiny_model(seed=2), tokenizer, client, requests=4, max_tokens=6)
    assert not report.ok
    wrong = {row.setting for row in report.rows if not row.ok}
    assert "one request at a time" in wrong
    assert "trainer: packed against single" not in wrong
    assert "OVER THE BUDGET" in report.table()


def test_a_difference_that_is_no_number_is_over_every_budget() -> None:
    row = DoctorRow("x", 3, float("nan"), 0.0, MismatchBudget(1.0, 1.0))
    assert not DoctorReport((row,)).ok


async def test_servers_get_their_weights_back_when_the_checkup_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    published: list[bool] = []

    class Publisher(LocalPolicyPublisher):
        async def publish(self, weights: Weights, version: int) -> PublishReport:
            same = (torch.equal(p, before[n]) for n, p in model.named_parameters())
            published.append(all(same))
            return await super().publish(weights, version)

    async def failing(self: _Checkup, setting: str, *args: Any, **kwargs: Any) -> DoctorRow:
        if "changed" in setting:
            raise RuntimeError("the server went away")
        return await compare(self, setting, *args, **kwargs)

    compare = _Checkup.compare
    monkeypatch.setattr(_Checkup, "compare", failing)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    async with LocalChatClient(model, tokenizer, max_slots=4) as client:
        publisher = Publisher(client)
        with pytest.raises(RuntimeError, match="went away"):
            await run_doctor(
                model, tokenizer, client, publisher=publisher, requests=2, max_tokens=2
            )
    assert published == [False, True]
