"""What a player's program may not contain, although the compiler takes it.

Safe Rust can stretch a lifetime (rust-lang/rust#25860) and so make a value of any type from any
other, a victory from a number. Every known way to do it writes lifetimes or `dyn`.
"""

from __future__ import annotations

import re

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
