"""A small hub on loopback: repositories with branches and commits, large files apart from them, and
the routes by which the real client uploads and downloads. It can be told to fail."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_a-secret-that-nobody-prints"
REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
ROUTES = {
    ("POST", "create"): r"/api/repos/create",
    ("GET", "info"): rf"/api/models/{REPO}",
    ("GET", "revision"): rf"/api/models/{REPO}/revision/(?P<rev>[^/]+)",
    ("GET", "refs"): rf"/api/models/{REPO}/refs",
    ("POST", "branch"): rf"/api/models/{REPO}/branch/(?P<rev>[^/]+)",
    ("DELETE", "unbranch"): rf"/api/models/{REPO}/branch/(?P<rev>[^/]+)",
    ("POST", "validate"): r"/api/validate-yaml",
    ("POST", "preupload"): rf"/api/models/{REPO}/preupload/(?P<rev>[^/]+)",
    ("POST", "batch"): rf"/{REPO}\.git/info/lfs/objects/batch",
    ("PUT", "store"): r"/large/(?P<oid>[0-9a-f]{64})",
    ("POST", "verify"): r"/large/(?P<oid>[0-9a-f]{64})/verify",
    ("POST", "commit"): rf"/api/models/{REPO}/commit/(?P<rev>[^/]+)",
    ("GET", "tree"): rf"/api/models/{REPO}/tree/(?P<rev>[^/]+)(?:/(?P<file>.+))?",
    ("GET", "harnesses"): r"/api/agent-harnesses",
    ("HEAD", "resolve"): rf"/{REPO}/resolve/(?P<rev>[^/]+)/(?P<file>.+)",
    ("GET", "resolve"): rf"/{REPO}/resolve/(?P<rev>[^/]+)/(?P<file>.+)",
}
LARGE = (".safetensors",)


class Refused(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, said: str, code: str = "", **more: str) -> None:
        super().__init__(said)
        self.status, self.code, self.said = status, code, {"error": said, **more}


@dataclass
class Repo:
    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def at(self, revision: str) -> str:
        found = self.branches.get(revision) or self.tags.get(revision)
        found = found or (revision if revision in self.commits else None)
        if found is None:
            raise Refused(404, f"no revision {revision}", "RevisionNotFound")
        return found

    def commit(self, branch: str, files: dict[str, bytes]) -> str:
        told = [branch, str(len(self.commits)), *files]
        oid = hashlib.sha1("/".join(told).encode()).hexdigest()
        self.commits[oid], self.branches[branch] = files, oid
        return oid


@dataclass
class FakeHub:
    """`faults` are taken in order, each by the next request of its route: a status, `cut` (no
    answer), `half` (the connection ends in the middle of the body), or `lost` (done, no answer)."""

    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    faults: dict[str, list[int | str]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock)

    def names(self, repo: str) -> dict[str, list[str]]:
        """The files of each branch, without the hub's own."""
        found = self.repos[repo]
        return {
            branch: sorted(found.commits[oid].keys() - {".gitattributes"})
            for branch, oid in found.branches.items()
        }

    def files(self, repo: str, revision: str) -> dict[str, bytes]:
        found = self.repos[repo]
        return found.commits[found.at(revision)]

    def repo(self, name: str) -> Repo:
        if name not in self.repos:
            raise Refused(404, "no such repository", "RepoNotFound")
        return self.repos[name]

    # What each route does

    def create(self, said: dict[str, Any], **_: str) -> Any:
        name = f"{said['organization']}/{said['name']}"
        assert said["type"] == "model" if "type" in said else True
        if name in self.repos:
            raise Refused(409, "You already created this model repo", url=f"{self.url}/{name}")
        made = self.repos[name] = Repo(said.get("visibility") == "private")
        made.commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"})
        return {"url": f"{self.url}/{name}", "name": name}

    def info(self, said: Any, repo: str) -> Any:
        return self.revision(said, repo, "main")

    def revision(self, said: Any, repo: str, rev: str) -> Any:
        found = self.repo(repo)
        oid = found.at(rev)
        files = [{"rfilename": name} for name in found.commits[oid]]
        return {"id": repo, "sha": oid, "private": found.private, "siblings": files, "tags": []}

    def refs(self, said: Any, repo: str) -> Any:
        found = self.repo(repo)

        def listed(refs: dict[str, str], kind: str) -> list[dict[str, str]]:
            return [
                {"name": n, "ref": f"refs/{kind}/{n}", "targetCommit": c} for n, c in refs.items()
            ]

        return {
            "branches": listed(found.branches, "heads"),
            "tags": listed(found.tags, "tags"),
            "converts": [],
        }

    def branch(self, said: dict[str, Any], repo: str, rev: str) -> Any:
        found = self.repo(repo)
        if rev in found.branches or rev in found.tags:
            raise Refused(409, "Reference already exists")
        found.branches[rev] = found.at(said.get("startingPoint", "main"))
        return {}

    def unbranch(self, said: Any, repo: str, rev: str) -> Any:
        del self.repo(repo).branches[rev]
        return {}

    def validate(self, said: dict[str, Any]) -> Any:
        head = said["content"].split("---\n")
        if said["repoType"] != "model" or len(head) < 3 or head[0]:
            raise Refused(400, "no metadata")
        return {"errors": [], "warnings": []}

    def preupload(self, said: dict[str, Any], repo: str, rev: str) -> Any:
        found = self.repo(repo)
        there = found.commits[found.at(rev)]
        files = []
        for file in said["files"]:
            name = file["path"]
            mode = "lfs" if name.endswith(LARGE) else "regular"
            oid = {"oid": _oid(name, there[name])} if name in there else {}
            files.append({"path": name, "uploadMode": mode, "shouldIgnore": False, **oid})
        return {"files": files}

    def batch(self, said: dict[str, Any], repo: str) -> Any:
        self.repo(repo)
        assert (said["operation"], said["hash_algo"]) == ("upload", "sha256")
        objects = []
        for asked in said["objects"]:
            oid = asked["oid"]
            actions = {
                "upload": {"href": f"{self.url}/large/{oid}"},
                "verify": {"href": f"{self.url}/large/{oid}/verify"},
            }
            objects.append({**asked, **({} if oid in self.large else {"actions": actions})})
        return {"transfer": "basic", "objects": objects}

    def store(self, said: bytes, oid: str) -> Any:
        if hashlib.sha256(said).hexdigest() != oid:
            raise Refused(400, "other bytes than their name says")
        self.large[oid] = said
        return {}

    def verify(self, said: dict[str, Any], oid: str) -> Any:
        if len(self.large.get(oid, b"")) != said["size"] or said["oid"] != oid:
            raise Refused(404, "not stored")
        return {}

    def commit(self, said: bytes, repo: str, rev: str) -> Any:
        found = self.repo(repo)
        if rev not in found.branches:
            raise Refused(404, f"no branch {rev}", "RevisionNotFound")
        lines = [json.loads(line) for line in said.splitlines()]
        header, rest = lines[0]["value"], lines[1:]
        assert lines[0]["key"] == "header"
        if header.get("parentCommit", found.branches[rev]) != found.branches[rev]:
            raise Refused(412, "A commit has happened since. Please refresh and try again.")
        files = dict(found.commits[found.branches[rev]])
        for line in rest:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.large:
                    raise Refused(400, "a large file was never stored")
                files[value["path"]] = self.large[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
            else:
                raise Refused(400, f"what is {line['key']}?")
        oid = found.commit(rev, files)
        return {"commitUrl": f"{self.url}/{repo}/commit/{oid}", "commitOid": oid}

    def tree(self, said: Any, repo: str, rev: str, file: str = "") -> Any:
        if file:
            raise Refused(404, f"no folder {file}", "EntryNotFound")
        files = self.files(repo, rev).items()
        return [
            {"type": "file", "path": name, "size": len(content), "oid": _oid(name, content)}
            for name, content in files
        ]

    def harnesses(self, said: Any) -> Any:
        """The client asks this now and then, for its own purposes."""
        return {}

    def resolve(self, said: Any, repo: str, rev: str, file: str) -> Any:
        found = self.repo(repo)
        oid = found.at(rev)
        if file not in found.commits[oid]:
            raise Refused(404, f"no {file}", "EntryNotFound")
        return oid, found.commits[oid][file]


def _oid(name: str, content: bytes) -> str:
    """As the hub names content: large files by their SHA-256, others as git does."""
    if name.endswith(LARGE):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body is sent after its head, and would wait for an answer

    def log_message(self, *_: Any) -> None:
        """Says nothing."""

    def answer(self) -> None:
        path = urlsplit(self.path).path
        for (method, name), pattern in ROUTES.items():
            match = re.fullmatch(pattern, path)
            if method == self.command and match is not None:
                with self.hub.lock:
                    self.hub.asked.append(name)
                    faults = self.hub.faults.get(name, [])
                    fault = faults.pop(0) if faults else None
                self.route(name, {k: unquote(v) for k, v in match.groupdict().items() if v}, fault)
                return
        self.hub.unknown.append(f"{self.command} {path}")
        self.send(404, {"error": "unknown route"}, {"X-Error-Code": "RepoNotFound"})

    def route(self, name: str, given: dict[str, str], fault: int | str | None) -> None:
        if fault == "half":
            self.rfile.read(int(self.headers.get("Content-Length", 2)) // 2)
        if fault in ("cut", "half"):
            self.close_connection = True
            self.connection.close()
            return
        body = self.body()
        if isinstance(fault, int):
            self.send(fault, {"error": "as the test wants it"})
            return
        reads = self.command in ("GET", "HEAD")
        if name != "store" and not reads and self.headers["Authorization"] != f"Bearer {TOKEN}":
            self.send(401, {"error": "Invalid username or password."})
            return
        try:
            said = body if name in ("store", "commit") else json.loads(body or b"{}")
            with self.hub.lock:
                found = getattr(self.hub, name)(said, **given)
        except Refused as refused:
            code = {"X-Error-Code": refused.code} if refused.code else {}
            self.send(refused.status, refused.said, code)
            return
        if fault == "lost":
            self.close_connection = True
            self.connection.close()
        elif name == "resolve":
            commit, content = found
            etag = _oid(given["file"], content)
            self.send(200, content, {"X-Repo-Commit": commit, "ETag": f'"{etag}"'})
        else:
            self.send(200, found)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def send(self, status: int, said: Any, headers: dict[str, str] | None = None) -> None:
        content = said if isinstance(said, bytes) else json.dumps(said).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = answer


@contextmanager
def running_hub() -> Iterator[FakeHub]:
    """A hub on a free port of loopback."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=30)
