"""Addresses of servers, with the secrets in them removed, and the keys to servers."""

from __future__ import annotations

import difflib
import os
import re
from base64 import b64encode
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ludic.errors import ConfigError

_USER = re.compile(r"(?<=://)[^/?#\s'\"]*@")


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


def find_key(variable: str | None, file: str | None, where: str) -> str | None:
    """Returns the key in an environment variable or a file; None if neither is named. `where` is
    what they are named in, for errors, which never show a key."""
    if variable is not None and file is not None:
        raise ConfigError(f"{where}: give api_key_env or api_key_file, not both")
    if variable is not None:
        if not variable.isidentifier():  # perhaps the key itself
            raise ConfigError(f"{where}.api_key_env is the name of an environment variable")
        if not (key := os.environ.get(variable, "").strip()):
            raise ConfigError(
                f"{where}.api_key_env={variable!r}: this environment variable is not set"
                f"{_nearest_variable(variable)}"
            )
        return key
    if file is None:
        return None
    try:
        key = Path(os.path.expanduser(file)).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else exc
        raise ConfigError(f"{where}.api_key_file={_shown(file)} cannot be read: {why}") from exc
    if not key:
        raise ConfigError(f"{where}.api_key_file={_shown(file)} is empty")
    return key


def _shown(path: str) -> str:
    return repr(path if len(path) <= 200 else f"{path[:200]}…")


def _nearest_variable(name: str) -> str:
    near = difflib.get_close_matches(name, os.environ, n=1, cutoff=0.75)
    return f"; did you mean {near[0]!r}?" if near else ""
