"""How a run's weights get to its servers: the plane, and the address of a broadcast."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

import torch

from ludic.distributed.vllm.placement import ChosenPlane, Place, choose_plane
from ludic.distributed.vllm.planes import BroadcastPlane, DataPlane, make_plane
from ludic.errors import ConfigError, DeadlineError, InferenceError
from ludic.inference import VLLMChatClient
from ludic.inference.vllm.names import PLACE
from ludic.inference.vllm.replica import Replica
from ludic.inference.vllm.server import free_port
from ludic.runs.model import check_device
from ludic.runs.settings import InferenceSection, RunConfig
from ludic.sharding.ranks import launched

ASKING_S = 60.0


async def plane_of(
    config: RunConfig, client: VLLMChatClient, device: torch.device, *, gathered: bool
) -> DataPlane:
    """Returns the plane that the run names, or else the one that fits where its servers are.
    `gathered`: the weights come from several ranks."""
    section, chosen = config.inference, config.inference.publish_plane
    if chosen == "auto":
        here = Place.of(device)
        workers = [p for replica in client.replicas for p in await _places(client, replica, here)]
        chosen = choose_plane(here, workers, gathered=gathered)
    return plane_by_name(chosen, section, client.replicas[0].url, device)


def plane_by_name(
    name: ChosenPlane, section: InferenceSection, server: str, device: torch.device
) -> DataPlane:
    """Returns a plane; a broadcast is given an address that `server` reaches, unless the run names
    one."""
    if name not in ("nccl", "gloo"):
        return make_plane(name)
    return BroadcastPlane(
        backend=name,
        host=section.publish_address or own_address(server),
        port=section.publish_port,
        device=str(device) if name == "nccl" else None,
    )


async def _places(client: VLLMChatClient, replica: Replica, here: Place) -> list[Place]:
    """Where a server's workers are. One that does not say is taken to be beside the trainer if its
    address is this machine's."""
    try:
        answer = await client.control(
            replica, "POST", "/collective_rpc", body={"method": PLACE}, timeout_s=ASKING_S
        )
        found = [Place.read(said) for said in answer["results"]]
    except (InferenceError, DeadlineError, KeyError, TypeError):
        found = [None]
    far = Place("elsewhere", None if here.gpu is None else f"of {replica.url}")
    unknown = here if is_here(replica.url) else far
    return [place or unknown for place in found]


def is_here(url: str) -> bool:
    """Whether an address is one of this machine's."""
    host = urlsplit(url).hostname or ""
    try:
        found = socket.gethostbyname(host)
    except OSError:
        return False
    return ipaddress.ip_address(found).is_loopback or _binds(found) is None


def own_address(url: str) -> str:
    """Returns the address of this machine that a server sees when it is talked to."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
        try:
            probe.connect((parts.hostname or "127.0.0.1", parts.port or 80))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def check_publishing(config: RunConfig) -> None:
    """Raises if the plane that a run names cannot work here."""
    section, plane = config.inference, config.inference.publish_plane
    if section.backend != "vllm":
        return
    where = f'inference.publish_plane = "{plane}"'
    if plane in ("ipc", "nccl") and check_device(config.model).type != "cuda":
        raise ConfigError(
            f'{where} is for weights on a GPU, and the model is on the CPU: set "shared_memory" '
            'for servers on this machine, "gloo" for others, or leave it out'
        )
    if plane == "ipc" and launched().size > 1:
        raise ConfigError(
            f"{where} shares the memory of one GPU, and on {launched().size} ranks the weights are "
            'gathered on the CPU: set "shared_memory", or leave it out'
        )
    if section.publish_address is not None and (why := _binds(section.publish_address)):
        raise ConfigError(
            f"inference.publish_address={section.publish_address!r} is no address of this machine "
            f"({why}): try {own_address((section.servers or ['http://127.0.0.1'])[0])!r}, or leave "
            "it out"
        )
    port, host = section.publish_port, section.publish_address or "127.0.0.1"
    if port is not None and launched().leads and (why := _binds(host, port)):
        raise ConfigError(
            f"inference.publish_port={port} cannot be listened on ({why}): try {free_port()}, or "
            "leave it out"
        )


def _binds(host: str, port: int = 0) -> str | None:
    """Why one cannot listen there; None if one can."""
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as exc:
        return exc.strerror or str(exc)
    return None
