"""No program finds an answer, a test, a checker, another program's words or the host's environment.

The scan is proved to see by what it does find: its own input in every episode, canaries in every
kind of place outside of a sandbox, and what a template that kept requests would give away.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ludic.envs.code_exec.sandbox import worker
from ludic.envs.code_exec.sandbox.bubblewrap import interpreter, launched, readable_by_all
from ludic.envs.code_exec.sandbox.inside import sources
from tests.envs.code_exec.canaries import SCAN, canary, run_episodes

pytestmark = [pytest.mark.integration, pytest.mark.sandbox, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[3]
MODES = 4
PLACES = {"memory", "frame", "object", "descriptor", "file", "environment", "process"}
ORDINARY_USER = 65534


def check(report: dict[str, Any], episodes: int) -> None:
    assert report["episodes"] == episodes
    assert report["leaks"] == []
    assert report["blind"] == [], "a scan did not find what its program was given"
    assert set(report["counted"]) >= PLACES - {"process"}
    assert report["counted"]["memory"] > episodes * 2**20


def test_no_canary_is_found_in_fifty_episodes_on_one_worker() -> None:
    report = vars(run_episodes(13))
    check(report, 13 * MODES)
    assert len(set(report["workers"])) == 1


def test_no_canary_is_found_when_an_ordinary_user_runs_the_sandboxes() -> None:
    if os.geteuid() != 0:
        pytest.skip("this whole suite is run by an ordinary user")
    binds: list[tuple[str, str]] = []

    def reachable(folder: str) -> str:
        if readable_by_all(folder):
            return folder
        binds.append((folder, f"/mnt/{len(binds)}"))
        return binds[-1][1]

    python = interpreter()
    executable = python.executable.replace(python.prefix, reachable(python.prefix), 1)
    packages = [reachable(sysconfig.get_path(name)) for name in ("purelib", "platlib")]
    root = reachable(str(ROOT))
    done = subprocess.run(
        launched(
            [executable, "-B", "-m", "tests.envs.code_exec.canaries", "13"],
            ORDINARY_USER,
            binds,
            None,
        ),
        env={"PATH": os.environ["PATH"], "PYTHONPATH": ":".join([f"{root}/src", root, *packages])},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    check(report, 13 * MODES)
    assert len(set(report["workers"])) == 1


def leaky(real: Callable[..., dict[str, str]]) -> Callable[..., dict[str, str]]:
    """The template as it should not be: it looks at the requests that it passes on."""

    def changed(*names: str) -> dict[str, str]:
        modules = real(*names)
        for name, source in modules.items():
            if name.endswith(".supervisor"):
                forks = "            if os.fork() == 0:\n"
                assert source.count(forks) == 1
                peek = (
                    "            one, seen = socket.socket(fileno=os.dup(descriptors[0])), b''\n"
                    "            while len(seen) < 4 + int.from_bytes(seen[:4] or b'1', 'big'):\n"
                    "                seen = one.recv(1 << 20, socket.MSG_PEEK)\n"
                    "            settings.setdefault('kept', []).append(seen)\n"
                )
                modules[name] = source.replace(forks, peek + forks)
        return modules

    return changed


def test_a_template_that_saw_requests_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "sources", leaky(sources))
    report = run_episodes(1)
    places = {where for _, where, _ in report.leaks}
    modes = {mode for mode, _, _ in report.leaks}
    assert places >= {"memory", "object"}
    assert modes == {"stdio", "functions", "checker", "python"}


CONTROL = """
import mmap, os, sys, time
secrets = dict(line.split("=") for line in sys.stdin.read().split())
unnamed = mmap.mmap(-1, 4096)
unnamed.write(secrets.pop("memory").encode())
other = os.fork()
if other == 0:
    held = mmap.mmap(-1, 4096)
    held.write(secrets["process"].encode())
    secrets.clear()
    time.sleep(300)
secrets.pop("process")
reads, writes = os.pipe()
os.write(writes, secrets.pop("descriptor").encode())
objects = {"one": [{"deep": secrets.pop("object")}]}
def calls_it():
    local = secrets.pop("frame")
    print(scan(".", [str(other)]))
try:
    calls_it()
finally:
    os.kill(other, 9)
    os.wait()
"""


def test_the_scan_sees_every_kind_of_place(tmp_path: Path) -> None:
    planted = {place: canary(place) for place in PLACES}
    (tmp_path / "note").write_text(planted.pop("file"))
    (tmp_path / "main.py").write_text(SCAN + CONTROL)
    done = subprocess.run(
        [sys.executable, "main.py"],
        cwd=tmp_path,
        env={**os.environ, "SECRET": planted.pop("environment")},
        input="\n".join(f"{place}={what}" for place, what in planted.items()),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    hits = {where for where, what in json.loads(done.stdout)["hits"] if f"-{where}-" in what}
    assert hits == PLACES
