"""The address that this machine listens on, and the address by which other machines reach it."""

from __future__ import annotations

import ipaddress
import re
import socket
from urllib.parse import urlsplit

from ludic.errors import ConfigError


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach an address, given as a URL or a name."""
    host = urlsplit(address).hostname if "//" in address else address
    return host in ("localhost", "::1") or (host or "").startswith("127.")


def is_here(url: str) -> bool:
    """Whether an address is one of this machine's."""
    host = urlsplit(url).hostname or ""
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return False
    return ipaddress.ip_address(address).is_loopback or refusal_to_bind(address) is None


def own_address(url: str) -> str:
    """Returns the address of this machine that a server sees when it is talked to."""
    try:
        return address_towards(url, socket.AF_INET)
    except OSError:
        return "127.0.0.1"


def address_towards(url: str, family: int = 0) -> str:
    """Returns the address of this machine by which it reaches another; raises `OSError` where there
    is no way."""
    there = urlsplit(url)
    infos = socket.getaddrinfo(
        there.hostname or "127.0.0.1", there.port or 80, family, socket.SOCK_DGRAM
    )
    with socket.socket(infos[0][0], socket.SOCK_DGRAM) as probe:  # sends nothing
        probe.connect(infos[0][4])
        return str(probe.getsockname()[0])


def refusal_to_bind(host: str, port: int = 0) -> str | None:
    """Why one cannot listen there; None if one can."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as exc:
        return exc.strerror or str(exc)
    return None


def listening_address(
    setting: str, url: str, name: str = "pipeline.policy_address"
) -> tuple[str, int]:
    """Returns the address and port of a setting such as `pipeline.policy_address`. `auto` is the
    address of this machine by which it reaches `url`."""
    host, _, port = (
        setting.rpartition(":") if re.search(r"[^:]:\d+$", setting) else (setting, "", "0")
    )
    host = host.strip("[]")
    if host in ("", "0.0.0.0", "::"):
        raise ConfigError(
            f"{name}={setting!r} names no machine that others could ask: use "
            '"auto" for the address by which this one reaches the others'
        )
    if host == "auto":
        try:
            local = urlsplit(url).scheme == "unix"
            host = "127.0.0.1" if local else address_towards(url)
        except OSError as exc:
            way = f"no way to {urlsplit(url).hostname}"
            raise ConfigError(f"{name}={setting!r}: {way}: {exc}") from exc
    return host, int(port)
