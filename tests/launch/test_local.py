"""Roles as processes of this host."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

import pytest

from ludic.errors import LaunchError
from ludic.launch import Ended, LocalEngine, Placement, Role, Running
from ludic.launch.processes import private_file


def ended(placement: Placement) -> Ended:
    """How it ends, which it does soon."""
    deadline = time.monotonic() + 100
    while not isinstance(state := placement.poll(), Ended):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    placement.end(10.0)
    return state


def python(folder: Path, code: str, **options: object) -> Role:
    log = folder / "logs" / "role.log"
    return Role("role", (sys.executable, "-c", code), log, **options)  # type: ignore[arg-type]


def test_a_role_writes_its_log_and_its_end_is_reported_with_its_last_words(tmp_path: Path) -> None:
    role = python(tmp_path, "print('one'); print('two'); raise SystemExit(3)")
    assert ended(LocalEngine().start(role)) == Ended(3, "one | two")
    assert role.log.read_text() == "one\ntwo\n"


def test_the_ranks_of_a_gang_know_each_other(tmp_path: Path) -> None:
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"
    code = f"import os; print(*(os.environ[n] for n in {names.split()!r}))"
    assert ended(LocalEngine().start(python(tmp_path, code, nodes=2, processes=2))).status == 0
    logs = [tmp_path / "logs" / f"role-rank{rank}.log" for rank in range(4)]
    ranks = [log.read_text().split() for log in logs]
    assert [rank[:4] for rank in ranks] == [[str(r), str(r % 2), "4", "2"] for r in range(4)]
    assert len({tuple(rank[4:]) for rank in ranks}) == 1, "they meet at one place"


def test_a_gang_fails_with_its_first_rank_and_ends_as_a_whole(tmp_path: Path) -> None:
    code = "import os, time; os.environ['RANK'] == '1' and exit(7); time.sleep(600)"
    placement = LocalEngine().start(python(tmp_path, code, processes=2))
    assert ended(placement).status == 7
    statuses = [p.poll() for node in placement._nodes for p in node._processes]  # type: ignore[attr-defined]
    assert statuses == [-signal.SIGTERM, 7]


def test_a_gang_runs_until_all_its_ranks_have_ended(tmp_path: Path) -> None:
    code = "import os, time; time.sleep(600 * (os.environ['RANK'] == '0'))"
    placement = LocalEngine().start(python(tmp_path, code, processes=2))
    second = placement._nodes[0]._processes[1]  # type: ignore[attr-defined]
    second.wait(100)
    assert isinstance(placement.poll(), Running)
    placement.end(10.0)


def test_secrets_are_read_from_a_file_that_only_this_user_can_read(tmp_path: Path) -> None:
    secrets = tmp_path / "secrets.json"
    private_file(secrets, json.dumps({"TOKEN": "hush"}))
    assert secrets.stat().st_mode & 0o077 == 0
    code = "import os, sys; print(os.environ['TOKEN'], os.environ['OPEN'], sys.argv)"
    role = python(tmp_path, code, secrets=secrets, variables={"OPEN": "seen"})
    assert ended(LocalEngine().start(role)) == Ended(0, "hush seen ['-c']")
    secrets.unlink()
    with pytest.raises(LaunchError, match=r"cannot read .*secrets\.json"):
        LocalEngine().start(role)


def test_a_command_is_given_an_address_and_a_port(tmp_path: Path) -> None:
    role = Role("server", ("echo", "http://{address}:{port}"), tmp_path / "server.log")
    host, _, port = ended(LocalEngine().start(role)).words.rpartition(":")
    assert host == "http://127.0.0.1"
    assert 0 < int(port) < 65536


def test_a_command_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    role = Role("server", ("/nowhere/python",), tmp_path / "server.log")
    with pytest.raises(LaunchError, match=r"server cannot be started: .*/nowhere/python"):
        LocalEngine().start(role)


def test_a_role_hears_signals_that_the_thread_which_starts_it_has_blocked(tmp_path: Path) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        code = "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
        assert ended(LocalEngine().start(python(tmp_path, code))) == Ended(0, "set()")
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
