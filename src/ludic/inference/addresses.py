"""Addresses of servers, without the secrets that may stand in them."""

from __future__ import annotations

import re
from base64 import b64encode
from urllib.parse import unquote, urlsplit

_USER = re.compile(r"(?<=://)[^/\s'\"]*@")


def without_user(text: str) -> str:
    """Removes user and password from the addresses in a text.

    >>> without_user("cannot reach http://ada:secret@gpu:8000/v1")
    'cannot reach http://gpu:8000/v1'
    """
    return _USER.sub("", text)


def split_user(url: str) -> tuple[str, dict[str, str]]:
    """Returns an address without its user and password, and the header that stands for them.

    >>> split_user("http://gpu:8000")
    ('http://gpu:8000', {})
    """
    plain = without_user(url)
    if plain == url:
        return url, {}
    parts = urlsplit(url)
    pair = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
    return plain, {"Authorization": "Basic " + b64encode(pair.encode()).decode("ascii")}
