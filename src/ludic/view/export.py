"""One rollout as an HTML file that needs no server, no script and nothing from elsewhere."""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

_TEMPLATE = Path(__file__).with_name("rollout.html.jinja").read_text(encoding="utf-8")


def rollout_html(page: Mapping[str, Any], run: str) -> str:
    """The page of a rollout, as `rollout_page` describes it."""
    environment = Environment(autoescape=True, trim_blocks=True, keep_trailing_newline=True)
    environment.filters |= {"visible": visible, "number": number, "json": _json}
    values = {"page": page, "run": run, "coloured": coloured}
    return environment.from_string(_TEMPLATE, values).render()


def coloured(tokens: Mapping[str, Any], texts: Mapping[int, str]) -> Iterator[tuple[str, str, str]]:
    """What is known of each sampled token, its colour by the weight it was trained with, and its
    text."""
    weights = tokens.get("weights")
    top = max((abs(w) for w in weights or () if math.isfinite(w)), default=0.0) or 1.0
    for place, token in enumerate(tokens["completion"]):
        title, style = f"id {token}", ""
        if tokens["logprobs"]:
            title += f", log-prob {number(tokens['logprobs'][place])}"
        if weights and math.isfinite(weights[place]):
            share = min(abs(weights[place]) / top, 1.0) * 45
            hue = "150 70% 40%" if weights[place] > 0 else "12 80% 50%"
            style = f"background:hsl({hue} / {share:.0f}%)"
            title += f", weight {number(weights[place])}"
        yield title, style, texts[token]


def number(value: float | None) -> str:
    """A number in few digits."""
    return "–" if value is None else f"{value:.4g}"


def visible(text: str) -> Markup:
    """Text as HTML in which nothing acts: markup is escaped, and characters that are not seen or
    turn others around are named."""
    shown = []
    for char in text:
        kind = unicodedata.category(char)
        if char in "\n\t" or kind not in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp"):
            shown.append(char if char not in "&<>\"'" else escape(char))
        elif ord(char) < 0xA0:
            shown.append(f'<span class="ctl">\\x{ord(char):02x}</span>')
        else:
            shown.append(f'<span class="ctl">[U+{ord(char):04X}]</span>')
    return Markup("".join(shown))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
