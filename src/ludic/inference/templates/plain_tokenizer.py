"""A tokenizer from its files alone, without transformers, which imports torch.

It has what `HFChatTemplate` needs; an actor that samples from a server needs no more.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludic.errors import TemplateError

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template*")


@dataclass(eq=False)
class PlainTokenizer:
    """What `HFChatTemplate` asks of a tokenizer; `of_folder` reads what transformers saves."""

    backend_tokenizer: Any
    special_tokens_map: dict[str, str]
    eos_token_id: int | None
    chat_template: str | dict[str, str] | None
    name_or_path: str

    @classmethod
    def of_folder(cls, folder: Path) -> PlainTokenizer:
        """The tokenizer of a folder with `tokenizer.json`."""
        from tokenizers import Tokenizer

        try:
            backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
            config: dict[str, Any] = _json(folder / "tokenizer_config.json")
        except Exception as exc:  # tokenizers raises plain exceptions
            raise TemplateError(f"no fast tokenizer in {folder}: {exc}") from exc
        if (folder / "special_tokens_map.json").is_file():
            config = {**_json(folder / "special_tokens_map.json"), **config}
        tokens = {name: config[name] for name in _NAMES if config.get(name)}
        special = {
            name: token["content"] if isinstance(token, dict) else str(token)
            for name, token in tokens.items()
        }
        eos = special.get("eos_token")
        eos_id = None if eos is None else backend.token_to_id(eos)
        return cls(backend, special, eos_id, _template(folder, config), str(folder))

    @classmethod
    def of(cls, tokenizer: Any) -> PlainTokenizer:
        """The same tokenizer without the package that made it."""
        return cls(
            tokenizer.backend_tokenizer,
            dict(tokenizer.special_tokens_map),
            tokenizer.eos_token_id,
            tokenizer.chat_template,
            str(getattr(tokenizer, "name_or_path", "")),
        )

    def described(self) -> dict[str, Any]:
        """The tokenizer as plain values, for `from_description`."""
        return {**vars(self), "backend_tokenizer": self.backend_tokenizer.to_str()}

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> PlainTokenizer:
        """The tokenizer that `described` described."""
        from tokenizers import Tokenizer

        backend = Tokenizer.from_str(description["backend_tokenizer"])
        return cls(**{**description, "backend_tokenizer": backend})

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))


def load_plain_tokenizer(name_or_path: str) -> PlainTokenizer:
    """The tokenizer of a folder, or of a name on the hub."""
    folder = Path(name_or_path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(name_or_path, allow_patterns=list(_FILES)))
        except (OSError, ValueError) as exc:
            raise TemplateError(f"no tokenizer could be loaded from {name_or_path!r}") from exc
    return PlainTokenizer.of_folder(folder)


def _template(folder: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    if (file := folder / "chat_template.jinja").is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if template is None and (file := folder / "chat_template.json").is_file():
        template = _json(file).get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return template


def _json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
