"""Which plane the weights take, from where trainer and workers are."""

from __future__ import annotations

import pytest
import torch

from ludic.distributed.vllm.placement import Place, choose_plane

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
        (GPU, [GPU, FAR_GPU], "gloo"),  # NCCL takes no GPU twice
        (GPU, [FAR_GPU, FAR_GPU], "gloo"),
        (GPU, [CONTAINER], "gloo"),
        (GPU, [FAR_CPU], "gloo"),
        (CPU, [FAR_GPU], "gloo"),
        (CPU, [FAR_CPU], "gloo"),
    ],
)
def test_the_plane_follows_from_the_places(
    trainer: Place, workers: list[Place], plane: str
) -> None:
    assert choose_plane(trainer, workers) == plane


@pytest.mark.parametrize(
    ("worker", "plane"), [(GPU, "shared_memory"), (OTHER_GPU, "shared_memory"), (FAR_GPU, "nccl")]
)
def test_weights_of_several_ranks_are_in_memory_and_not_on_a_gpu(worker: Place, plane: str) -> None:
    assert choose_plane(GPU, [worker], gathered=True) == plane


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
