"""A policy meets itself and its past, by a plan that a resume does not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ludic.errors import CheckpointError, ConfigError
from ludic.inference import HFChatTemplate, LocalChatClient
from ludic.inference.tiny import tiny_model, tiny_tokenizer
from ludic.interaction import Runtime
from ludic.rollouts import Curriculum, RolloutRequest
from ludic.training import PastPolicies, SelfPlay
from ludic.training.batching.self_play import OPPONENT
from ludic.types import EnvSpec, ProtocolSpec

REQUEST = RolloutRequest(EnvSpec("tic_tac_toe_two_player"), ProtocolSpec("multi_agent"))


def curriculum(**options: Any) -> SelfPlay:
    return SelfPlay(REQUEST, ["X", "O"], seed=3, **options)


def test_it_is_a_curriculum() -> None:
    assert isinstance(curriculum(), Curriculum)


def test_without_a_past_the_policy_plays_both_seats() -> None:
    for request in curriculum().next_requests(20):
        assert "seats" not in request.protocol.kwargs
        assert OPPONENT not in request.meta


def test_with_a_past_one_seat_is_taken_in_the_stated_share() -> None:
    plan = curriculum(past_share=0.5)
    plan.slots = ["step-0", "step-20"]
    requests = plan.next_requests(400)
    against = [r for r in requests if "seats" in r.protocol.kwargs]
    assert 160 < len(against) < 240
    seats = [next(iter(r.protocol.kwargs["seats"].items())) for r in against]
    assert {seat for seat, _ in seats} == {"X", "O"}
    assert {options["client"] for _, options in seats} == {"past-0", "past-1"}
    for request, (_, options) in zip(against, seats, strict=True):
        assert (
            request.meta[OPPONENT] == {"past-0": "step-0", "past-1": "step-20"}[options["client"]]
        )
    assert len({r.env_seed for r in requests}) == len({r.sampling_seed for r in requests}) == 400


def test_other_seats_of_the_run_stay_as_they_are() -> None:
    fixed = {"seats": {"Z": {"bot": "random"}}, "parser": "text"}
    request = RolloutRequest(EnvSpec("three"), ProtocolSpec("multi_agent", fixed))
    plan = SelfPlay(request, ["X", "O"], past_share=1.0)
    plan.slots = ["step-0"]
    kwargs = plan.next_requests(1)[0].protocol.kwargs
    assert kwargs["seats"]["Z"] == {"bot": "random"}
    assert len(kwargs["seats"]) == 2
    assert fixed["seats"] == {"Z": {"bot": "random"}}


def test_a_past_policy_answers_as_its_seat_asks_for() -> None:
    own = {"parser": {"kind": "xml", "tag": "move"}, "system_prompt": "You begin."}
    bot = {"bot": "random", "choices": ["A1"]}
    seats: dict[str, Any] = {"X": {**own, "collect": True}, "O": bot}
    request = RolloutRequest(EnvSpec("two"), ProtocolSpec("multi_agent", {"seats": seats}))
    plan = SelfPlay(request, ["X", "O"], past_share=1.0)
    plan.slots = ["step-0"]
    played = [r.protocol.kwargs["seats"] for r in plan.next_requests(20)]
    assert {"X": {**own, "client": "past-0"}, "O": bot} in played
    assert {"X": seats["X"], "O": {"client": "past-0"}} in played
    assert seats["X"] == {**own, "collect": True}


def test_the_state_goes_on_where_it_was() -> None:
    plan = curriculum()
    plan.slots = ["step-0"]
    plan.next_requests(7)
    again = curriculum()
    again.slots = ["step-0"]
    again.load_state_dict(plan.state_dict())
    assert again.next_requests(5) == plan.next_requests(5)


def test_a_single_seat_is_refused() -> None:
    with pytest.raises(ConfigError, match="several agents"):
        SelfPlay(REQUEST, ["agent"])
    with pytest.raises(ConfigError, match="past_share"):
        curriculum(past_share=1.5)


def pool(model: torch.nn.Module, folder: Path, **options: Any) -> PastPolicies:
    tokenizer = tiny_tokenizer()
    client: Any = None  # the pool brings its own
    runtime = Runtime(client, HFChatTemplate(tokenizer), "tiny")
    return PastPolicies(model, runtime, tokenizer, folder, size=2, every=10, max_slots=2, **options)


def first_weight(client: Any) -> float:
    assert isinstance(client, LocalChatClient)
    return first_weight_of(client._model)


def first_weight_of(model: torch.nn.Module) -> float:
    return next(iter(model.parameters())).detach().flatten()[0].item()


def set_first(model: torch.nn.Module, value: float) -> None:
    with torch.no_grad():
        next(iter(model.parameters())).flatten()[0] = value


async def test_the_pool_holds_the_newest_snapshots_and_a_resume_the_same(tmp_path: Path) -> None:
    model = tiny_model(hidden_size=16, layers=1, heads=2, kv_heads=1)
    async with pool(model, tmp_path) as past:
        for step in (0, 10, 20, 30):
            set_first(model, float(step))
            names = await past.bring_to(step)
        assert names == ["step-20", "step-30"]
        held = {name: first_weight(runtime.client) for name, runtime in past.runtimes.items()}
        assert held == {"past-0": 20.0, "past-1": 30.0}
        assert past.next_due(30) == past.next_due(35) == 40
        versions = [await r.client.get_policy_version() for r in past.runtimes.values()]  # type: ignore[attr-defined]
        assert versions == [20, 30]
    set_first(model, 35.0)
    async with pool(model, tmp_path) as past:
        assert await past.bring_to(35) == ["step-20", "step-30"]
        again = {name: first_weight(runtime.client) for name, runtime in past.runtimes.items()}
        assert again == held
    assert first_weight_of(model) == 35.0


async def test_a_past_policy_that_is_gone_is_named(tmp_path: Path) -> None:
    model = tiny_model(hidden_size=16, layers=1, heads=2, kv_heads=1)
    async with pool(model, tmp_path) as past:
        with pytest.raises(CheckpointError, match="step 0 "):
            await past.bring_to(15)
