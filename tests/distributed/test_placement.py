"""Which plane the weights take, from where trainer and workers are."""

from __future__ import annotations

import re

import pytest
import torch

from ludic.distributed.vllm.placement import Place, PlaneName, choose_plane
from ludic.errors import ConfigError

CPU, GPU = Place("here"), Place("here", "GPU-0")
OTHER_GPU, CONTAINER = Place("here", "GPU-1"), Place("here, another mount", "GPU-0")
FAR_CPU, FAR_GPU, FAR_GPU_2 = Place("there"), Place("there", "GPU-8"), Place("there", "GPU-9")


@pytest.mark.parametrize(
    ("trainer", "workers", "plane"),
    [
        (CPU, [CPU], "shared_memory"),
        (CPU, [GPU], "shared_memory"),
        (GPU, [CPU], "shared_memory"),
        (GPU, [GPU], "ipc"),
        (GPU, [GPU, GPU], "ipc"),
        (GPU, [OTHER_GPU], "shared_memory"),
        (GPU, [GPU, OTHER_GPU], "shared_memory"),
        (GPU, [FAR_GPU], "nccl"),
        (GPU, [FAR_GPU, FAR_GPU_2], "nccl"),
        (GPU, [OTHER_GPU, FAR_GPU], "nccl"),
        (GPU, [GPU, FAR_GPU], "http"),  # NCCL takes no GPU twice
        (GPU, [FAR_GPU, FAR_GPU], "http"),
        (GPU, [CONTAINER], "http"),
        (GPU, [FAR_CPU], "http"),
        (CPU, [FAR_GPU], "http"),
        (CPU, [FAR_CPU], "http"),
    ],
)
def test_the_plane_follows_from_the_places(
    trainer: Place, workers: list[Place], plane: str
) -> None:
    choice = choose_plane(trainer, workers)
    assert (choice.plane, bool(choice.why)) == (plane, True)
    assert choose_plane(trainer, workers, named=choice.plane).plane == plane  # no objection


@pytest.mark.parametrize(
    ("trainer", "workers", "why"),
    [
        (CPU, [FAR_CPU], "the trainer's weights are not on a GPU"),
        (GPU, [FAR_GPU, FAR_CPU], "1 of 2 workers have no GPU"),
        (GPU, [FAR_GPU, FAR_GPU], "two processes share a GPU, which NCCL refuses"),
    ],
)
def test_http_is_chosen_with_the_reason_why_it_is_not_nccl(
    trainer: Place, workers: list[Place], why: str
) -> None:
    said = choose_plane(trainer, workers).why
    assert said == f"a worker is on another host, and NCCL is not possible: {why}"


@pytest.mark.parametrize(
    ("worker", "plane"), [(GPU, "shared_memory"), (OTHER_GPU, "shared_memory"), (FAR_GPU, "nccl")]
)
def test_weights_of_several_ranks_are_in_memory_and_not_on_a_gpu(worker: Place, plane: str) -> None:
    assert choose_plane(GPU, [worker], gathered=True).plane == plane


@pytest.mark.parametrize(
    ("named", "trainer", "workers", "why"),
    [
        ("ipc", CPU, [CPU], 'the trainer\'s weights are not on a GPU; "shared_memory" can'),
        ("ipc", GPU, [GPU, OTHER_GPU], "1 of 2 workers are not on the trainer's GPU"),
        ("ipc", GPU, [CONTAINER], '1 of 1 workers are in another container; "http" can'),
        ("shared_memory", GPU, [GPU, FAR_GPU], "1 of 2 workers do not see this host's shared"),
        ("nccl", CPU, [FAR_GPU], 'the trainer\'s weights are not on a GPU; "http" can'),
        ("nccl", GPU, [FAR_CPU], "1 of 1 workers have no GPU"),
        ("nccl", GPU, [GPU], 'two processes share a GPU, which NCCL refuses; "ipc" can'),
    ],
)
def test_a_wrong_plane_by_name_is_one_sentence_that_names_a_right_one(
    named: PlaneName, trainer: Place, workers: list[Place], why: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)) as caught:
        choose_plane(trainer, workers, named=named)
    assert f'the plane "{named}" cannot work here' in str(caught.value)
    assert "\n" not in str(caught.value)


def test_ipc_by_name_is_refused_for_weights_in_the_hosts_memory() -> None:
    with pytest.raises(ConfigError, match="the weights are in the host's memory"):
        choose_plane(GPU, [GPU], named="ipc", gathered=True)


def test_a_guess_refuses_nothing_that_was_named() -> None:
    guess = Place("elsewhere", None, guessed=True)
    assert choose_plane(GPU, [guess], named="nccl").plane == "nccl"
    assert choose_plane(GPU, [guess]).plane == "http"


def test_two_processes_of_one_machine_name_the_same_memory() -> None:
    here = Place.of(torch.device("cpu"))
    assert here == Place.of(torch.device("cpu"))
    assert here.gpu is None
    assert here.memory != "/0"


@pytest.mark.parametrize("said", [None, "no", {}, {"memory": 7}, {"tensors": {}}])
def test_what_an_older_worker_says_is_no_place(said: object) -> None:
    assert Place.read(said) is None


def test_a_place_travels_as_json() -> None:
    assert Place.read({"memory": "a/1", "gpu": "GPU-0"}) == Place("a/1", "GPU-0")
    assert Place.read({"memory": "a/1", "gpu": None}) == Place("a/1")
