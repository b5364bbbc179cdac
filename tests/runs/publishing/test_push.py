"""Pushing to a hub: what is there afterwards, whatever goes wrong on the way."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ludic.errors import ConfigError, DamagedCheckpointError, HubError
from ludic.runs.publishing import push as hub_module
from ludic.runs.publishing.push import push_run, write_push
from tests.runs.publishing.fake_hub import ROUTES, TOKEN, FakeHub

FILES = [
    *("README.md", "chat_template.jinja", "config.json", "generation_config.json"),
    *("ludic_run.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
]
NEW_REVISION = [
    *("create", "refs", "branch", "revision", "validate", "preupload", "batch", "store", "verify"),
    *("commit", "branch", "unbranch"),
]


def test_a_new_revision_is_there_at_once_and_whole(hub: FakeHub, run_folder: Path) -> None:
    done = push_run(run_folder, "me/keys", revision="v1")
    assert hub.asked == NEW_REVISION
    assert hub.names("me/keys") == {"main": [], "v1": FILES}
    assert done.changed
    assert done.url == f"{hub.url}/me/keys/tree/v1"
    assert hub.repos["me/keys"].branches["v1"] == done.commit
    weights = next(run_folder.glob("checkpoints/rl/step-*/model/model.safetensors"))
    assert hub.files("me/keys", "v1")["model.safetensors"] == weights.read_bytes()


def test_main_is_committed_to_directly(hub: FakeHub, run_folder: Path) -> None:
    push_run(run_folder, "me/keys")
    assert hub.names("me/keys") == {"main": FILES}
    assert hub.asked.count("commit") == 1
    assert not {"branch", "unbranch"} & set(hub.asked)


@pytest.mark.parametrize("revision", ["main", "v1"])
def test_the_same_push_again_changes_nothing(hub: FakeHub, run_folder: Path, revision: str) -> None:
    first = push_run(run_folder, "me/keys", revision=revision)
    before, stored = dict(hub.repos["me/keys"].commits), hub.asked.count("store")
    again = push_run(run_folder, "me/keys", revision=revision)
    assert not again.changed
    assert again.commit == first.commit
    assert hub.repos["me/keys"].commits == before
    assert hub.asked.count("store") == stored


def test_a_revision_holds_what_was_pushed_last_and_nothing_else(
    hub: FakeHub, run_folder: Path
) -> None:
    push_run(run_folder, "me/keys", revision="v1")
    repo = hub.repos["me/keys"]
    old = {**hub.files("me/keys", "v1"), "old.txt": b"old", "config.json": b"{}"}
    repo.commit("v1", old)
    assert push_run(run_folder, "me/keys", revision="v1").changed
    assert hub.names("me/keys")["v1"] == FILES
    assert hub.files("me/keys", "v1")["config.json"] != b"{}"


def test_what_main_has_does_not_come_into_a_new_revision(hub: FakeHub, run_folder: Path) -> None:
    hub.create({"name": "keys", "organization": "me", "type": "model"})
    hub.repos["me/keys"].commit("main", {".gitattributes": b"", "other.txt": b"1"})
    push_run(run_folder, "me/keys", revision="v2")
    assert hub.names("me/keys") == {"main": ["other.txt"], "v2": FILES}
    assert ".gitattributes" in hub.files("me/keys", "v2")


STEPS = dict.fromkeys(NEW_REVISION)
LASTING = 9
"""More than the client tries by itself."""


@pytest.mark.parametrize("fault", [500, 503, "cut", "lost"])
@pytest.mark.parametrize("route", [route for route in STEPS if route != "unbranch"])
def test_wherever_it_breaks_there_is_no_half_revision_and_a_repetition_works(
    hub: FakeHub, run_folder: Path, route: str, fault: int | str
) -> None:
    hub.faults[route] = [fault] * LASTING
    with pytest.raises(HubError, match=r"nothing was published.*push again"):
        push_run(run_folder, "me/keys", revision="v1")
    hub.faults.clear()
    left = hub.names("me/keys") if hub.repos else {}
    assert left.get("v1", FILES) == FILES
    assert left.get("main", []) == []
    push_run(run_folder, "me/keys", revision="v1")
    assert hub.names("me/keys") == {"main": [], "v1": FILES}


@pytest.mark.parametrize("fault", [500, "cut", "half", "lost"])
@pytest.mark.parametrize("route", ["preupload", "store", "commit"])
def test_an_existing_revision_stays_as_it_was(
    hub: FakeHub, run_folder: Path, route: str, fault: int | str
) -> None:
    hub.create({"name": "keys", "organization": "me", "type": "model"})
    hub.repos["me/keys"].commit("main", {".gitattributes": b"", "config.json": b"{}"})
    hub.faults[route] = [fault] * LASTING
    with pytest.raises(HubError, match="push again"):
        push_run(run_folder, "me/keys")
    hub.faults.clear()
    whole = fault == "lost" and route == "commit"
    assert hub.names("me/keys") == {"main": FILES if whole else ["config.json"]}
    again = push_run(run_folder, "me/keys")
    assert again.changed is not whole
    assert hub.names("me/keys") == {"main": FILES}


@pytest.mark.parametrize("fault", [503, "cut", "half"])
def test_an_upload_that_breaks_off_once_is_taken_up_by_the_client(
    hub: FakeHub, run_folder: Path, fault: int | str
) -> None:
    hub.faults["store"] = [fault]
    push_run(run_folder, "me/keys", revision="v1")
    assert hub.asked.count("store") == 2
    assert hub.names("me/keys")["v1"] == FILES


def test_a_push_that_was_killed_leaves_a_branch_of_another_name_that_the_next_one_removes(
    hub: FakeHub, run_folder: Path
) -> None:
    hub.faults |= {"commit": [500] * LASTING, "unbranch": [500] * LASTING}
    with pytest.raises(HubError):
        push_run(run_folder, "me/keys", revision="v1")
    assert hub.names("me/keys") == {"main": [], "uploading-v1": []}
    hub.faults.clear()
    push_run(run_folder, "me/keys", revision="v1")
    assert hub.names("me/keys") == {"main": [], "v1": FILES}


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (401, "set HF_TOKEN to a token that may write, or log in"),
        (403, "the token may not write to me/keys"),
        (409, "another change of me/keys came in between: push again"),
        (412, "another change of 'v1' came in between: push again"),
        (429, "push again later"),
        (500, "the hub failed with status 500"),
    ],
)
def test_a_refusal_is_one_sentence_without_the_token(
    hub: FakeHub, run_folder: Path, status: int, said: str
) -> None:
    hub.faults["commit"] = [status] * LASTING
    with pytest.raises(HubError, match=said) as caught:
        push_run(run_folder, "me/keys", revision="v1")
    assert TOKEN not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_wrong_token_is_refused_before_anything_is_made(
    hub: FakeHub, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    with pytest.raises(HubError, match="set HF_TOKEN"):
        push_run(run_folder, "me/keys")
    assert hub.repos == {}


def test_somebody_elses_commit_in_between_is_not_overwritten(
    hub: FakeHub, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push_run(run_folder, "me/keys")
    repo, validate = hub.repos["me/keys"], hub.validate
    repo.commit("main", {".gitattributes": b""})

    def meanwhile(said: dict[str, Any]) -> Any:
        repo.commit("main", {".gitattributes": b"", "theirs.txt": b"1"})
        return validate(said)

    monkeypatch.setattr(hub, "validate", meanwhile)
    with pytest.raises(HubError, match="another change of 'main' came in between: push again"):
        push_run(run_folder, "me/keys")
    assert hub.names("me/keys") == {"main": ["theirs.txt"]}


def test_private_repositories(hub: FakeHub, run_folder: Path) -> None:
    push_run(run_folder, "me/secret", private=True)
    assert hub.repos["me/secret"].private
    push_run(run_folder, "me/open")
    assert not hub.repos["me/open"].private
    with pytest.raises(HubError, match="me/open is public already"):
        push_run(run_folder, "me/open", private=True)


def test_a_tag_is_no_revision_to_push_to(hub: FakeHub, run_folder: Path) -> None:
    push_run(run_folder, "me/keys")
    repo = hub.repos["me/keys"]
    repo.tags["v1"] = repo.branches["main"]
    with pytest.raises(HubError, match="'v1' is a tag"):
        push_run(run_folder, "me/keys", revision="v1")


def test_no_request_waits_for_ever(
    hub: FakeHub, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import get_session

    seen = []
    refs = hub.refs

    def look(said: Any, repo: str) -> Any:
        seen.append(get_session().timeout.read)
        return refs(said, repo)

    monkeypatch.setattr(hub, "refs", look)
    before = get_session().timeout
    push_run(run_folder, "me/keys")
    assert seen == [hub_module.TIMEOUT_S]
    assert get_session().timeout == before


def command(
    hub: FakeHub, where: Path, *words: str, xet: bool = False
) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "HF_HUB_DISABLE_XET": str(int(not xet)), "HF_HOME": str(where / "home")}
    env |= {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return subprocess.run(
        [sys.executable, *words], env=env, cwd=where, capture_output=True, text=True, timeout=600
    )


LOAD = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], revision=sys.argv[2])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], revision=sys.argv[2])
said = [{"role": "user", "content": "Hello"}]
ids = tokenizer.apply_chat_template(said, return_dict=True, return_tensors="pt")["input_ids"]
print(float(model(input_ids=ids).logits.double().sum()))
"""


def load_from(hub: FakeHub, repo: str, revision: str, where: Path) -> float:
    """The sum of the logits of a model that transformers loads from the hub."""
    done = command(hub, where, "-c", LOAD, repo, revision)
    assert done.returncode == 0, done.stderr
    return float(done.stdout.split()[-1])


@pytest.mark.integration
@pytest.mark.timeout(900)
def test_the_command_pushes_and_transformers_loads_it_from_there(
    hub: FakeHub, run_folder: Path, tmp_path: Path
) -> None:
    push = ("-m", "ludic", "push", str(run_folder), "me/keys", "--revision", "v1", "--private")
    done = command(hub, tmp_path, *push)
    assert done.returncode == 0, done.stderr
    assert f"{hub.url}/me/keys/tree/v1 is at commit" in done.stdout
    model = next(run_folder.glob("checkpoints/rl/step-*/model"))
    assert load_from(hub, "me/keys", "v1", tmp_path) == pytest.approx(logits_of(model))
    assert set(hub.asked) | {"harnesses"} == {name for _, name in ROUTES}  # no more, no fewer
    hub.faults["refs"] = [401]
    refused = command(hub, tmp_path, *push)
    assert refused.returncode == 2
    assert "set HF_TOKEN" in refused.stderr
    for shown in (done, refused):
        assert TOKEN not in shown.stdout + shown.stderr


def logits_of(folder: Path) -> float:
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    said = [{"role": "user", "content": "Hello"}]
    ids = tokenizer.apply_chat_template(said, return_dict=True, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return float(model(input_ids=ids).logits.double().sum())


def test_a_damaged_checkpoint_is_not_published(run_folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run_folder, tmp_path / "copy")
    weights = next(copy.glob("checkpoints/rl/step-*/model/model.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(DamagedCheckpointError, match=r"model\.safetensors is missing or cut"):
        write_push(copy, "me/keys", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["keys", "me/keys/more", "https://hub/me/keys", ""])
def test_a_name_that_is_none_on_the_hub(run_folder: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="is not a name on the hub: give owner/name"):
        write_push(run_folder, name, tmp_path / "out")


def test_the_settings_are_there_without_this_machines_names(
    run_folder: Path, tmp_path: Path
) -> None:
    write_push(run_folder, "me/keys", tmp_path / "out")
    said = json.loads((tmp_path / "out/ludic_run.json").read_text())
    assert said["settings"]["algorithm"]["name"] == "reinforce"
    assert "machine" not in said["origin"]
    for path in (tmp_path / "out").iterdir():
        if path.suffix in (".md", ".json", ".jinja"):
            assert str(run_folder.parent) not in path.read_text()
