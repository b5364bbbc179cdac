"""Serves the pages from this process."""

from __future__ import annotations

import platform
import secrets
import socket
import webbrowser
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from ludic.errors import ConfigError, MissingExtraError

DEFAULT_FOLDER = "runs"


def view(
    folders: Sequence[str | Path] = (),
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    open_browser: bool = True,
    say: Callable[[str], object] = print,
) -> None:
    """Shows the runs in `folders` in a browser, until Ctrl-C.

    Without folders, those in `runs`. `port` 0 takes a free one. Whoever has the address that is
    printed can read the runs: it ends with a random token, and is of this machine alone unless
    `host` says otherwise.
    """
    try:
        import uvicorn
    except ImportError as exc:
        raise MissingExtraError("uvicorn", "view") from exc
    from ludic.view.app import make_app
    from ludic.view.security import LOOPBACK

    roots = [Path(folder) for folder in folders] or [Path(DEFAULT_FOLDER)]
    for root in roots:
        if not root.is_dir():
            raise ConfigError(f"{root} is not a folder: name a run's, or one that holds runs")
    token = secrets.token_urlsafe(24)
    hosts = {*LOOPBACK, host, *(() if host in LOOPBACK else (platform.node(), socket.getfqdn()))}
    with _bound(host, port) as listening:
        shown = host if host not in ("0.0.0.0", "::") else platform.node()
        shown = f"[{shown}]" if ":" in shown else shown
        address = f"http://{shown}:{listening.getsockname()[1]}/?token={token}"
        say(f"showing {', '.join(map(str, roots))} at {address}\nCtrl-C ends it")
        config = uvicorn.Config(
            make_app(roots, token=token, hosts=hosts),
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=2,
        )
        if open_browser:
            webbrowser.open(address)
        with suppress(KeyboardInterrupt):  # which it raises again once all is closed
            uvicorn.Server(config).run(sockets=[listening])


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    try:  # it listens at once: the browser may be there before the server
        return socket.create_server((host, port), family=family, dualstack_ipv6=both)
    except OSError as exc:
        why = (exc.strerror or str(exc)).partition(" (while")[0]  # which would say it twice
        raise ConfigError(
            f"cannot listen on {host}, port {port}: {why}; name another with --port"
        ) from exc
