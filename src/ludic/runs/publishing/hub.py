"""The upload: a revision on the hub has all files of a push, or is as it was before.

One commit brings them all. A revision that is new is made last: the commit goes to a branch under
another name, and then the revision begins at that commit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ludic.errors import HubError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

Files: TypeAlias = Mapping[str, Path | bytes]
"""The files of a revision by their names there; small ones are held, large ones are read from where
they lie."""

TIMEOUT_S = 300.0
"""For one connection, one answer, or one block of an upload."""
_SERVERS_OWN = {".gitattributes"}


@dataclass(frozen=True, slots=True)
class Pushed:
    """What a push left on the hub; `changed` is False if everything was there already."""

    url: str
    commit: str
    changed: bool


def upload(
    files: Files, repo: str, *, revision: str = "main", private: bool = False, message: str
) -> Pushed:
    """Makes `revision` of the repository hold `files` and nothing else, and returns what is
    there. The repository is created if it is missing. The token is the client's: `HF_TOKEN`, or the
    one of `hf auth login`. Raises `HubError`; a push that failed can be repeated."""
    from huggingface_hub import HfApi

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
    with _explained(repo, revision), _deadlines():
        api.create_repo(repo, private=private or None, exist_ok=True)
        if private and not api.model_info(repo).private:
            raise HubError(
                f"{repo} is public already, and --private does not change that: make it private on "
                "the hub, or name another"
            )
        refs = api.list_repo_refs(repo)
        if any(tag.name == revision for tag in refs.tags):
            raise HubError(f"{revision!r} is a tag of {repo}, which stays as it is: name a branch")
        branches = {branch.name: branch.target_commit for branch in refs.branches}
        if revision in branches:
            commit = _commit(api, files, repo, revision, message)
            changed = commit != branches[revision]
        else:
            commit, changed = _new_revision(api, files, repo, revision, message, branches), True
    return Pushed(f"{api.endpoint}/{repo}/tree/{revision}", commit, changed)


def _new_revision(
    api: HfApi, files: Files, repo: str, revision: str, message: str, branches: dict[str, str]
) -> str:
    temporary = f"uploading-{revision}"
    if temporary in branches:  # of a push that was killed
        api.delete_branch(repo, branch=temporary)
    api.create_branch(repo, branch=temporary)
    try:
        commit = _commit(api, files, repo, temporary, message)
        api.create_branch(repo, branch=revision, revision=commit)
    finally:
        with suppress(Exception):  # what went wrong before says more
            api.delete_branch(repo, branch=temporary)
    return commit


def _commit(api: HfApi, files: Files, repo: str, branch: str, message: str) -> str:
    """Commits the files onto a branch, unless somebody else did so in between."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    there = api.model_info(repo, revision=branch)
    names = {str(file.rfilename) for file in there.siblings or ()}
    stale = sorted(names - files.keys() - _SERVERS_OWN)
    operations: list[Any] = [
        CommitOperationAdd(path_in_repo=name, path_or_fileobj=content)
        for name, content in files.items()
    ]
    operations += [CommitOperationDelete(path_in_repo=name) for name in stale]
    done = api.create_commit(
        repo, operations, commit_message=message, revision=branch, parent_commit=there.sha
    )
    return str(done.oid)


@contextmanager
def _deadlines() -> Iterator[None]:
    """Inside, no request of the client waits for ever, which by itself it would."""
    from huggingface_hub import get_session

    session: Any = get_session()
    before = session.timeout
    session.timeout = TIMEOUT_S
    try:
        yield
    finally:
        session.timeout = before


@contextmanager
def _explained(repo: str, revision: str) -> Iterator[None]:
    """Turns whatever the client raises into one sentence, without the token."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        yield
    except HubError:
        raise
    except OfflineModeIsEnabled:
        raise HubError("the environment variable HF_HUB_OFFLINE is set: unset it to push") from None
    except HfHubHTTPError as exc:
        answer = getattr(exc, "response", None)
        status = getattr(answer, "status_code", None)
        raise HubError(_without_token(_because(status, repo, revision, str(exc)))) from None
    except Exception as exc:  # the client's transports and its uploads have many kinds
        cause = exc.__cause__ or exc
        words = f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
        status = getattr(getattr(cause, "response", None), "status_code", None)
        raise HubError(_without_token(_because(status, repo, revision, words))) from None


def _because(status: int | None, repo: str, revision: str, words: str) -> str:
    as_before = f"{revision!r} of {repo} is as it was before"
    reasons: dict[int, str] = {
        401: "the hub does not know who asks: set HF_TOKEN to a token that may write, or log in "
        "with `hf auth login`",
        403: f"the token may not write to {repo}: make one that may, or name a repository of yours",
        404: f"there is no {repo} that this token may see",
        409: f"another change of {repo} came in between: push again",
        412: f"another change of {revision!r} came in between: push again",
        413: "the hub refuses files of this size",
        429: "the hub limits the rate of requests: push again later",
    }
    if status is not None and status >= 500:
        why = f"the hub failed with status {status}: push again later"
    elif status in reasons:
        why = reasons[status]
    else:
        why = f"the upload broke off ({' '.join(words.split())}): push again"
    return f"nothing was published, {as_before}: {why}"


def _without_token(text: str) -> str:
    from huggingface_hub import get_token

    token = get_token()
    return text.replace(token, "…") if token else text
