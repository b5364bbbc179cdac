"""From a game's crate on disk to all that a player's program is compiled and linked with.

The game is built here, by cargo, once: it is its user's own code. A player's program is only ever
compiled and run in the sandbox, where these files are given to it.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludic.errors import ConfigError

OLDEST = (1, 85)
"""The first version that knows Rust's edition of 2024."""

VISIBLE = "/usr"
"""Of the folders with programs, the one that the sandbox shows."""
_HERE = Path(__file__).parent
_BUILD_S = 600.0
_STAGE_NAME = re.compile(r"(?!begin$)[a-z][a-z0-9_]*")
_FLAGS = ["--edition=2024", "-Awarnings", "--error-format=json"]
_PROFILE = {"inherits": '"dev"', "debug": "false", "opt-level": "1"}
"""Overflows panic, as in `dev`: a game counts on it."""


@dataclass(frozen=True, slots=True)
class Game:
    """A game that was built. `files` go into the sandbox, where `command` compiles a `player.rs`
    beside them and runs it; `sources` are those of the game, by their names."""

    files: Mapping[str, bytes]
    command: Sequence[str]
    sources: Mapping[str, Path]
    folder: Path


@dataclass(frozen=True, slots=True)
class Toolchain:
    """The compiler, and the program that builds crates with it."""

    rustc: str
    cargo: str


def find_toolchain() -> Toolchain:
    """The first one on the part of the PATH that the sandbox sees; raises `ConfigError` if there is
    none, or if it is too old."""
    # A compiler elsewhere (rustup's, in a home folder) would do for the game, but not for players.
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    path = os.pathsep.join(f for f in folders if Path(f).resolve().is_relative_to(VISIBLE))
    return _asked(path)


@functools.cache
def _asked(path: str) -> Toolchain:
    install = "install Rust (Debian: apt-get install rustc-web cargo-web)"
    rustc, cargo = (shutil.which(program, path=path) for program in ("rustc", "cargo"))
    if rustc is None or cargo is None:
        raise ConfigError(
            "the environment 'rustorio' needs rustc and cargo in a folder of the PATH below /usr, "
            f"where the sandbox sees them: {install}"
        )
    banner = _run([rustc, "--version"], cwd="/").stdout.strip()
    version = re.match(r"rustc (\d+)\.(\d+)", banner)
    if version is None or (int(version[1]), int(version[2])) < OLDEST:
        raise ConfigError(
            f"the environment 'rustorio' needs rustc {OLDEST[0]}.{OLDEST[1]} or newer, and {rustc} "
            f"is {banner!r}: {install}"
        )
    # Not the one on the PATH, which may be rustup's stand-in for it.
    sysroot = _run([rustc, "--print=sysroot"], cwd="/").stdout.strip()
    return Toolchain(f"{sysroot}/bin/rustc", cargo)


def check_crate(crate: str) -> Path:
    """Returns the folder of a crate; raises `ConfigError` if there is none."""
    folder = Path(crate).expanduser().resolve()
    if not (folder / "Cargo.toml").is_file():
        raise ConfigError(
            f"there is no Rust crate in {crate!r}: set env.kwargs.crate to the folder with "
            "Rustorio's Cargo.toml (https://github.com/albertsgarde/rustorio)"
        )
    return folder


_building = threading.Lock()


def build_game(crate: str, mode: str, stages: Mapping[str, str]) -> Game:
    """Returns the game. The first call in this process builds it; cargo rebuilds what changed."""
    with _building:
        return _build(check_crate(crate), mode, tuple(stages.items()))


@functools.cache
def _build(folder: Path, mode: str, stages: tuple[tuple[str, str], ...]) -> Game:
    tools = find_toolchain()
    artifacts = _cargo_build(tools, folder)
    (game,) = (a for a in artifacts if Path(a["manifest_path"]).parent == folder)
    name = game["target"]["name"].replace("-", "_")
    library = next(f"deps/{Path(p).name}" for p in game["filenames"] if p.endswith(".rlib"))
    libraries = ["-Ldependency=deps", f"--extern={name}={library}"]
    with tempfile.TemporaryDirectory(prefix="ludic-rustorio-") as made:
        (Path(made) / "deps").mkdir()
        for path in (path for artifact in artifacts for path in artifact["filenames"]):
            if path.endswith((".rlib", ".so")):
                shutil.copy(path, Path(made) / "deps")
        for part, text in (
            ("std", (_HERE / "std.rs").read_text(encoding="utf-8")),
            ("stages", f"extern crate {name} as _;\n{_stages(stages)}"),
        ):
            (Path(made) / f"{part}.rs").write_text(text, encoding="utf-8")
            crate = ["--crate-type=rlib", f"--crate-name=ludic_{part}", "--out-dir=deps"]
            read = ["--emit=link,dep-info", "-Zbinary-dep-depinfo"]
            command = [tools.rustc, *_FLAGS, *libraries, *crate, *read, f"{part}.rs"]
            done = _run(command, cwd=made, RUSTC_BOOTSTRAP="1")
            if done.returncode != 0:
                why = " ".join(error.partition("\n")[0] for error in errors_in(done.stderr))
                raise ConfigError(f"the stages of env.kwargs.stages do not fit {name}: {why}")
        # What cargo built and the game's library does not use stays here.
        used = (Path(made) / "deps" / "ludic_stages.d").read_text(encoding="utf-8").split()
        names = {Path(path).name for path in used} | {"libludic_std.rlib", "libludic_stages.rlib"}
        files = {
            f"deps/{path.name}": path.read_bytes()
            for path in (Path(made) / "deps").iterdir()
            if path.name in names
        }
    files["lib.rs"] = b"#![forbid(unsafe_code)]\nmod player;\npub use player::user_main;\n"
    main = (_HERE / "main.rs").read_text(encoding="utf-8")
    files["main.rs"] = main.replace("GAME", name).replace("MODE", mode).encode()
    command = ["sh", "-c", _script([*libraries, "--extern=stages=deps/libludic_stages.rlib"])]
    shown = [a for a in artifacts if names & {Path(path).name for path in a["filenames"]}]
    return Game(files, [*command, tools.rustc], _sources(shown), folder)


def _script(libraries: Sequence[str]) -> str:
    """Compiles the player's program, links it with ours, and becomes the game."""
    # Whatever the player's program calls std, core or alloc is ours.
    names = [f"--extern={std}=deps/libludic_std.rlib" for std in ("std", "core", "alloc")]
    player = [*_FLAGS, *libraries, *names, "--crate-type=rlib", "--crate-name=player", "lib.rs"]
    linked = [*_FLAGS, *libraries, "--extern=player=libplayer.rlib", "-ogame", "main.rs"]
    linked.append("-Cstrip=debuginfo")  # half of what linking takes otherwise
    # A program can have the compiler read its own open files, and would find a pipe's end there.
    return (
        'compile() { "$0" "$@" </dev/null >/dev/null 2>errors || { cat errors >&2; exit 1; }; }\n'
        f"compile {shlex.join(player)}\ncompile {shlex.join(linked)}\nexec ./game"
    )


def _cargo_build(tools: Toolchain, folder: Path) -> list[dict[str, Any]]:
    """Every library that the crate is made of, itself among them, as cargo describes them."""
    profile = [f"--config=profile.ludic.{key}={value}" for key, value in _PROFILE.items()]
    profile.append("--profile=ludic")
    done = _run(
        [tools.cargo, "build", "--offline", "--lib", "--message-format=json", *profile],
        cwd=str(folder),
        RUSTC=tools.rustc,
        RUSTC_BOOTSTRAP="1",  # Rustorio's engine uses a feature that only nightly compilers offer
    )
    messages = [json.loads(line) for line in done.stdout.split("\n") if line.startswith("{")]
    if done.returncode != 0:
        errors = done.stderr.strip()[-1500:]
        raise ConfigError(f"cargo could not build the crate {str(folder)!r}: {errors}")
    return [
        message
        for message in messages
        if message["reason"] == "compiler-artifact"
        and {"lib", "rlib", "proc-macro"} & set(message["target"]["kind"])
    ]


def _stages(stages: tuple[tuple[str, str], ...]) -> str:
    """A crate with a function for each stage, which only a holder of the right value can call."""
    shown = (
        f"/// Shows that you have it.\npub fn {name}(_held: &{held}) {{ reached({name!r}) }}\n"
        for name, held in stages
    )
    return (
        "static SECRET: std::sync::OnceLock<String> = std::sync::OnceLock::new();\n"
        "pub fn begin(secret: String) { let _ = SECRET.set(secret); }\n"
        "fn reached(name: &str) {\n"
        '    if let Some(secret) = SECRET.get() { println!("\\n{secret} reached {name}"); }\n'
        "}\n"
    ) + "".join(shown).replace("'", '"')


def check_stages(stages: Mapping[str, str]) -> None:
    """Raises `ConfigError` if a name cannot be that of a function."""
    for name in stages:
        if not _STAGE_NAME.fullmatch(name):
            raise ConfigError(
                f"the stage {name!r} in env.kwargs.stages: small letters, digits and underscores, "
                "and not 'begin'"
            )


def _sources(artifacts: Sequence[dict[str, Any]]) -> dict[str, Path]:
    """What a player may read: the libraries of the game itself, without programs and tests."""
    sources: dict[str, Path] = {}
    for artifact in artifacts:
        target, local = artifact["target"], "path+file://" in artifact["package_id"]
        if local and "proc-macro" not in target["kind"]:
            root = Path(target["src_path"]).parent
            for path in sorted(root.rglob("*.rs")):
                place = path.relative_to(root)
                if place.parts[0] not in ("bin", "main.rs", "tests"):
                    sources[f"{target['name']}/{place}"] = path
    return sources


def errors_in(output: str) -> list[str]:
    """The compiler's errors, as it shows them to people, from its output in JSON."""
    errors: list[str] = []
    for line in output.split("\n"):  # not where else Unicode ends lines
        try:
            message = json.loads(line) if line.startswith("{") else {}
        except ValueError:  # where the output was cut
            continue
        if message.get("level") == "error" and not message["message"].startswith("aborting due to"):
            errors.append(message["rendered"].strip())
    return errors


def _run(command: Sequence[str], cwd: str, **environment: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            cwd=cwd,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=_BUILD_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{command[0]} could not be run: {error}") from error
