"""A shop assistant with one tool, written with the plain `openai` package, without Ludic.

It runs like any program, against the server of `OPENAI_BASE_URL` and `OPENAI_API_KEY`:

    echo "What does a plum cost?" | python agent.py
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from openai import DefaultHttpxClient, OpenAI

HTTP = DefaultHttpxClient()
"""One for all: making it takes longer than a short conversation."""
PRICES = {"apple": "3", "pear": "5", "plum": "8", "fig": "2"}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "price",
            "description": "Looks up a price.",
            "parameters": {
                "type": "object",
                "properties": {"item": {"type": "string"}},
                "required": ["item"],
            },
        },
    }
]


def price(item: str) -> str:
    """The tool itself."""
    return PRICES.get(item, "unknown")


def solve(task: str, base_url: str | None = None, api_key: str | None = None) -> str:
    """Answers one question, with up to four looks at the price list."""
    messages: list[Any] = [{"role": "user", "content": task}]
    client = OpenAI(base_url=base_url, api_key=api_key, http_client=HTTP)
    for _ in range(5):
        completion = client.chat.completions.create(
            model=os.environ.get("OPENAI_MODEL", "gpt-5-mini"), messages=messages, tools=TOOLS
        )
        message = completion.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            found = price(str(arguments.get("item")))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    return message.content or ""


if __name__ == "__main__":
    print(solve(sys.stdin.read()))
