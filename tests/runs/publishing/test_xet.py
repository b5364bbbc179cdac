"""Pushing as the client does by itself: large files over Xet, by its own native part."""

from __future__ import annotations

import hashlib
import json
import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.runs.publishing import fake_hub
from tests.runs.publishing.fake_hub import FakeHub
from tests.runs.publishing.test_push import FILES, command

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

XET = {
    ("GET", "xet_token"): rf"/api/models/{fake_hub.REPO}/xet-write-token/(?P<rev>[^/]+)",
    ("GET", "chunk"): r"/v1/chunks/default/(?P<oid>[0-9a-f]{64})",
    ("POST", "grant"): r"/v1/xorb-grants/default/(?P<oid>[0-9a-f]{64})",
    ("POST", "shard"): r"/v2/shards",
    ("POST", "telemetry"): r"/v1/telemetry",
}


class Store:
    """A stand-in for the store of large files: it has every block already, and so is sent none."""

    def __init__(self, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hub, self.shards, self.plain = hub, 0, fake_hub.Handler.answer
        store = self

        def answer(handler: Any) -> None:
            path = urlsplit(handler.path).path
            for (method, name), pattern in XET.items():
                if method == handler.command and re.fullmatch(pattern, path):
                    hub.asked.append(name)
                    store.answer(handler, name)
                    return
            store.plain(handler)

        for method in ("GET", "POST"):
            monkeypatch.setattr(fake_hub.Handler, f"do_{method}", answer)
        commit = hub.commit

        def with_shards(said: bytes, repo: str, rev: str) -> Any:
            """Takes large files whose shards have arrived, without their bytes."""
            for line in map(json.loads, said.splitlines()):
                if line["key"] == "lfsFile" and self.shards:
                    hub.large[line["value"]["oid"]] = b"%d bytes" % line["value"]["size"]
            return commit(said, repo, rev)

        monkeypatch.setattr(hub, "commit", with_shards)

    def answer(self, handler: Any, name: str) -> None:
        body = handler.body()
        faults = self.hub.faults.get(name, [])
        if faults:
            handler.send(faults.pop(0), {})
        elif name == "xet_token":
            assert handler.headers["Authorization"] == f"Bearer {fake_hub.TOKEN}"
            until = int(time.time()) + 3600
            handler.send(200, {"casUrl": self.hub.url, "exp": until, "accessToken": "short-lived"})
        elif name == "chunk":
            handler.send(404, {})
        elif name == "shard":
            assert body
            self.shards += 1
            handler.send(200, {"type": "result", "result": 1})
        else:
            handler.send(200, {"was_inserted": True})


def test_a_push_over_xet_that_fails_leaves_nothing_and_the_next_is_whole(
    hub: FakeHub, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Store(hub, monkeypatch)
    push = ("-m", "ludic", "push", str(run_folder), "me/keys", "--revision", "v1")
    hub.faults["shard"] = [403] * 9
    refused = command(hub, tmp_path, *push, xet=True)
    assert refused.returncode == 2, refused.stderr
    assert "nothing was published" in refused.stderr
    assert hub.names("me/keys") == {"main": []}
    hub.faults.clear()
    done = command(hub, tmp_path, *push, xet=True)
    assert done.returncode == 0, done.stderr
    assert hub.names("me/keys") == {"main": [], "v1": FILES}
    assert {"xet_token", "shard"} <= set(hub.asked)
    assert not {"batch", "store"} & set(hub.asked)
    weights = next(run_folder.glob("checkpoints/rl/step-*/model/model.safetensors")).read_bytes()
    assert hub.large == {hashlib.sha256(weights).hexdigest(): b"%d bytes" % len(weights)}
    assert fake_hub.TOKEN not in done.stdout + done.stderr + refused.stdout + refused.stderr
