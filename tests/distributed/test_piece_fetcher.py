"""What a fetch costs where the trainer or other machines fail, and what the trainer remembers of
them."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ludic.distributed import patience, piece_fetcher, weights_http
from ludic.distributed.patience import Away, Patience
from ludic.distributed.piece_fetcher import NotComingError, PieceFetcher, Source
from ludic.distributed.weights_http import PieceFile, PolicyServer, SourceError
from ludic.plumbing import files
from ludic.plumbing.files import file_checksum

PATIENT = Patience(deadline_s=60.0, silence_s=20.0, piece_s=60.0)
SHORT = Patience(deadline_s=0.2, silence_s=20.0, piece_s=60.0)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (files, weights_http, piece_fetcher):
        monkeypatch.setattr(module, "PIECE", 1000)


@pytest.fixture
def trainer() -> Iterator[PolicyServer]:
    server = PolicyServer("key")
    yield server
    server.close()


def offered(trainer: PolicyServer, path: Path, pieces: int = 1) -> Source:
    path.write_bytes(os.urandom(1000 * pieces))
    return Source(**trainer.offer(path))


def file_of(trainer: PolicyServer, source: Source) -> PieceFile:
    with trainer.opened(source.checksum) as opened:
        assert opened is not None
        return opened[0]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The trainer's clock, which stands still."""
    now = [1000.0]
    monkeypatch.setattr(weights_http, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def share(
    trainer: PolicyServer, file: PieceFile, address: str, digits: str, *wanted: int
) -> tuple[int, dict[str, str]]:
    asked = {"address": address, "digits": digits, "left_out": [], "wanted": list(wanted)}
    answer = json.loads(trainer.share(file, asked))
    return answer["claimed"], dict(answer["others"])


class Silent:
    """A machine that accepts connections and never answers; it counts them."""

    def __init__(self, address: str) -> None:
        self.asked = 0
        self._socket = socket.create_server((address, 0))
        self.url = f"http://{address}:{self._socket.getsockname()[1]}"
        self._links: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                self._links.append(self._socket.accept()[0])
            except OSError:
                return
            self.asked += 1

    def close(self) -> None:
        self._socket.close()


# The trainer


def test_a_trainer_that_has_ended_is_not_waited_for(trainer: PolicyServer, tmp_path: Path) -> None:
    source = offered(trainer, tmp_path / "weights")
    trainer.close()
    with pytest.raises(NotComingError, match="refused: has the trainer ended"):
        PieceFetcher(Patience.within(600.0)).fetch(source, tmp_path / "part")


def test_a_piece_that_there_was_no_room_for_is_an_error_and_not_a_file(
    trainer: PolicyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, write = offered(trainer, tmp_path / "weights"), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: write(file, data[:500], at))
    with pytest.raises(NotComingError, match="No space left"):
        PieceFetcher(SHORT).fetch(source, tmp_path / "part")


def test_a_publish_waits_for_a_silent_trainer_for_ten_seconds_at_most() -> None:
    limits = Patience.within(600.0)
    assert (limits.deadline_s, limits.whole_s) == (10.0, 600.0)
    assert limits.silence_s < limits.deadline_s, "there is time for a second try"
    assert Patience.within(8.0).deadline_s == 2.0


@pytest.mark.parametrize(
    "answer",
    [b"<html>", b"[]", b'{"claimed": 0, "others": 3}', b'{"claimed": 99, "others": []}', b"1e999"],
)
def test_an_answer_that_is_no_trainers_is_a_source_that_fails(
    trainer: PolicyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    source, get = offered(trainer, tmp_path / "weights"), weights_http.get

    def other_service(*asked: Any, **limits: Any) -> bytes:
        return answer if limits["body"] else get(*asked, **limits)

    monkeypatch.setattr(piece_fetcher, "get", other_service)
    with pytest.raises(NotComingError, match="does not answer as a trainer does"):
        PieceFetcher(SHORT).fetch(source, tmp_path / "part")
    monkeypatch.setattr(piece_fetcher, "get", lambda *asked, **limits: answer)
    with pytest.raises(NotComingError, match="sends no manifest"):
        PieceFetcher(SHORT).fetch(source, tmp_path / "part")


def test_a_steady_transfer_that_is_too_slow_says_how_much_came(
    trainer: PolicyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, get = offered(trainer, tmp_path / "weights", pieces=5), weights_http.get
    fetcher, came = PieceFetcher(Patience(whole_s=9000.0)), list[int]()

    def slow(url: str, path: str, key: str, size: int | None, *args: Any, **limits: Any) -> bytes:
        if size is not None and len(came) == 2:
            assert fetcher._job is not None
            fetcher._job.until = time.monotonic() - 1.0
            raise SourceError(url, "is too slow")
        came.extend([] if size is None else [size])
        return get(url, path, key, size, *args, **limits)

    monkeypatch.setattr(piece_fetcher, "get", slow)
    with pytest.raises(NotComingError, match=r"2 of 5 pieces came within 9e\+03 s$"):
        fetcher.fetch(source, tmp_path / "part")


# Claims


def test_a_claim_ends_also_while_its_host_still_fetches(
    trainer: PolicyServer, tmp_path: Path, clock: list[float]
) -> None:
    file = file_of(trainer, offered(trainer, tmp_path / "weights", pieces=2))
    assert share(trainer, file, "http://slow", "00", 0)[0] == 0
    for _ in range(4):
        assert share(trainer, file, "http://quick", "00", 0)[0] == -1
        clock[0] += weights_http.CLAIM_S / 4
        share(trainer, file, "http://slow", "20")  # it is still at it
    assert share(trainer, file, "http://quick", "00", 0)[0] == 0
    assert share(trainer, file, "http://third", "00", 0)[0] == -1, "now it is the other's"


def test_a_claim_that_failed_is_free_at_once(trainer: PolicyServer, tmp_path: Path) -> None:
    file = file_of(trainer, offered(trainer, tmp_path / "weights"))
    assert share(trainer, file, "http://a", "0", 0)[0] == 0
    share(trainer, file, "http://a", "0")
    assert share(trainer, file, "http://b", "0", 0)[0] == 0


class Counted(bytes):
    """Digits that must not be gone through."""

    def __iter__(self) -> Any:
        raise AssertionError("all pieces were looked at")


def test_only_the_wanted_pieces_are_looked_at(trainer: PolicyServer, tmp_path: Path) -> None:
    file = file_of(trainer, offered(trainer, tmp_path / "weights", pieces=4))
    file.hosts["http://other"] = time.monotonic(), Counted(b"0010")
    assert share(trainer, file, "http://here", "0000", 2, 3) == (3, {"http://other": "0010"})


# Other machines


def test_a_host_expires_and_one_that_leaves_is_forgotten(
    trainer: PolicyServer, tmp_path: Path, clock: list[float]
) -> None:
    file = file_of(trainer, offered(trainer, tmp_path / "weights"))
    share(trainer, file, "http://leaves", "1")
    share(trainer, file, "http://expires", "1")
    share(trainer, file, "http://leaves", "")
    assert share(trainer, file, "", "0")[1] == {"http://expires": "1"}
    clock[0] += weights_http._HOST_S
    assert share(trainer, file, "", "0")[1] == {}


def test_a_fetcher_that_leaves_takes_itself_off_the_list(
    trainer: PolicyServer, tmp_path: Path
) -> None:
    source = offered(trainer, tmp_path / "weights")
    fetcher = PieceFetcher(PATIENT, "127.0.0.1")
    fetcher.fetch(source, tmp_path / "part")
    assert fetcher.server is not None
    assert [*file_of(trainer, source).hosts] == [fetcher.server.url]
    fetcher.leave()
    assert not file_of(trainer, source).hosts
    fetcher.close()


def test_a_machine_that_comes_back_at_the_same_address_without_its_pieces_misleads_nobody(
    trainer: PolicyServer, tmp_path: Path
) -> None:
    source = offered(trainer, tmp_path / "weights", pieces=3)
    killed = PieceFetcher(PATIENT, "127.0.0.1")
    killed.fetch(source, tmp_path / "killed")
    assert killed.server is not None
    address = killed.server.url.removeprefix("http://")
    killed.close()  # it has not said that it leaves
    newer = offered(trainer, tmp_path / "newer", pieces=3)
    again = PieceFetcher(PATIENT, address)
    again.fetch(newer, tmp_path / "newer-part")
    latecomer, before = PieceFetcher(PATIENT), trainer.sent
    latecomer.fetch(source, tmp_path / "part")
    assert file_checksum(tmp_path / "part") == source.checksum
    assert trainer.sent == before + 3000
    again.fetch(source, tmp_path / "again")
    assert next(iter(file_of(trainer, source).hosts.values()))[1] == b"111"
    latecomer.fetch(source, tmp_path / "once-more")
    assert trainer.sent == before + 6000, "what it has by now is taken from it"
    again.close()


def test_a_port_that_another_run_has_costs_the_passing_on_and_not_the_fetch(
    trainer: PolicyServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = offered(trainer, tmp_path / "weights")
    fetcher = PieceFetcher(PATIENT, trainer.url.removeprefix("http://"))
    fetcher.fetch(source, tmp_path / "part")
    assert file_checksum(tmp_path / "part") == source.checksum
    assert "this host does not pass weights on" in caplog.text
    assert not file_of(trainer, source).hosts


def test_silent_machines_cost_two_tries_and_nothing_in_the_next_file(
    trainer: PolicyServer, tmp_path: Path
) -> None:
    machines = [Silent(f"127.0.0.{n}") for n in (2, 3, 4, 5)]
    # Two silences are longer than the deadline: the time for the trainer begins after them.
    fetcher = PieceFetcher(Patience(deadline_s=1.8, silence_s=1.0, piece_s=60.0))
    for number in range(2):
        source = offered(trainer, tmp_path / f"weights-{number}")
        for machine in machines:
            share(trainer, file_of(trainer, source), machine.url, "1")
        fetcher.fetch(source, tmp_path / f"part-{number}")
        assert file_checksum(tmp_path / f"part-{number}") == source.checksum
    assert sum(machine.asked for machine in machines) == 2
    for machine in machines:
        machine.close()


def test_machines_that_cost_time_are_away_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(patience, "time", SimpleNamespace(monotonic=lambda: now[0]))
    away = Away()
    away.note("http://10.0.0.1:4000")
    assert "http://10.0.0.1:5000" in away, "its next publish has another port"
    assert "http://10.0.0.9:4000" not in away
    away.note("http://10.0.0.2:4000")
    assert "http://10.0.0.9:4000" in away, "only the trainer is reached from here"
    away.reached = True
    assert "http://10.0.0.9:4000" not in away
    now[0] += 600.0
    assert "http://10.0.0.1:4000" not in away


def test_nothing_is_passed_on_unless_an_address_is_given(
    trainer: PolicyServer, tmp_path: Path
) -> None:
    fetcher = PieceFetcher(PATIENT)
    fetcher.fetch(offered(trainer, tmp_path / "weights"), tmp_path / "part")
    assert fetcher.server is None


def test_a_slow_machine_that_has_everything_keeps_a_latecomer_from_nothing(
    trainer: PolicyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not so slow that it is left: the trainer sends what it has no time for."""
    monkeypatch.setattr(weights_http, "CLAIM_S", 0.2)
    monkeypatch.setattr(piece_fetcher, "CLAIM_S", 0.2)
    source, slow = offered(trainer, tmp_path / "weights", pieces=5), PolicyServer("key")
    slow.offer(tmp_path / "weights")
    share(trainer, file_of(trainer, source), slow.url, "11111")
    get = weights_http.get

    def busy(url: str, path: str, key: str, size: int | None, *args: Any, **limits: Any) -> bytes:
        deadline = time.monotonic() + 60.0
        while url == slow.url and trainer.sent < 4000 and time.monotonic() < deadline:
            time.sleep(0.01)
        return get(url, path, key, size, *args, **limits)

    monkeypatch.setattr(piece_fetcher, "get", busy)
    fetcher = PieceFetcher(PATIENT)
    fetcher.fetch(source, tmp_path / "part")
    assert file_checksum(tmp_path / "part") == source.checksum
    assert (trainer.sent, slow.sent) == (4000, 1000)
    slow.close()


def test_a_trainer_whose_line_is_too_slow_for_a_piece_is_an_error_and_not_asked_for_ever(
    trainer: PolicyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = offered(trainer, tmp_path / "weights")

    def drips(self: Any, file: PieceFile, handle: int) -> None:
        self._head(206, 1000)
        for _ in range(1000):
            self.wfile.write(b"x")
            time.sleep(0.05)

    monkeypatch.setattr(weights_http._Handler, "_send", drips)
    monkeypatch.setattr(piece_fetcher, "_TRAINER_PIECE_S", 0.2)
    fetcher = PieceFetcher(PATIENT)
    with pytest.raises(NotComingError, match=r"is too slow: .* bytes came in time, 3 times"):
        fetcher.fetch(source, tmp_path / "part")
