"""An MCP server that speaks the protocol by hand, so that it can answer badly: `python mcp_raw.py`.

Its list of tools comes in pages of one. What a tool answers is in its name.
"""

from __future__ import annotations

import json
import sys
from typing import Any

ANSWERS: dict[str, dict[str, Any]] = {
    "fine": {"result": {"content": [{"type": "text", "text": "fine"}]}},
    "malformed": {"result": {"content": 7}},
    "closed": {"error": {"code": -32000, "message": "out of luck"}},
    "refused": {"error": {"code": -32602, "message": "no such thing"}},
}
RAW: dict[str, bytes] = {
    "junk": b"this is no JSON\n[1, 2]\n",
    "bytes": b'"\xff\xfe"\n',
    "stranger": b'{"jsonrpc": "2.0", "id": 99999, "result": {}}\n',
}
"""What these write before they answer as "fine" does."""
TOOLS = [*ANSWERS, *RAW, "waiting"]


def main() -> None:
    waiting: list[Any] = []
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue
        method, params = message["method"], message.get("params") or {}
        if method == "initialize":
            answer: dict[str, Any] = {
                "result": {
                    "protocolVersion": params["protocolVersion"],
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "raw", "version": "1"},
                }
            }
        elif method == "tools/list":
            at = int(params.get("cursor") or 0)
            tool = {"name": TOOLS[at], "description": "", "inputSchema": {"type": "object"}}
            answer = {"result": {"tools": [tool]}}
            if at + 1 < len(TOOLS):
                answer["result"]["nextCursor"] = str(at + 1)
        elif method == "tools/call":
            name = params["name"]
            if name == "waiting":  # is answered after the next call
                waiting.append(message["id"])
                continue
            if name in RAW:
                sys.stdout.buffer.write(RAW[name])
            answer = ANSWERS.get(name, ANSWERS["fine"])
        elif method == "ping":
            answer = {"result": {}}
        else:
            answer = {"error": {"code": -32601, "message": "unknown"}}
        send(message["id"], answer)
        if method == "tools/call":
            while waiting:
                send(waiting.pop(), ANSWERS["fine"])


def send(number: Any, answer: dict[str, Any]) -> None:
    line = json.dumps({"jsonrpc": "2.0", "id": number, **answer})
    sys.stdout.buffer.write(line.encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
