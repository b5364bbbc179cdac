"""One rollout as an HTML file that needs no server, no script and nothing from elsewhere."""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from string import Template
from typing import Any

_PAGE = Template(Path(__file__).with_name("rollout.html").read_text(encoding="utf-8"))


def rollout_html(page: Mapping[str, Any], run: str) -> str:
    """The page of a rollout, as `rollout_page` describes it."""
    facts = {
        "run": run,
        "episode": page["episode"],
        "agent": page["agent"],
        "group": page["group"],
        "environment": page["env"] and page["env"]["kind"],
        "reward": number(page["reward"]),
        "ending": _ending(page),
        "sampled tokens": page["tokens"],
        "trained on in update": ", ".join(map(str, page["updates"])) or "none",
        "error": page["error"],
    }
    listed = "".join(
        f"<dt>{escape(k)}</dt><dd>{visible(str(v))}</dd>" for k, v in facts.items() if v
    )
    return _PAGE.substitute(
        title=escape(page["id"]),
        heading=visible(page["id"]),
        facts=listed,
        steps="\n".join(_steps(page)),
    )


def _steps(page: Mapping[str, Any]) -> Iterator[str]:
    turn = None
    for step in page["steps"]:
        if step["turn"] != turn:
            turn = step["turn"]
            yield f"<h2>Turn {turn + 1}</h2>"
        if step["kind"] == "environment":
            yield _environment(step)
            continue
        if step["fork"] and step["fork"]["reason"] == "compacted":
            yield _seam(step, page)
        elif step["fork"]:
            yield (
                f"<p class=note>Fork: {escape(step['fork']['reason'])}. "
                f"{visible(step['fork']['detail'])}</p>"
            )
        for message in step["new_messages"]:
            yield _message(message)
        yield _message(step["message"], _tokens(step, page), step["finish_reason"])
        for message in step["tool_messages"]:
            yield _message(message)


def _seam(step: Mapping[str, Any], page: Mapping[str, Any]) -> str:
    """Where the dialogue was compacted: what the model sees of it from here on."""
    said = f"<p class=seam>Compacted: {visible(step['fork']['detail'])}.</p>"
    tokens, texts = step["tokens"], page["texts"]
    if not tokens or not texts:
        return said
    text = "".join(texts[number_] for number_ in tokens["prompt"])
    return (
        f"{said}<details><summary>The {len(tokens['prompt'])} tokens that the model sees from here "
        f"on</summary><pre>{visible(text)}</pre></details>"
    )


def _message(message: Mapping[str, Any], tokens: str = "", finish: str = "") -> str:
    role = message["role"]
    calls = "".join(
        f"<pre>{visible(call['function']['name'])}"
        f"({visible(json.dumps(call['function']['arguments'], ensure_ascii=False))})</pre>"
        for call in message.get("tool_calls") or ()
    )
    text = "" if tokens else f"<pre>{visible(message['content'])}</pre>"
    cut = " · cut by length" if finish == "length" else ""
    return (
        f'<article class="{escape(role)}"><header>{escape(role)}{cut}</header>'
        f"{tokens}{text}{calls}</article>"
    )


def _tokens(step: Mapping[str, Any], page: Mapping[str, Any]) -> str:
    tokens, texts = step["tokens"], page["texts"]
    if not tokens or not texts:
        return ""
    weights = tokens.get("weights")
    top = max((abs(w) for w in weights or () if math.isfinite(w)), default=0.0) or 1.0
    spans = []
    for place, number_ in enumerate(tokens["completion"]):
        title = f"id {number_}"
        style = ""
        if tokens["logprobs"]:
            title += f", log-prob {number(tokens['logprobs'][place])}"
        if weights and math.isfinite(weights[place]):
            share = min(abs(weights[place]) / top, 1.0) * 45
            hue = "150 70% 40%" if weights[place] > 0 else "12 80% 50%"
            style = f' style="background:hsl({hue} / {share:.0f}%)"'
            title += f", weight {number(weights[place])}"
        spans.append(f'<span title="{escape(title)}"{style}>{visible(texts[number_])}</span>')
    return f"<pre class=tokens>{''.join(spans)}</pre>"


def _environment(step: Mapping[str, Any]) -> str:
    reward = step["reward"]
    tone = "good" if reward > 0 else "bad" if reward < 0 else ""
    parts = ", ".join(f"{escape(k)} {number(v)}" for k, v in step["components"].items())
    facts = [f'reward <b class="{tone}">{number(reward)}</b>' + (f" ({parts})" if parts else "")]
    if step["info"].get("parse_error"):
        facts.append('<b class="bad">not understood</b>: the environment was not stepped')
    elif step["info"].get("compacted"):
        facts.append("<b>compacted</b>: a summary, and no move")
    elif step["action"] is not None:
        facts.append(f"action <code>{visible(step['action'])}</code>")
    if step["info"].get("result") is not None:
        facts.append(f"<b>{visible(str(step['info']['result']))}</b>")
    if step["terminated"]:
        facts.append("terminated")
    if step["truncated"]:
        facts.append(f"truncated: {escape(step['truncation'] or '')}")
    shown = f"<pre>{visible(step['next_obs'])}</pre>"
    return f"<article><header>environment · {' · '.join(facts)}</header>{shown}</article>"


def _ending(page: Mapping[str, Any]) -> str:
    if page["error"]:
        return "failed"
    if page["truncated"]:
        return f"truncated: {page['truncation']}"
    return "terminated" if page["terminated"] else "no ending"


def number(value: float | None) -> str:
    """A number in few digits."""
    return "–" if value is None else f"{value:.4g}"


def visible(text: str) -> str:
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
    return "".join(shown)
