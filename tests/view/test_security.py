"""Who is answered, and what no request can reach."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.view.made import make_run
from tests.view.serving import Served, serving

SECRET = "this must not leave its folder"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("shown")
    make_run(folder / "runs" / "first")
    (folder / "secret.json").write_text(json.dumps({"name": SECRET, "episodes": []}))
    with serving(folder / "runs") as found:
        yield found


def test_the_token_comes_once_in_the_address_and_stays_in_a_cookie(served: Served) -> None:
    status, headers, _ = served.get("/?token=a-token-for-tests&x=1", token=False)
    assert (status, headers["location"]) == (303, "/?x=1")
    cookie = headers["set-cookie"]
    assert cookie.startswith(f"ludic-view-{served.port}=")
    assert "HttpOnly" in cookie
    assert "SameSite=lax" in cookie
    assert served.get("/")[0] == 200


@pytest.mark.parametrize("path", ["/", "/main.js", "/api/runs", "/export/rollout", "/?token=wrong"])
def test_without_the_token_nothing_is_answered(served: Served, path: str) -> None:
    status, _, body = served.get(path, token=False)
    assert status == 403
    assert b"token" in body


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "[", "evil:80"])
def test_a_foreign_host_is_refused(served: Served, host: str) -> None:
    assert served.get("/api/runs", Host=host)[0] in (400, 403)


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "127.0.0.1:99999"},
        {"Host": "127.0.0.1:abc"},
        {"Host": "127.0.0.1:-1"},
        {"Host": "[::1"},
        {"Origin": "http://[::1"},
        {"Origin": "http://127.0.0.1:abc"},
        {"Origin": "http://[127.0.0.1]"},
    ],
)
@pytest.mark.parametrize("token", [True, False])
def test_headers_that_are_not_well_formed_are_refused(
    served: Served, headers: dict[str, str], token: bool
) -> None:
    for path in ("/api/runs", "/?token=a-token-for-tests"):
        status, _, body = served.get(path, token=token, **headers)
        assert status in (400, 403), body


def test_other_names_of_this_machine_are_fine(served: Served) -> None:
    for host in ("localhost", "127.0.0.1", "[::1]"):
        assert served.get("/api/runs", Host=f"{host}:{served.port}")[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "cors"},
    ],
)
def test_a_page_of_another_site_is_refused(served: Served, headers: dict[str, Any]) -> None:
    assert served.get("/api/runs", **headers)[0] == 403


def test_a_page_of_this_server_may_ask(served: Served) -> None:
    assert served.get("/api/runs", Origin=f"http://127.0.0.1:{served.port}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_only_reading_is_possible(served: Served, method: str) -> None:
    assert served.get("/api/runs", method=method)[0] == 405


@pytest.mark.parametrize("path", ["/", "/main.js", "/api/runs", "/api/run?run=none", "/nothing"])
def test_every_answer_has_a_strict_policy(served: Served, path: str) -> None:
    _, headers, _ = served.get(path)
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


def test_the_pages_have_no_script_or_style_of_their_own(served: Served) -> None:
    _, _, body = served.get("/")
    assert b"<style" not in body
    assert b"style=" not in body
    assert b"<script>" not in body
    assert b"http://" not in body
    assert b"https://" not in body


ESCAPES = [
    "../secret.json",
    "../../etc/passwd",
    "/etc/passwd",
    "..%2fsecret.json",
    "%2e%2e/secret.json",
    "..\\secret.json",
    "first/../../secret.json",
    "....//secret.json",
    "\u2024\u2024/secret.json",
    "first\x00",
]


@pytest.mark.parametrize("path", ESCAPES)
def test_no_path_leads_out_of_the_folders(served: Served, path: str) -> None:
    tried = [
        f"/{quote(path, safe='/%.')}",
        f"/pages/{quote(path, safe='/%.')}",
        f"/api/run?run={quote(path, safe='')}",
        f"/api/rollout?run=first&id={quote(path, safe='')}",
        f"/api/group?run=first&id={quote(path, safe='')}",
        f"/api/compare?a_run=first&a={quote(path, safe='')}&b_run=first&b=before",
        f"/export/rollout?run={quote(path, safe='')}&id=x",
    ]
    for each in tried:
        status, _, body = served.get(each)
        assert status in (400, 404), each
        assert SECRET.encode() not in body
        assert b"root:" not in body


def test_links_that_lead_outside_are_not_read(tmp_path: Path, serve: Callable[..., Served]) -> None:
    outside = make_run(tmp_path / "outside")
    root = tmp_path / "runs"
    run = make_run(root / "first")
    (tmp_path / "secret.json").write_text(json.dumps({"name": SECRET, "episodes": []}))
    (run / "eval" / "stolen.json").symlink_to(tmp_path / "secret.json")
    (run / "summary.json").symlink_to(tmp_path / "secret.json")
    (run / "rollouts" / "stolen.jsonl.zst").symlink_to(outside / "rollouts" / "train.jsonl.zst")
    (root / "linked").symlink_to(outside)
    (run / ".view.sqlite").symlink_to(tmp_path / "elsewhere.sqlite")
    served = serve(root)
    listed = served.ask("runs")
    assert [card["name"] for card in listed["runs"]] == ["first"]
    assert any("linked" in problem for problem in listed["problems"])
    assert any("summary.json leads outside" in p for p in listed["runs"][0]["problems"])
    served.indexed("first", 16)
    state = served.ask("state", run="first")
    assert [note["file"] for note in state["notes"]] == ["stolen.jsonl.zst"]
    assert served.ask("rollouts", run="first")["total"] == 16
    status, _, body = served.get("/api/compare?a_run=first&a=stolen&b_run=first&b=before")
    assert status == 404
    assert SECRET.encode() not in body
    assert not (tmp_path / "elsewhere.sqlite").exists()


def test_a_redirect_stays_on_this_server(served: Served) -> None:
    _, headers, _ = served.get("//evil.example/?token=a-token-for-tests", token=False)
    assert headers["location"].startswith("/evil.example")
