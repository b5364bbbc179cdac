"""Checksums of files, in pieces, and files that are replaced as a whole."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest

from ludic.plumbing import files
from ludic.plumbing.files import file_checksum, replacing


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIECE", 64)
    monkeypatch.setattr(files, "_READ", 16)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 1000])
def test_it_is_the_hash_of_the_pieces_hashes(tmp_path: Path, size: int) -> None:
    data = bytes(i * 7 % 251 for i in range(size))
    (tmp_path / "file").write_bytes(data)
    pieces = [sha256(data[i : i + 64]).digest() for i in range(0, size, 64)]
    assert file_checksum(tmp_path / "file") == sha256(b"".join(pieces)).hexdigest()


def test_any_bit_and_any_order_of_pieces_counts(tmp_path: Path) -> None:
    data = bytes(i % 251 for i in range(300))
    others = [data[64:128] + data[:64] + data[128:], data[:-1], data + b"\0"]
    others += [data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :] for i in range(0, 300, 13)]
    seen = set()
    for number, content in enumerate([data, *others]):
        file = tmp_path / str(number)
        file.write_bytes(content)
        seen.add(file_checksum(file))
    assert len(seen) == 1 + len(others)


def test_a_file_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        file_checksum(tmp_path / "nothing")


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_when_the_block_ends(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_text("old")
    with replacing(path, durable=durable) as temporary:
        assert temporary.suffix == path.suffix
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("durable", [False, True])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, durable: bool
) -> None:
    path = tmp_path / "latest"
    path.write_text("old")

    def write() -> None:
        with replacing(path, durable=durable) as temporary:
            temporary.write_text("ne")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
