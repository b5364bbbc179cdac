"""Programs without any package: plain HTTP from the standard library."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from typing import Any

from ludic.interaction import ProgramAttempt


def complete(messages: list[Any], base_url: str, api_key: str, **arguments: Any) -> dict[str, Any]:
    """The assistant's message."""
    body = json.dumps({"model": "m", "messages": messages, **arguments}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        message: dict[str, Any] = json.load(response)["choices"][0]["message"]
    return message


def solve(task: str, base_url: str, api_key: str) -> str:
    """Asks once, and then whether that is so."""
    messages: list[Any] = [{"role": "user", "content": task}]
    messages += [complete(messages, base_url, api_key), {"role": "user", "content": "Sure?"}]
    return str(complete(messages, base_url, api_key)["content"])


def asks_once(task: str, base_url: str, api_key: str) -> str:
    """Says what the model says."""
    return str(complete([{"role": "user", "content": task}], base_url, api_key)["content"])


def brief(attempt: ProgramAttempt) -> float:
    """A reward: 1 for programs that ended well, and less for each message."""
    return float(attempt.status == 0) - 0.1 * len(attempt.messages)


if __name__ == "__main__":
    what, task = sys.argv[1], sys.stdin.read()
    address, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    if what != "silent":
        print(solve(task, address, key))
    if what == "system":
        print(os.environ["LUDIC_SYSTEM_PROMPT"], os.environ["OPENAI_MODEL"])
    if what == "crash":
        sys.exit("no luck")
    if what == "hang":
        time.sleep(600)
    if what == "full":
        complete([{"role": "user", "content": "x" * 5000}], address, key)
