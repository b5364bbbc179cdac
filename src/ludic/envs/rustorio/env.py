"""An environment whose actions are Rust programs, and whose rules the compiler enforces."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ludic.envs.code_exec.sandbox.base import Limits, RunResult, RunStatus, text_of
from ludic.envs.code_exec.sandbox.pool import (
    DEFAULT_SANDBOX,
    SandboxPool,
    check_sandbox,
    shared_pool,
)
from ludic.envs.code_exec.session_program import shortened
from ludic.envs.code_exec.tasks import extract_code
from ludic.envs.rustorio.crate import (
    Game,
    build_game,
    check_crate,
    check_stages,
    errors_in,
    find_toolchain,
)
from ludic.envs.single_agent_env import SingleAgentEnv
from ludic.errors import ConfigError
from ludic.plumbing.lazy import names_are_stored
from ludic.types import Action, Info, Obs, StepOutcome

_LANGUAGES = ("rust", "rs")
_MAX_CODE_BYTES = 256 << 10
_SHOWN_FILE, _SHOWN_OUTPUT, _SHOWN_ERROR = 12_000, 1500, 1500
_READ = re.compile(r"\s*read\s+(\S{1,200})\s*")

SYSTEM_PROMPT = (
    "You play a factory game by writing Rust. Resources are values that are consumed when they are "
    "used, and time passes only through the game's tick. Answer with your whole program, in one "
    "block that begins with ```rust and ends with ```. It is compiled and played from the start; "
    "you are told the compiler's errors, or how the game went, and may answer again. Fewer ticks "
    "are better. Answer `read NAME` alone to see a file of the game's source."
)

_TASK = """\
Fill in `user_main`, so that it returns what wins the game:

```rust
use {game}::{{GameMode, Tick}};

type Start = <{mode} as GameMode>::StartingResources;
type Victory = <{mode} as GameMode>::VictoryResources;

pub fn user_main(mut tick: Tick, start: Start) -> (Tick, Victory) {{
    todo!()
}}
```
`std` has no files, processes, threads or input here. `unsafe`, `dyn` and lifetimes such as 'a are
forbidden."""


@dataclass(frozen=True, slots=True)
class Play:
    """How one program did. `ticks` is None unless it won."""

    result: str
    message: str
    stages: tuple[str, ...] = ()
    ticks: int | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class RustorioEnv(SingleAgentEnv):
    """Compiles a program against the game's crate, plays it, and rewards how far it came.

    A program scores `stage_share` of 1 for the stages that it reached, in equal parts, and the
    rest for victory: all of it within `par_ticks`, in proportion beyond them. A victory has reached
    every stage. Each attempt earns what it adds to the best score so far, so that the return is the
    best score. The episode ends with a score of 1, or after `max_attempts`.

    Args:
        crate: The folder of the game's crate, which cargo builds offline; the environment ships
            none.
        mode: The game mode, by its path in Rust.
        stages: Names of stages, each with the type that proves it: a program that holds a value of
            this type shows it by `stages::NAME(&value)`.
        stage_share: How much of the score the stages are; 0 where there are none.
        par_ticks: A victory within this many ticks earns its full reward; None: any victory does.
        max_attempts: Answers per episode; reading a file counts as one.
        max_errors: How many of the compiler's errors are shown.
        sandbox: "bubblewrap", or "plain", which is a subprocess with limits and warns.
        workers: Programs at the same time, for the whole process; by default one per core.
        limits: Those of compiling and playing together that differ from 10 s of time, 1 GB of
            memory and 64 MB per file.
    """

    crate: str
    mode: str = "rustorio::gamemodes::Tutorial"
    stages: Mapping[str, str] = field(default_factory=dict)
    stage_share: float = 0.5
    par_ticks: int | None = None
    max_attempts: int = 20
    max_errors: int = 4
    sandbox: str = DEFAULT_SANDBOX
    workers: int | None = None
    limits: Limits | Mapping[str, Any] | None = None
    pool: SandboxPool | None = None

    def __post_init__(self) -> None:
        if names_are_stored():
            raise ConfigError(
                f"stored data names the crate {self.crate!r}, whose build scripts would be run: "
                "name it in a run file"
            )
        if not re.fullmatch(r"\w+(::\w+)+", self.mode):
            raise ConfigError(f"RustorioEnv(mode={self.mode!r}): a path such as a::b::Mode")
        if not 0 <= self.stage_share <= 1 or min(self.max_attempts, self.max_errors) < 1:
            raise ConfigError(
                f"RustorioEnv(stage_share={self.stage_share}, max_attempts={self.max_attempts}, "
                f"max_errors={self.max_errors}): a share from 0 to 1, and at least one of the rest"
            )
        if self.par_ticks is not None and self.par_ticks < 1:
            raise ConfigError(f"RustorioEnv(par_ticks={self.par_ticks}): must be at least 1")
        check_stages(self.stages)
        self._limits = Limits.of(
            self.limits, memory_mb=1024, file_mb=64, disk_mb=512, open_files=1024
        )
        self._obs = ""
        self._attempts = 0
        self._best = {"stages": 0.0, "victory": 0.0}

    @property
    def return_range(self) -> tuple[float, float]:
        return (0.0, 1.0)

    def check_machine(self) -> None:
        check_crate(self.crate)
        find_toolchain()
        if self.pool is None:
            check_sandbox(self.sandbox)

    def suggested_sysprompt(self, agent_id: str) -> str | None:
        return SYSTEM_PROMPT

    def task_key(self) -> str | None:
        return self.mode

    @cached_property
    def _game(self) -> Game:
        return build_game(self.crate, self.mode, self.stages)

    @cached_property
    def _pool(self) -> SandboxPool:
        return self.pool or shared_pool(self.sandbox, self.workers)

    def env_reset(self, *, seed: int | None = None) -> tuple[Obs, Info]:
        """The game has no chance in it: every seed begins the same episode."""
        parts = [_TASK.format(game=self.mode.partition("::")[0], mode=self.mode)]
        if self.stages:
            parts.append("Show the stages that you reach as soon as you hold what proves them:")
            parts += [f"stages::{name}(&value), a {held}" for name, held in self.stages.items()]
        if self.par_ticks is not None:
            parts.append(f"A victory within {self.par_ticks} ticks earns the full reward.")
        parts.append("Files to read: " + ", ".join(self._game.sources))
        self._obs, self._attempts = "\n".join(parts), 0
        self._best = dict.fromkeys(self._best, 0.0)
        return self._obs, {}

    def env_step(self, action: Action) -> StepOutcome:
        self._attempts += 1
        wanted = _READ.fullmatch(action)
        play = self._read(wanted[1]) if wanted else self._play(extract_code(action, _LANGUAGES))
        score = self._score(play)
        gained = dict.fromkeys(score, 0.0)
        if sum(score.values()) > sum(self._best.values()):
            gained = {name: value - self._best[name] for name, value in score.items()}
            self._best = score
        self._obs = play.message
        return StepOutcome(
            self._obs,
            sum(gained.values()),
            terminated=sum(self._best.values()) >= 1.0 or self._attempts >= self.max_attempts,
            info={
                "result": play.result,
                "stages": list(play.stages),
                "ticks": play.ticks,
                "attempts": self._attempts,
            },
            reward_components=gained,
        )

    def env_current_obs(self) -> Obs:
        return self._obs

    def _score(self, play: Play) -> dict[str, float]:
        share = self.stage_share if self.stages else 0.0
        if play.ticks is None:
            reached = len(play.stages) / len(self.stages) if self.stages else 0.0
            return {"stages": share * reached, "victory": 0.0}
        speed = 1.0 if self.par_ticks is None else min(1.0, self.par_ticks / max(1, play.ticks))
        return {"stages": share, "victory": (1.0 - share) * speed}

    def _read(self, name: str) -> Play:
        path = self._game.sources.get(name)
        if path is None:
            return Play("read", "There is no such file. Files: " + ", ".join(self._game.sources))
        return Play("read", shortened(path.read_text(encoding="utf-8"), _SHOWN_FILE))

    def _play(self, code: str) -> Play:
        source = code.encode("utf-8", "replace")
        if not code.strip():
            return Play("no_code", "There is no code in the answer.")
        if len(source) > _MAX_CODE_BYTES:
            return Play("no_code", f"The code is longer than {_MAX_CODE_BYTES >> 10} KB.")
        if why := refusal(source.decode()):
            return Play("no_compile", f"The program is not compiled. {why}")
        secret = secrets.token_hex(16)
        files, command = {**self._game.files, "player.rs": source}, self._game.command
        stdin, limits = f"{secret}\n".encode(), self._limits
        result = self._pool.run(files, command, stdin, limits)
        if result.late:
            result = self._pool.run(files, command, stdin, limits, alone=True)
        return self._judged(result, secret)

    def _judged(self, result: RunResult, secret: str) -> Play:
        """Only what follows the secret on its line is the harness's own. The line has to be whole:
        the sandbox cuts the output where the player's program may choose."""
        ours = re.compile(rf"^{secret} (?:begun|reached (\w+)|won (\d+))\n", re.MULTILINE)
        printed, complaint = result.stdout.decode("utf-8", "replace"), text_of(result.stderr)
        events = ours.findall(printed)
        limit = "" if result.status in (RunStatus.OK, RunStatus.ERROR) else f" ({result.status})"
        if not events:
            errors = errors_in(complaint)
            shown = [self._clean(error, _SHOWN_ERROR) for error in errors[: self.max_errors]]
            if not errors:
                much = "output" if result.status is RunStatus.OUTPUT else "time or memory"
                shown = [f"The compiler was ended: it took too much {much}."]
            more = f"and {len(errors) - len(shown)} more errors" if len(errors) > len(shown) else ""
            parts = [f"The program does not compile{limit}.", *shown, more]
            return Play("no_compile", "\n\n".join(part for part in parts if part))
        reached = {stage for stage, _ in events}
        stages = tuple(name for name in self.stages if name in reached)
        ticks = next((int(number) for _, number in events if number), None)
        if ticks is not None:
            parts = [f"You won in {ticks} ticks."]
        else:
            stderr = self._clean(complaint, _SHOWN_OUTPUT)
            parts = [f"The game ended without a victory{limit}.", stderr]
        if self.stages:
            parts.append("Stages reached: " + (", ".join(stages) or "none") + ".")
        printed = ours.sub("", printed).strip()
        if printed:
            parts.append("It printed:\n" + self._clean(printed, _SHOWN_OUTPUT))
        message = "\n".join(part for part in parts if part)
        return Play("lost" if ticks is None else "won", message, stages, ticks)

    def _clean(self, text: str, most: int) -> str:
        """Without this machine's paths, and no longer than `most`."""
        return shortened(text.replace(f"{self._game.folder.parent}/", ""), most)


# What a program may not contain although the compiler takes it: safe Rust can stretch a lifetime
# (rust-lang/rust#25860) and so make a value of any type from any other, a victory from a number.
# Every known way to do it writes lifetimes or `dyn`.
# Whatever the compiler would read differently from this pattern would be a way past it. So what is
# not closed is refused, as are comments inside comments, and a first line that the compiler skips.
_TOKEN = re.compile(
    r"""
      //[^\n]*  |  /\*(?:(?!/\*|\*/).)*\*/
    | (?<![\w"'])[bc]?r(?P<hashes>\#*)".*?"(?P=hashes)  |  "(?:[^"\\]|\\.)*"
    | '(?:[^\\]|\\.[^'\\/\n]*)'
    | (?P<label>'[a-zA-Z_]\w*(?=\s*:)  |  \b(?:break|continue)\s+'[a-zA-Z_]\w*\b(?!'))
    | (?P<lifetime>')
    | (?P<dyn>\bdyn\b)
    | (?P<shebang>\#!(?!\[))
    | (?P<unclosed>/\*  |  (?<![\w"'])[bc]?r\#*"  |  ")
    """,
    re.VERBOSE | re.DOTALL,
)
_WHY = {
    "label": "a label in a program with macros, which could make a lifetime of it",
    "lifetime": "a lifetime",
    "dyn": "`dyn`",
    "shebang": "`#!` without a `[` behind it",
    "unclosed": "a string or a comment that does not end, or a comment inside another",
}


def refusal(program: str) -> str | None:
    """Why a program is not compiled; None for one that may be."""
    macros = "macro_rules" in program
    for token in _TOKEN.finditer(program):
        kind = token.lastgroup
        if kind in _WHY and (kind != "label" or macros):
            line = program.count("\n", 0, token.start()) + 1
            return f"Line {line} has {_WHY[kind]}: the game refuses this."
    return None
