"""`ludic.push`: the files of a run's model on the hub, or in the folder that would be uploaded."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeAlias

from ludic.errors import CheckpointError, ConfigError, HubError
from ludic.runs.locate import check_given
from ludic.runs.publishing.card import RunFacts, check_repo, hub_name, model_card
from ludic.runs.settings.paths import split_run
from ludic.runs.storage import RunFolder

if TYPE_CHECKING:
    from huggingface_hub import HfApi


def push_run(
    run: str | Path,
    repo: str,
    *,
    revision: str = "main",
    private: bool = False,
    merged: bool = False,
    base_model: str | None = None,
) -> Pushed:
    """Publishes the model of a run folder (`FOLDER`, `FOLDER:sft`, `FOLDER:step-40`), or a folder
    that holds a model or an adapter, as `revision` of `repo` on the hub."""
    with packed(str(run), repo, revision=revision, merged=merged, base_model=base_model) as files:
        message = f"Push of {Path(str(run)).name} by Ludic"
        return upload(files, repo, revision=revision, private=private, message=message)


def write_push(run: str | Path, repo: str, folder: str | Path, **options: Any) -> list[str]:
    """Writes what `push_run` would upload, with these of `packed`'s options, to a new folder, and
    returns the names of the files."""
    with packed(str(run), repo, **options) as files:
        folder = Path(folder)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} exists already: name another with --out")
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            if isinstance(content, bytes):
                (folder / name).write_bytes(content)
            else:
                shutil.copyfile(content, folder / name)
        return list(files)


_NAMES = ("_name_or_path", "name_or_path")


@contextmanager
def packed(
    run: str,
    repo: str,
    *,
    revision: str = "main",
    merged: bool = False,
    base_model: str | None = None,
) -> Iterator[Files]:
    """Yields the files for a run folder (`FOLDER`, `FOLDER:sft`, `FOLDER:step-40`) or for a folder
    that holds a model or an adapter. `merged`: the whole model with its adapter merged in, which is
    kept on disk for as long as this is open. `base_model` is what an adapter belongs to, if the
    run does not name it by its name on the hub."""
    check_repo(repo)
    path, which = split_run(run)
    facts, folder = None, None
    if (Path(path) / "run.json").is_file() or which is not None:
        folder = RunFolder.open(path)
        model = folder.weights(which)
        facts = replace(RunFacts.of(folder, which), earlier=model != folder.weights())
    else:
        model = Path(path)
    _check_whole(model, run)
    adapter = (model / "adapter_config.json").is_file()
    checkpoint = f"{model.parent.parent.name}/{model.parent.name}" if folder else None
    with TemporaryDirectory(prefix="ludic-push-") as temporary:
        if merged:
            if folder is None or not adapter:
                raise ConfigError(f"--merged is for the run folder of an adapter, and {run} is not")
            model, adapter = _merge(folder, model, Path(temporary)), False
        files: dict[str, Path | bytes] = {p.name: p for p in sorted(model.iterdir()) if _kept(p)}
        base = base_model or (facts.base_model if facts else None)
        if adapter:
            files["adapter_config.json"], base = _adapter_config(model, base)
        for name in ("config.json", "tokenizer_config.json"):
            if name in files:
                files[name] = _without_paths(model / name)
        card = model_card(
            facts, repo, revision=revision, adapter=adapter, base_model=base, checkpoint=checkpoint
        )
        files["README.md"] = card.encode()
        if facts is not None:
            files["ludic_run.json"] = _json({"settings": facts.settings, "origin": facts.origin})
        yield dict(sorted(files.items()))


def _check_whole(model: Path, run: str) -> None:
    """Raises if the folder holds no model, or if the checkpoint it belongs to is damaged."""
    if not model.is_dir():
        raise ConfigError(f"{run} is neither a run folder nor a folder with a model")
    manifest = model.parent / "manifest.json"
    if manifest.is_file() and model.name == "model":
        from ludic.training.checkpoint_contents import verify_checkpoint

        verify_checkpoint(model.parent)
    names = {path.name for path in model.iterdir()}
    if not names & {"config.json", "adapter_config.json"}:
        raise ConfigError(f"{model} holds no model: it has neither config.json nor an adapter's")
    if not any(name.endswith(".safetensors") for name in names):
        raise CheckpointError(f"{model} holds no weights in safetensors")
    if "tokenizer_config.json" not in names:
        raise ConfigError(
            f"{model} has no tokenizer: save it there, with "
            f"tokenizer.save_pretrained({str(model)!r})"
        )


def _kept(path: Path) -> bool:
    """Whether a file is published: no card that others wrote, nothing hidden, no pickles."""
    hidden = path.name.startswith(".") or path.suffix in (".bin", ".pt", ".pth", ".pkl")
    return path.is_file() and not hidden and path.name != "README.md"


def _adapter_config(model: Path, base: str | None) -> tuple[bytes, str]:
    """The adapter's configuration with the name of what it belongs to, which others can load."""
    config = json.loads((model / "adapter_config.json").read_text(encoding="utf-8"))
    name = base or hub_name(str(config.get("base_model_name_or_path") or ""))
    if name is None:
        raise ConfigError(
            f"the adapter in {model} belongs to a model that is not on the hub: name the one that "
            "it belongs to with --base-model OWNER/NAME, or publish both as one with --merged"
        )
    config["base_model_name_or_path"] = name
    return _json(config), name


def _without_paths(path: Path) -> bytes:
    config = json.loads(path.read_text(encoding="utf-8"))
    for key in _NAMES:
        if isinstance(config.get(key), str) and hub_name(config[key]) is None:
            config[key] = Path(config[key]).name
    return _json(config)


def _merge(folder: RunFolder, weights: Path, target: Path) -> Path:
    """Saves the policy as one model, computed as its publisher does: out of place, in float32."""
    from ludic.runs.episodes import import_user_modules
    from ludic.runs.model import build_model
    from ludic.runs.vllm_backend import save_for_vllm
    from ludic.training.checkpoint_contents import no_progress_bar

    config = folder.config(["model.device=cpu"])
    import_user_modules(config, folder.modules)
    check_given(config, str(folder.path))
    model, tokenizer = build_model(config, weights)
    with no_progress_bar():
        save_for_vllm(model, target, merged=True)
        tokenizer.save_pretrained(target)
    return target


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


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

    info = api.model_info(repo, revision=branch)
    names = {str(file.rfilename) for file in info.siblings or ()}
    stale = sorted(names - files.keys() - _SERVERS_OWN)
    operations: list[Any] = [
        CommitOperationAdd(path_in_repo=name, path_or_fileobj=content)
        for name, content in files.items()
    ]
    operations += [CommitOperationDelete(path_in_repo=name) for name in stale]
    commit = api.create_commit(
        repo, operations, commit_message=message, revision=branch, parent_commit=info.sha
    )
    return str(commit.oid)


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
        401: "the hub needs a token: set HF_TOKEN to a token that may write, or log in "
        "with `hf auth login`",
        403: f"the token may not write to {repo}: use one that may, or a repository of your own",
        404: f"there is no {repo}, or this token may not see it",
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
