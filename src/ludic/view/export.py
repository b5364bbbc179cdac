"""One rollout as an HTML file that needs no server, no script and nothing from elsewhere."""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --quiet: #667; --line: #d8dade; --page: #fff;
  --soft: #f5f6f8; --good: #0a7f4f; --bad: #b3402a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e6ea; --quiet: #99a; --line: #353a42;
  --page: #15181c; --soft: #1d2127; --good: #5cc796; --bad: #ec8a70; } }
body { font: 15px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 56rem; margin: 2.5rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; } h2 { font-size: 1rem; margin: 2rem 0 .5rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; }
dt { color: var(--quiet); } dd { margin: 0; overflow-wrap: anywhere; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; font: 13px/1.6 ui-monospace,
  monospace; unicode-bidi: plaintext; }
article { border: 1px solid var(--line); border-radius: 8px; padding: .7rem .9rem; margin: .6rem 0;
  background: var(--soft); }
article.assistant { background: var(--page); border-left: 3px solid #5a78c8; }
header { color: var(--quiet); font-size: .8rem; margin-bottom: .3rem; }
.note { color: var(--quiet); font-size: .85rem; }
.seam { border-block: 2px dashed var(--bad); padding: .4rem .9rem; color: var(--bad); }
.good { color: var(--good); } .bad { color: var(--bad); }
.tokens span { border-radius: 3px; padding: 1px 0; }
.ctl { color: var(--bad); font-size: .85em; }
"""


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
    title = visible(page["id"])
    body = "\n".join(_steps(page))
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        '<meta http-equiv="content-security-policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{escape(page['id'])}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{title}</h1><dl>{listed}</dl>\n{body}\n"
        "<p class=note>Tokens are coloured by the weight they were trained with, green for more "
        "of it and red for less; hover for ids and log-probs. Written by <code>ludic view</code>."
        "</p></body></html>\n"
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
    found = []
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
        found.append(f'<span title="{escape(title)}"{style}>{visible(texts[number_])}</span>')
    return f"<pre class=tokens>{''.join(found)}</pre>"


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
    found = []
    for char in text:
        kind = unicodedata.category(char)
        if char in "\n\t" or kind not in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp"):
            found.append(char if char not in "&<>\"'" else escape(char))
        elif ord(char) < 0xA0:
            found.append(f'<span class="ctl">\\x{ord(char):02x}</span>')
        else:
            found.append(f'<span class="ctl">[U+{ord(char):04X}]</span>')
    return "".join(found)
