"""Servers by address, and the keys to them, which no run file holds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, model_validator

from ludic.errors import ConfigError
from ludic.inference.addresses import without_user
from ludic.runs.settings.base import Section


def _checked(address: str) -> str:
    plain = without_user(address)
    if plain != address:
        raise ValueError(
            "a user and a password would be stored with the run: leave them out, and name the "
            "environment variable or the file that holds the server's key as api_key_env or "
            "api_key_file"
        )
    if not address.startswith(("http://", "https://")):
        raise ValueError(f"an address begins with http:// or https://; try http://{address}")
    return address


Address: TypeAlias = Annotated[str, AfterValidator(_checked)]


class KeyedSection(Section):
    """A table with the key to a server: its place, and never the key itself."""

    api_key_env: str | None = None
    api_key_file: str | None = None

    @model_validator(mode="after")
    def _one_key(self) -> KeyedSection:
        if self.api_key_env is not None and self.api_key_file is not None:
            raise ValueError("give api_key_env or api_key_file, not both")
        return self


def read_key(section: KeyedSection, where: str) -> str | None:
    """Returns the key that a table names; None if it names none. `where` is the table's name."""
    if (variable := section.api_key_env) is not None:
        if not (key := os.environ.get(variable, "").strip()):
            raise ConfigError(
                f"{where}.api_key_env={variable!r}: there is no such environment variable; give "
                "its name, not the key itself"
                if not variable.isidentifier()
                else f"{where}.api_key_env={variable!r}: this environment variable is not set"
            )
        return key
    if (file := section.api_key_file) is not None:
        try:
            key = Path(file).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(f"{where}.api_key_file={file!r} cannot be read: {exc}") from exc
        if not key:
            raise ConfigError(f"{where}.api_key_file={file!r} is empty")
        return key
    return None
