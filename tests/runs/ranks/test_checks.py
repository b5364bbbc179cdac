"""What several ranks cannot do is said before there is a folder."""

from __future__ import annotations

import pytest
import torch

from ludic.errors import ConfigError
from ludic.runs.ranks import check_ranks
from ludic.runs.settings import parse_run
from ludic.sharding.ranks import Launched, launched, tells_of_failure

RUN = '[env]\nkind = "tic_tac_toe"\n[model]\ndevice = "cpu"\n[inference]\nbackend = "vllm"\n'
TWO = Launched(1, 2, 1)


def test_two_ranks_can_train_with_vllm() -> None:
    check_ranks(parse_run(RUN), TWO)


def test_one_rank_can_do_everything() -> None:
    check_ranks(parse_run('[env]\nkind = "tic_tac_toe"\n[training]\nrank_timeout_s = 1\n'))


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ('publish_lora = "adapter"\n', 'publish_lora = "adapter" does not work: leave it out'),
        ("[training]\npast_opponents = 2\n", "training.past_opponents does not work"),
        ("[training]\nrank_timeout_s = 60\n", r"set it above training.batch_timeout_s=3600"),
        (
            "[training]\nrank_timeout_s = 1000\nbatch_timeout_s = 900\n",
            r"rank 0 may still publish: set it above 2520, or lower training.publish_timeout_s=600",
        ),
    ],
)
def test_what_does_not_work_is_named(lines: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^(on 2 ranks .*|.*){said}"):
        check_ranks(parse_run(RUN + lines), TWO)


LOCAL = '[env]\nkind = "tic_tac_toe"\n[model]\ndevice = "cpu"\n'


def test_the_in_process_engine_is_refused_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ludic.runs.ranks.check_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r'on 2 ranks .* set inference.backend = "vllm"'):
        check_ranks(parse_run(LOCAL), TWO)
    check_ranks(parse_run(LOCAL + "[training]\nsteps = 0\n"), TWO)  # it is never sampled from


def test_on_cpus_the_in_process_engine_has_a_copy() -> None:
    check_ranks(parse_run(LOCAL), TWO)
    check_ranks(parse_run(LOCAL + "[pipeline]\n"), TWO)


@pytest.mark.parametrize(
    ("device", "gpus", "said"),
    [("cuda:0", 2, "all 2 ranks on one GPU: set model.device=cuda"), ("cuda", 1, "has no GPU")],
)
def test_each_rank_has_its_gpu(
    monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, said: str
) -> None:
    monkeypatch.setattr("ludic.runs.ranks.check_device", lambda _: torch.device(device))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(ConfigError, match=said):
        check_ranks(parse_run(RUN), TWO)


def test_a_process_alone_leads_and_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched() == Launched()
    assert tells_of_failure()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert not launched().leads
    assert tells_of_failure(told_of_it=True)  # with nobody there to ask


def test_of_several_ranks_one_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    said = [tells_of_failure(), tells_of_failure(), tells_of_failure(told_of_it=True)]
    assert said == [True, False, False]
