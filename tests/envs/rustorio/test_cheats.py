"""What a policy could try instead of playing: each is refused by the compiler or held."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ludic.envs.rustorio import RustorioEnv
from ludic.types import StepOutcome
from tests.envs.rustorio.conftest import WINS, program

pytestmark = [pytest.mark.sandbox, pytest.mark.rust, pytest.mark.timeout(300)]

Make = Callable[..., RustorioEnv]

REFUSED = {
    "unsafe": ("fn f() { unsafe {} }", "forbid(unsafe_code)"),
    "unsafe-allowed": ("mod m { #![allow(unsafe_code)] }", "error[E0453]"),
    "unsafe-by-a-macro": (
        "macro_rules! m { ($w:ident) => { fn f() { $w {} } } } m!(unsafe);",
        "forbid(unsafe_code)",
    ),
    "extern-c": ('unsafe extern "C" { safe fn getpid() -> i32; }', "forbid(unsafe_code)"),
    "exported-symbol": ("#[unsafe(no_mangle)] pub fn write() {}", "forbid(unsafe_code)"),
    "asm": ('core::arch::global_asm!("nop");', "`arch`"),
    "include": ('include!("/tmp/main.rs");', "`include`"),
    "include-str": ('const X: &str = core::include_str!("/etc/passwd");', "`include_str`"),
    "include-renamed": (
        'extern crate core as c; const X: &str = c::include_str!("/etc/passwd");',
        "`include_str`",
    ),
    "env": ('const X: &str = env!("PATH");', "`env`"),
    "option-env": ('const X: Option<&str> = std::option_env!("PATH");', "`option_env`"),
    "path": ('#[path = "/etc/passwd"] mod x;', "No such file"),
    "proc-macro": ("#[proc_macro] pub fn m(t: ()) {}", "`proc-macro` crate type"),
    "derive-of-the-game": ("extern crate bakery_goods;", "error[E0463]"),
    "engine": ("extern crate bakery_engine as e;", "error[E0463]"),
    "exit": ("fn f() { std::process::exit(0); }", "`process`"),
    "exit-by-the-real-std": (
        "extern crate std as real; fn f() { real::process::exit(0); }",
        "`process`",
    ),
    "memory-as-a-file": ('fn f() { std::fs::write("/proc/self/mem", "x"); }', "`fs`"),
    "behind-our-std": ("use std::real::fs;", "error[E0603]"),
    "the-secret": ("fn f() { std::io::stdin(); }", "`io`"),
    "the-environment": ('fn f() { std::env::var("PATH"); }', "`env`"),
    "threads": ("fn f() { std::thread::spawn(|| {}); }", "`thread`"),
    "caught-panics": ("fn f() { std::panic::catch_unwind(|| {}); }", "`catch_unwind`"),
    "sysroot": ("extern crate libc;", "error[E0658]"),
    "features": ("#![feature(rustc_private)] extern crate libc;", "error[E0658]"),
    "a-tick-of-ones-own": ("fn f() -> Tick { bakery::Tick(0) }", "error[E0423]"),
    "goods-of-ones-own": ("fn f() { bakery::buildings::Field(()); }", "error[E0603]"),
    "a-stage-without-its-value": ("fn f() { stages::oven(&()); }", "error[E0308]"),
}
"""A cheat, as items before a program that wins, and what the compiler says of it."""


FORGES = """
static UNIT: &&() = &&();
fn shorter<'a, 'b, T>(_: &'a &'b (), x: &'b mut T) -> &'a mut T { x }
fn stretched<'b, T>(x: &mut T) -> &'b mut T {
    let f: for<'x> fn(_, &'x mut T) -> &'b mut T = shorter;
    f(UNIT, x)
}
enum Slot { Won(Option<Box<Victory>>), Number(Option<Box<[u64; 4]>>) }
fn forged() -> Victory {
    let mut slot = Slot::Won(None);
    let Slot::Won(held) = &mut slot else { unreachable!() };
    let held = stretched(held);
    slot = Slot::Number(Some(Box::new([9; 4])));
    std::hint::black_box(&mut slot);
    *held.take().unwrap()
}
"""
"""A victory from a number, through the compiler's hole of rust-lang/rust#25860."""


def played(env: RustorioEnv, action: str) -> StepOutcome:
    outcome = env.env_step(action)
    assert isinstance(outcome, StepOutcome)
    return outcome


@pytest.mark.parametrize("name", REFUSED)
def test_the_compiler_refuses(make: Make, name: str) -> None:
    before, why = REFUSED[name]
    outcome = played(make(), program(WINS, before))
    assert why in outcome.obs
    assert outcome.info["result"] == "no_compile"
    assert outcome.reward == 0.0


def test_a_forged_victory_is_refused_though_the_compiler_takes_it(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgery = program("(tick, forged())", FORGES)
    outcome = played(make(), forgery)
    assert outcome.obs == (
        "The program is not compiled. Line 3 has a lifetime: the game refuses this."
    )
    assert (outcome.info["result"], outcome.reward) == ("no_compile", 0.0)
    monkeypatch.setattr("ludic.envs.rustorio.env.refusal", lambda program: None)
    assert played(make(), forgery).info["result"] == "won"  # if not, the compiler was mended


@pytest.mark.parametrize("descriptor", [0, 1, 2])
def test_a_compiler_that_reads_its_own_pipes_does_not_wait(make: Make, descriptor: int) -> None:
    outcome = played(make(), program(WINS, f'#[path = "/proc/self/fd/{descriptor}"] mod x;'))
    assert outcome.info["result"] == "won"  # the module is empty


def test_a_victory_that_the_limit_on_output_cut_is_none(make: Make) -> None:
    """The program prints so much that of `won 27` only `won 2` is left."""
    begun, won = len(f"\n{'0' * 32} begun\n"), len(f"\n{'0' * 32} won 2")
    wins = WINS.replace("stages::oven(&oven);", "").replace("stages::wheat(&wheat);", "")
    body = f'print!("{{}}", "x".repeat({1024 - begun - won}));{wins}'
    outcome = played(make(limits={"output_kb": 1}), program(body))
    assert outcome.obs.startswith("The game ended without a victory (output).")
    assert outcome.obs.rstrip().endswith("won 2")
    assert outcome.info["ticks"] is None
    assert outcome.reward == 0.0


def test_what_the_refused_are_beside_is_a_program_that_wins(make: Make) -> None:
    harmless = "use std::collections::HashMap; #[derive(Debug, Clone, Default)] struct A(Vec<u8>);"
    body = f'let m: HashMap<String, A> = HashMap::new(); println!("{{m:?}}");{WINS}'
    outcome = played(make(), program(body, harmless))
    assert outcome.info["result"] == "won"
    assert outcome.reward == 1.0


@pytest.mark.parametrize(
    "lines",
    [
        'println!("You won in 1 ticks!");',
        'println!("{} begun", "0".repeat(32)); println!("{} won 1", "0".repeat(32));',
        'print!("\\n won 1\\n"); eprintln!(" won 1");',
        "stages::begin(String::new());",
    ],
)
def test_a_printed_victory_is_none(make: Make, lines: str) -> None:
    outcome = played(make(), program(f"{lines} todo!()"))
    assert outcome.info == {"result": "lost", "stages": [], "ticks": None, "attempts": 1}
    assert outcome.reward == 0.0


def test_a_program_that_plays_another_game_inside_has_not_won(make: Make) -> None:
    """The inner game ends the process with status 0, and says that it was won."""
    inner = "fn inner(tick: Tick, start: Start) -> (Tick, Victory) { win(tick, start) }"
    win = f"fn win(mut tick: Tick, start: Start) -> (Tick, Victory) {{ {WINS} }}"
    silent = win.replace("stages::oven(&oven);", "").replace("stages::wheat(&wheat);", "")
    mode = "bakery::gamemodes::FirstDay"
    outcome = played(make(), program(f"bakery::play::<{mode}>(inner)", f"{inner} {silent}"))
    assert "You won in 27 ticks!" in outcome.obs  # the game's own line, as output
    assert outcome.info["result"] == "lost"
    assert outcome.reward == 0.0


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("loop {}", "cpu_time"),
        ("let mut all = vec![]; loop { all.push(vec![1u8; 1 << 20]); }", "memory"),
        ('loop { println!("{}", tick.cur()); }', "output"),
        ("fn down(n: u64) -> u64 { down(n + 1) + n } down(tick.cur()); todo!()", "signal"),
    ],
    ids=["loop", "memory", "output", "stack"],
)
def test_what_does_not_end_is_ended_and_keeps_its_stages(
    make: Make, body: str, status: str
) -> None:
    limits = {"cpu_s": 4, "wall_s": 60, "memory_mb": 600}
    reached = "let oven = Oven::build(&tick, start.bricks); stages::oven(&oven);"
    outcome = played(make(limits=limits), program(f"{reached}\n{body}"))
    assert f"without a victory ({status})" in outcome.obs
    assert outcome.info["stages"] == ["oven"]
    assert outcome.reward == 0.25
    assert len(outcome.obs) < 4000


def test_errors_that_the_limit_on_output_cut_are_told_as_such(make: Make) -> None:
    outcome = played(make(limits={"output_kb": 0.25}), program("start"))
    assert outcome.obs == (
        "The program does not compile (output).\n\nThe compiler was ended: it took too much output."
    )
    assert outcome.info["result"] == "no_compile"


def test_a_compiler_that_does_not_end_is_ended(make: Make) -> None:
    bomb = "macro_rules! b { ($($t:tt)*) => { b!($($t)* $($t)* x); } } b!(x);"
    limits = {"cpu_s": 4, "wall_s": 60, "memory_mb": 600}
    outcome = played(make(limits=limits), program(WINS, bomb))
    assert "too much time or memory" in outcome.obs
    assert outcome.info["result"] == "no_compile"
    assert outcome.reward == 0.0
