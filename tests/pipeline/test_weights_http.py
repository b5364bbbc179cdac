"""Policies by HTTP: each piece leaves the trainer once, and whatever breaks on the way."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ludic.distributed import piece_fetcher, shared_folders, weights_http
from ludic.distributed.addresses import listening_address
from ludic.distributed.patience import Patience
from ludic.distributed.piece_fetcher import NotComingError
from ludic.distributed.weights_http import PolicyServer, SourceError, get
from ludic.errors import ConfigError, PublishError
from ludic.pipeline.policies import PolicyFolder, StoredPolicy, file_in_kernel
from ludic.pipeline.store import PipelineConfig
from ludic.pipeline.weights_fetcher import PolicyFetcher
from ludic.plumbing import files
from ludic.plumbing.files import file_checksum
from tests.pipeline.test_batch_source import acting, announced, until
from tests.pipeline.world import make_engine, make_source

pytestmark = pytest.mark.redis

KEY = "the run's key"
PIECE = 1 << 16  # as small as that here, so that hashing takes no time
SIZE = 3 * PIECE + 12345
PATIENT = Patience(deadline_s=60.0, silence_s=20.0, piece_s=60.0)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (files, weights_http, piece_fetcher):
        monkeypatch.setattr(module, "PIECE", PIECE)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "policy"
    path.write_bytes(os.urandom(SIZE))
    return path


@pytest.fixture
def trainer() -> Iterator[PolicyServer]:
    server = PolicyServer(KEY)
    yield server
    server.close()


@pytest.fixture
def policy(weights: Path, trainer: PolicyServer) -> StoredPolicy:
    return StoredPolicy(8, 1, 7, "/on/the/trainer's/host", **trainer.offer(weights))


@pytest.fixture
def host(config: PipelineConfig, tmp_path: Path) -> Iterator[Callable[..., PolicyFetcher]]:
    """Makes hosts, each with a cache of its own."""
    fetchers: list[PolicyFetcher] = []

    def make(name: str, patience: Patience = PATIENT, **options: object) -> PolicyFetcher:
        fetcher = PolicyFetcher(config, tmp_path / name, patience=patience, **options)  # type: ignore[arg-type]
        fetchers.append(fetcher)
        return fetcher

    yield make
    for fetcher in fetchers:
        fetcher.close()


class Broken:
    """A host of which the trainer believes that it has the whole policy. It has its manifest,
    answers every piece in its own way, and counts them."""

    def __init__(
        self,
        trainer: PolicyServer,
        policy: StoredPolicy,
        answer: Callable[[socket.socket, int], None],
    ) -> None:
        self.asked = 0
        self._answer = answer
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        with trainer.opened(policy.checksum) as opened:
            assert opened is not None
            self._manifest = opened[0].manifest()
            says = {"address": self.url, "digits": "1111", "left_out": [], "wanted": []}
            trainer.share(opened[0], says)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                link, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._one, args=(link,), daemon=True).start()

    def _one(self, link: socket.socket) -> None:
        with link:
            request = link.recv(65536).decode()
            if "/pieces " in request:
                link.sendall(head(len(self._manifest)) + self._manifest)
                return
            self.asked += 1
            first, last = request.split("bytes=")[1].split("\r\n")[0].split("-")
            self._answer(link, int(last) - int(first) + 1)

    def close(self) -> None:
        self._socket.close()


def head(size: int) -> bytes:
    return f"HTTP/1.1 206 part\r\nContent-Length: {size}\r\n\r\n".encode()


def wrong_bytes(link: socket.socket, size: int) -> None:
    link.sendall(head(size) + bytes(size))


def dies_halfway(link: socket.socket, size: int) -> None:
    link.sendall(head(size) + bytes(size // 2))


def test_a_policy_arrives_as_it_is(
    host: Callable[..., PolicyFetcher], policy: StoredPolicy, weights: Path
) -> None:
    here = host("a").fetch(policy)
    assert Path(here.path).read_bytes() == weights.read_bytes()
    assert (here.serial, here.checksum) == (policy.serial, policy.checksum)


def test_a_path_that_this_host_can_open_is_not_fetched(
    host: Callable[..., PolicyFetcher], policy: StoredPolicy, weights: Path, trainer: PolicyServer
) -> None:
    here = host("a").fetch(replace(policy, path=str(weights)))
    assert (here.path, here.file) == (str(weights), file_in_kernel(weights))
    known = replace(here, checksum="")
    assert host("a").fetch(known) == known
    assert trainer.sent == 0


def test_another_file_at_the_trainers_path_is_not_taken_for_the_policy(
    host: Callable[..., PolicyFetcher], policy: StoredPolicy, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"another run's policy")
    here = host("a").fetch(replace(policy, path=str(other)))
    assert file_checksum(Path(here.path)) == policy.checksum
    gone = host("a").fetch(replace(policy, path=str(other), checksum="0" * 64))
    assert not Path(gone.path).exists()


def test_each_piece_leaves_the_trainer_once_however_many_hosts_there_are(
    host: Callable[..., PolicyFetcher], policy: StoredPolicy, weights: Path, trainer: PolicyServer
) -> None:
    hosts = [host(name) for name in "abcd"]
    with ThreadPoolExecutor(4) as threads:
        arrived = list(threads.map(lambda one: one.fetch(policy), hosts))
    assert all(file_checksum(Path(here.path)) == policy.checksum for here in arrived)
    assert trainer.sent == SIZE
    servers = [one.pieces.server for one in hosts]
    assert sum(server.sent for server in servers if server is not None) == 3 * SIZE


def test_a_host_that_ends_takes_itself_off_the_trainers_list(
    host: Callable[..., PolicyFetcher], policy: StoredPolicy, trainer: PolicyServer
) -> None:
    one = host("a")
    one.fetch(policy)
    with trainer.opened(policy.checksum) as opened:
        assert opened is not None
        assert len(opened[0].hosts) == 1
        one.close()
        assert not opened[0].hosts


def test_processes_of_one_host_fetch_once(
    host: Callable[..., PolicyFetcher], policy: StoredPolicy, trainer: PolicyServer
) -> None:
    processes = [host("same") for _ in range(3)]
    with ThreadPoolExecutor(3) as threads:
        arrived = {here.path for here in threads.map(lambda one: one.fetch(policy), processes)}
    assert len(arrived) == 1
    assert trainer.sent == SIZE


@pytest.mark.parametrize("answer", [wrong_bytes, dies_halfway])
def test_a_host_that_sends_wrong_bytes_or_dies_is_left_for_the_trainer(
    host: Callable[..., PolicyFetcher],
    policy: StoredPolicy,
    trainer: PolicyServer,
    answer: Callable[[socket.socket, int], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with closing(Broken(trainer, policy, answer)) as source:
        here = host("a").fetch(policy)
    assert file_checksum(Path(here.path)) == policy.checksum
    assert f"nothing more of policy 7 is taken from {source.url}" in caplog.text
    assert source.asked == 1


def test_a_host_that_is_too_slow_is_left_for_the_trainer(
    host: Callable[..., PolicyFetcher], policy: StoredPolicy, trainer: PolicyServer
) -> None:
    ended = threading.Event()

    def drips(link: socket.socket, size: int) -> None:
        link.sendall(head(size))
        with suppress(OSError):  # it is left
            while not ended.wait(0.05):
                link.sendall(b"x")

    with closing(Broken(trainer, policy, drips)) as source:
        here = host("a", Patience(60.0, 20.0, piece_s=0.5)).fetch(policy)
        ended.set()
    assert file_checksum(Path(here.path)) == policy.checksum
    assert source.asked == 1


def test_a_trainer_that_sends_wrong_bytes_is_an_error_that_names_it_and_the_version(
    host: Callable[..., PolicyFetcher], policy: StoredPolicy, weights: Path, trainer: PolicyServer
) -> None:
    with trainer.opened(policy.checksum) as opened:
        assert opened is not None
        opened[0].manifest()
    weights.write_bytes(bytes(SIZE))  # the same file, with other bytes than the manifest says
    with pytest.raises(PublishError, match=r"policy 7 from http://127.* wrong checksum, 3 times"):
        host("a").fetch(policy)


def test_another_key_is_refused_at_once(
    host: Callable[..., PolicyFetcher], policy: StoredPolicy, trainer: PolicyServer
) -> None:
    with pytest.raises(NotComingError, match=r"policy 7 .*refuses the run's key"):
        host("a").fetch(replace(policy, key="another"))
    assert trainer.sent == 0


def test_a_cache_that_cannot_be_written_is_an_error_that_names_the_cause_and_may_be_mended(
    host: Callable[..., PolicyFetcher], policy: StoredPolicy, tmp_path: Path
) -> None:
    fetcher = host("missing/cache")
    with pytest.raises(NotComingError, match=r"policy 7 from http://127.* into .*No such file"):
        fetcher.fetch(policy)
    (tmp_path / "missing").mkdir()
    fetcher.fetch(policy)


def test_a_policy_that_has_gone_comes_back_as_it_was(
    host: Callable[..., PolicyFetcher], policy: StoredPolicy
) -> None:
    assert host("a").fetch(replace(policy, checksum="0" * 64)).path == policy.path


def test_a_file_that_is_removed_while_it_is_fetched_still_arrives(
    host: Callable[..., PolicyFetcher], trainer: PolicyServer, weights: Path, tmp_path: Path
) -> None:
    old = tmp_path / "old"
    old.write_bytes(weights.read_bytes())
    policy = StoredPolicy(8, 1, 7, "/elsewhere", **trainer.offer(old, file_checksum(old)))
    old.unlink()
    for number in range(3):  # newer ones take its place meanwhile
        newer = tmp_path / f"newer-{number}"
        newer.write_bytes(b"newer")
        trainer.offer(newer, str(number))
    here = host("a").fetch(policy)
    assert file_checksum(Path(here.path)) == policy.checksum


def test_a_line_that_is_cut_for_a_while_costs_nothing_but_time(
    host: Callable[..., PolicyFetcher], policy: StoredPolicy, weights: Path
) -> None:
    fetcher = host("a")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    away = replace(policy, url=f"http://127.0.0.1:{port}")
    with ThreadPoolExecutor(1) as threads:
        arriving = threads.submit(fetcher.fetch, away)
        with pytest.raises(TimeoutError):
            arriving.result(timeout=0.5)  # nobody is there
        mended = PolicyServer(KEY, port=port)
        mended.offer(weights, policy.checksum)
        try:
            assert file_checksum(Path(arriving.result(timeout=60).path)) == policy.checksum
        finally:
            mended.close()


def test_a_source_that_stays_away_is_an_error_that_names_it(
    host: Callable[..., PolicyFetcher], policy: StoredPolicy, trainer: PolicyServer
) -> None:
    trainer.close()
    short = Patience(deadline_s=0.3, silence_s=0.3, piece_s=0.3)
    with pytest.raises(NotComingError, match=rf"policy 7 from {policy.url}.*policy_address"):
        host("a", short).fetch(policy)


def test_a_newer_policy_ends_a_fetch_that_does_not_get_on(
    host: Callable[..., PolicyFetcher], policy: StoredPolicy, trainer: PolicyServer
) -> None:
    trainer.close()
    fetcher = host("a", Patience(deadline_s=60.0, silence_s=0.1, piece_s=60.0))
    with ThreadPoolExecutor(1) as threads:
        arriving = threads.submit(fetcher.fetch, policy)
        while not arriving.done():
            fetcher.announced(policy.serial + 1)
    with pytest.raises(NotComingError, match="a newer one is announced"):
        arriving.result()


def test_what_a_killed_process_left_is_not_fetched_again_and_another_runs_cache_goes(
    config: PipelineConfig,
    policy: StoredPolicy,
    weights: Path,
    trainer: PolicyServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_folders, "shared_folder", lambda: tmp_path)
    fetcher = PolicyFetcher(config, patience=PATIENT)
    own, others = (tmp_path / f"ludic-publish-{name}" for name in (fetcher._cache_name, "others"))
    for cache in (own, others):
        cache.mkdir()
        (cache / "lock").touch()
    part = bytearray(weights.read_bytes())
    part[:5] = b"wrong"
    (own / f"{policy.checksum}.part").write_bytes(part)
    here = fetcher.fetch(policy)
    assert file_checksum(Path(here.path)) == policy.checksum
    assert trainer.sent == PIECE
    assert not others.exists()
    fetcher.close()
    assert not own.exists()


def test_the_newest_policies_stay_in_the_cache_and_the_last_process_removes_it(
    host: Callable[..., PolicyFetcher], trainer: PolicyServer, tmp_path: Path
) -> None:
    first, second = host("a"), host("a")
    for number in range(3):
        path = tmp_path / f"policy-{number}"
        path.write_bytes(str(number).encode())
        policy = StoredPolicy(number, 1, number, "/elsewhere", **trainer.offer(path))
        first.fetch(policy)
    assert len(list((tmp_path / "a").glob("*.safetensors"))) == 2
    second.fetch(policy)
    first.close()
    assert (tmp_path / "a").is_dir()
    second.close()
    assert not (tmp_path / "a").exists()


def test_a_request_for_another_path_or_range_gets_nothing(policy: StoredPolicy) -> None:
    for path, size, start, status in (
        ("/../etc/passwd", 10, 0, 404),
        (f"/{policy.checksum}", 10, SIZE, 416),
        (f"/{policy.checksum}", SIZE + 1, 0, 416),
    ):
        with pytest.raises(SourceError) as refused:
            get(policy.url, path, KEY, size, start, silence_s=20.0, until=float("inf"))
        assert refused.value.status == status


@pytest.mark.parametrize(
    ("key", "body", "why"),
    [
        ("another", b"{}", "status 401"),
        (KEY, bytes((1 << 20) + 1), "http"),  # refused, or cut off while it is sent
        (KEY, b"no JSON", "http"),  # it hangs up
        (KEY, b'{"address": "http://x"}', "http"),
    ],
)
def test_what_is_no_host_s_word_gets_nothing_and_the_next_is_heard(
    host: Callable[..., PolicyFetcher], policy: StoredPolicy, key: str, body: bytes, why: str
) -> None:
    asked = (policy.url, f"/{policy.checksum}/pieces", key, None)
    with pytest.raises(SourceError, match=why):
        get(*asked, silence_s=20.0, until=float("inf"), body=body)
    assert file_checksum(Path(host("a").fetch(policy).path)) == policy.checksum


@pytest.mark.parametrize(
    ("setting", "address"),
    [
        ("10.0.0.5", ("10.0.0.5", 0)),
        ("10.0.0.5:7400", ("10.0.0.5", 7400)),
        ("::1", ("::1", 0)),
        ("[::1]:7400", ("::1", 7400)),
        ("auto", ("127.0.0.1", 0)),
        ("auto:7400", ("127.0.0.1", 7400)),
    ],
)
def test_an_address_is_read_with_or_without_a_port(setting: str, address: tuple[str, int]) -> None:
    assert listening_address(setting, "redis://127.0.0.1:6379/0") == address


def test_an_address_that_names_no_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match='use "auto"'):
        listening_address("0.0.0.0", "redis://127.0.0.1:6379/0")


async def test_an_actor_goes_on_while_a_policy_is_on_its_way_and_takes_it_when_it_has_come(
    config: PipelineConfig, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_folders, "shared_folder", lambda: tmp_path)
    facts = PolicyFolder(tmp_path).write([("a", torch.ones(2))], attempt=1, version=1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    engine, client = make_engine()
    taken: list[Mapping[str, Any]] = []
    sync = client.sync_weights

    async def noted(params: Mapping[str, Any], **options: Any) -> str:
        taken.append(params)
        return await sync(params, **options)

    monkeypatch.setattr(client, "sync_weights", noted)
    source = await announced(make_source(config, stale="drop", max_lag=4, in_order=False))
    away = {**facts, "path": "/elsewhere", "url": f"http://127.0.0.1:{port}", "key": KEY}
    async with acting(config, engine=engine, client=client):
        await until(lambda: len(taken) == 1)
        assert (await source.next_batch()).items
        await asyncio.to_thread(source.lease.announce, 1, **away)
        assert (await source.next_batch()).items  # of units that were asked for before
        assert len(taken) == 1, "the policy before it serves on"
        server = PolicyServer(KEY, port=port)
        server.offer(Path(facts["path"]), facts["checksum"])
        await until(lambda: len(taken) == 2)
        server.close()
    await source.close()
    assert torch.equal(taken[1]["a"], torch.ones(2))
