"""The contract of a sandbox: files, input, output, exit status, limits, and what is refused."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from ludic.envs.code_exec.sandbox import bubblewrap as bubblewrap_module
from ludic.envs.code_exec.sandbox.base import (
    Limits,
    RunStatus,
    SandboxError,
    SandboxUnavailableError,
)
from ludic.envs.code_exec.sandbox.bubblewrap import check_bubblewrap
from ludic.envs.code_exec.sandbox.plain import PlainSandbox
from ludic.envs.code_exec.sandbox.pool import SandboxPool, describe_sandbox, make_sandbox
from ludic.errors import ConfigError, UnknownNameError

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:the sandbox 'plain':RuntimeWarning"),
]
MAIN = ["python", "main.py"]


def test_a_program_has_its_files_its_input_and_its_arguments(pool: SandboxPool) -> None:
    files = {
        "main.py": b"import sys, helper\nprint(sys.argv, helper.x, sys.stdin.read(), __name__)",
        "helper.py": b"x = open('data/in.bin', 'rb').read()",
        "data/in.bin": bytes(range(3)),
    }
    result = pool.run(files, [*MAIN, "a b"], "grüß".encode())
    assert result.stdout.decode() == "['main.py', 'a b'] b'\\x00\\x01\\x02' grüß __main__\n"
    assert result.status is RunStatus.OK
    assert result.exit_code == 0


@pytest.mark.parametrize(
    ("program", "status", "code", "said"),
    [
        (b"raise SystemExit(3)", RunStatus.ERROR, 3, b""),
        (b"exit('no')", RunStatus.ERROR, 1, b"no\n"),
        (b"def f(:", RunStatus.ERROR, 1, b"SyntaxError"),
        (b"1 / 0", RunStatus.ERROR, 1, b'File "main.py", line 1, in <module>'),
        (b"\x00\xff\xfe", RunStatus.ERROR, 1, b"Error"),
        (b"", RunStatus.OK, 0, b""),
        (b"import os; os.abort()", RunStatus.SIGNAL, -6, b""),
        (b"import atexit, sys; atexit.register(print, 1, file=sys.stderr)", RunStatus.OK, 0, b"1"),
    ],
)
def test_it_ends_as_it_would_anywhere(
    pool: SandboxPool, program: bytes, status: RunStatus, code: int, said: bytes
) -> None:
    result = pool.run({"main.py": program}, MAIN)
    assert (result.status, result.exit_code) == (status, code)
    assert said in result.stderr
    assert b"ludic" not in result.stderr


def test_any_program_of_the_system_can_be_run(pool: SandboxPool) -> None:
    assert pool.run({"x": b"abc"}, ["cat", "x"]).stdout == b"abc"
    assert pool.run({}, ["python", "-c", "print(7)"]).stdout == b"7\n"
    missing = pool.run({}, ["no-such-program"])
    assert (missing.status, missing.exit_code) == (RunStatus.ERROR, 127)
    assert b"no-such-program" in missing.stderr


def test_output_is_cut_at_its_limit(pool: SandboxPool) -> None:
    program = b"import os, time\nos.write(1, b'x' * 5000)\ntime.sleep(20)"
    result = pool.run({"main.py": program}, MAIN, b"", Limits(output_kb=1))
    assert result.status is RunStatus.OUTPUT
    assert result.stdout == b"x" * 1024


def test_one_can_talk_to_a_program(pool: SandboxPool) -> None:
    echo = b"import sys\nfor line in sys.stdin: print(line.upper(), end='', flush=True)"
    with pool.lease() as (sandbox,):
        program = sandbox.open({"main.py": echo}, MAIN)
        for word in (b"one\n", b"two\n"):
            program.send(word)
            assert program.receive_line(10) == word.upper()
        with pytest.raises(SandboxError, match="one at a time"):
            sandbox.run({}, ["true"])
        assert program.finish().status is RunStatus.OK
        assert program.receive_line(10) is None
        program = sandbox.open({"main.py": echo}, MAIN)
        with pytest.raises(TimeoutError):
            program.receive_line(0.05)
        assert program.kill().status is RunStatus.KILLED
        assert sandbox.run({}, ["true"]).ok


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "", "x\0y"])
def test_a_file_outside_of_the_folder_is_refused(pool: SandboxPool, name: str) -> None:
    with pytest.raises(ConfigError, match="relative path"):
        pool.run({name: b""}, MAIN)


def test_an_empty_command_is_refused(pool: SandboxPool) -> None:
    with pytest.raises(ConfigError, match="command"):
        pool.run({}, [])


def test_programs_get_the_plain_python_without_our_packages(pool: SandboxPool) -> None:
    look = (
        b"import sys\ntry:\n    import ludic\nexcept ImportError:\n    print(sys.version_info[:2])"
    )
    assert pool.run({"main.py": look}, MAIN).stdout.decode() == f"{sys.version_info[:2]}\n"


@pytest.mark.parametrize(
    ("given", "wrong"),
    [({"wall_s": 0}, "wall_s"), ({"wal_s": 1}, "wal_s"), ({"files": True}, "files")],
)
def test_limits_that_make_no_sense_are_refused(given: dict[str, float], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        Limits.of(given)


def test_a_missing_binary_is_named_and_nothing_weaker_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_bubblewrap.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda *args, **kwargs: None)
    try:
        with pytest.raises(SandboxUnavailableError, match=r"apt-get install bubblewrap.*'plain'"):
            make_sandbox()
        with pytest.raises(SandboxUnavailableError):
            SandboxPool()
        found, remedy = describe_sandbox()
        assert found == "missing"
        assert remedy is not None
        assert "bubblewrap" in remedy
    finally:
        monkeypatch.undo()
        check_bubblewrap.cache_clear()


@pytest.mark.sandbox
def test_the_doctor_shows_the_sandbox() -> None:
    from ludic.runs.machine import check_machine

    (fact,) = [fact for fact in check_machine() if fact.name == "sandbox"]
    assert fact.found.startswith("bubblewrap")
    assert fact.remedy is None


def test_no_permission_for_namespaces_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refuses = tmp_path / "bwrap"
    refuses.write_text(
        "#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n"
    )
    refuses.chmod(0o755)
    tmp_path.chmod(0o755)
    check_bubblewrap.cache_clear()
    monkeypatch.setattr(bubblewrap_module, "find_bubblewrap", lambda: str(refuses))
    try:
        with pytest.raises(SandboxUnavailableError, match=r"(?i)namespace"):
            make_sandbox()
    finally:
        monkeypatch.undo()
        check_bubblewrap.cache_clear()


def test_the_plain_one_warns_and_has_to_be_asked_for() -> None:
    with pytest.warns(RuntimeWarning, match="read every file"), PlainSandbox() as sandbox:
        assert sandbox.run({}, ["true"]).ok
    with pytest.raises(UnknownNameError, match="bubblewrap"):
        make_sandbox("bublewrap")
