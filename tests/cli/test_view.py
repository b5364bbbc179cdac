"""`ludic view`: an address with a token, and an end by Ctrl-C."""

from __future__ import annotations

import http.client
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest


def start(*arguments: str) -> subprocess.Popen[str]:
    # As in a shell's foreground: a test's shell may have told its children to ignore Ctrl-C.
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "ludic", "view", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


@pytest.mark.integration
def test_it_prints_an_address_serves_it_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "run.json").write_text('{"schema": 1}')
    with start(str(tmp_path), "--no-open") as process:
        assert process.stdout is not None
        found = re.search(
            r"http://127\.0\.0\.1:(\d+)/\?token=([\w-]{20,})", process.stdout.readline()
        )
        assert found is not None
        port, token = int(found[1]), found[2]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/api/runs", headers={"Cookie": f"ludic-view-{port}={token}"})
        answer = connection.getresponse()
        assert answer.status == 200
        assert b'"first"' in answer.read()
        connection.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


@pytest.mark.integration
def test_what_is_no_folder_is_said_in_a_sentence(tmp_path: Path) -> None:
    with start(str(tmp_path / "missing"), "--no-open") as process:
        assert process.stderr is not None
        said = process.stderr.read()
        assert process.wait(60) == 2
    assert said.startswith("ludic: ")
    assert "is not a folder" in said
