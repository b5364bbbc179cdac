"""Servers by address, and the keys to them, which no run file holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, model_validator

from ludic.errors import ConfigError
from ludic.inference.addresses import find_key, without_user
from ludic.runs.settings.base import Section


def _checked(address: str) -> str:
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
    return find_key(section.api_key_env, section.api_key_file, where)


def check_no_secrets(data: Any, source: str, path: str = "") -> None:
    """Raises if an address anywhere in a run's tables has a user or a password in it, which would
    be stored with the run. The error shows neither."""
    if isinstance(data, str) and without_user(data) != data:
        raise ConfigError(
            f"{source}: {path!r} has a user or a password in its address, which would be stored "
            "with the run: leave them out, and name the environment variable or the file with the "
            "server's key as api_key_env or api_key_file"
        )
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(data, Mapping):
        items = data.items()
    elif isinstance(data, list):
        items = enumerate(data)
    for key, value in items:
        check_no_secrets(value, source, f"{path}.{key}" if path else str(key))
