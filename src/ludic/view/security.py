"""Who may ask: whoever has the token, from a page of this server, by a name of this machine."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from urllib.parse import urlencode, urlsplit

try:
    from starlette.datastructures import MutableHeaders
    from starlette.requests import HTTPConnection
    from starlette.responses import PlainTextResponse, RedirectResponse, Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
except ImportError as exc:
    from ludic.errors import MissingExtraError

    raise MissingExtraError("starlette", "view") from exc


POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Guard:
    """Refuses requests with a foreign `Host` or `Origin`, from another site, or without the token.

    The token comes once in the address, and is then kept in a cookie, so that links within the
    page do not carry it. Only GET and HEAD are answered.
    """

    def __init__(self, app: ASGIApp, *, token: str, hosts: Iterable[str] = LOOPBACK) -> None:
        self.app, self.token, self.hosts = app, token, {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            else:
                await self.app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        await (self._answer(scope) or self.app)(scope, receive, guarded)

    def _answer(self, scope: Scope) -> Response | None:
        """What is said instead of an answer; None where the request is fine."""
        asked = HTTPConnection(scope)
        headers = asked.headers
        host = headers.get("host", "")
        name, port = _authority(host)
        if name not in self.hosts:
            return _refused("this address is not one of this machine's: it begins with 127.0.0.1")
        origin = headers.get("origin")
        own = (f"http://{host}".lower(), f"https://{host}".lower())
        foreign = origin is not None and origin.lower() not in own
        navigates = headers.get("sec-fetch-mode", "navigate") == "navigate"
        if foreign or (headers.get("sec-fetch-site") == "cross-site" and not navigates):
            return _refused("a page of another site asked")
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("only reading is possible here", 405)
        query = asked.query_params.multi_items()
        given = [value for name, value in query if name == "token"]
        if given:
            if not self._fits(given[0]):
                return _refused("the token is not this server's: open the address that it printed")
            rest = urlencode([(name, value) for name, value in query if name != "token"])
            # The path of this server alone: two slashes would lead to another one.
            path = "/" + scope["path"].lstrip("/\\")
            response = RedirectResponse(path + (f"?{rest}" if rest else ""), 303)
            response.set_cookie(
                _cookie_of(port), self.token, httponly=True, samesite="lax", path="/"
            )
            return response
        if not self._fits(asked.cookies.get(_cookie_of(port), "")):
            return _refused(
                "the token is missing: open the address that `ludic view` printed, with its token"
            )
        return None

    def _fits(self, token: str) -> bool:
        return secrets.compare_digest(token.encode("utf-8", "replace"), self.token.encode())


def _refused(why: str) -> Response:
    return PlainTextResponse(f"ludic view: {why}\n", 403)


def _cookie_of(port: int) -> str:
    """Cookies are shared by all ports of a machine, so the port is in the name."""
    return f"ludic-view-{port}"


def _authority(host: str) -> tuple[str, int]:
    """The name and the port in a `Host`; an empty name, which no machine has, for one that is not
    well-formed."""
    try:
        parts = urlsplit(f"//{host}")
        return (parts.hostname or "").lower(), parts.port or 80
    except ValueError:
        return "", 0
