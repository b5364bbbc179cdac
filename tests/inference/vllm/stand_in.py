"""A stand-in for the Python that has vLLM: it says that it has, and serves `/health` alone."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

_SERVER = """
import http.server, os, sys, time
time.sleep(float(os.environ.get("STAND_IN_SLEEPS_S", "0")))
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()
"""


def stand_in_python(folder: Path, child: str = "sleep 300") -> Path:
    """An executable in `folder`. As a server it starts a shell with `child`, and writes both
    process ids to `folder/pids`."""
    (folder / "server.py").write_text(_SERVER)
    python = folder / "python"
    python.write_text(
        f"""#!/bin/sh
if [ "$1" = "-c" ]; then echo '{{"vllm": "0.32.0", "plugin": true}}'; exit; fi
sh -c '{child}' &
echo $$ $! > {folder}/pids.new
mv {folder}/pids.new {folder}/pids
exec {sys.executable} {folder}/server.py "$@"
"""
    )
    python.chmod(0o755)
    return python


def started_pids(folder: Path, seconds: float = 60.0) -> list[int]:
    """The ids of the server and its child, as soon as they run."""
    deadline = time.monotonic() + seconds
    while not (folder / "pids").is_file():
        assert time.monotonic() < deadline, "the server was not started"
        time.sleep(0.05)
    return [int(pid) for pid in (folder / "pids").read_text().split()]


def all_end(pids: list[int], seconds: float = 60.0) -> bool:
    """Whether none of them runs any more within that time."""
    deadline = time.monotonic() + seconds
    while any(_runs(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # ended this moment, or no Linux
        return not Path("/proc/self").exists()
