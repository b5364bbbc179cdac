"""The README's figure: the data flow, with the file behind each box.

`python -m tools.data_flow` writes it. A test holds that it is up to date and that its files exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIGURE = ROOT / "docs" / "images" / "data-flow.svg"

WIDTH, HEIGHT = 980, 520
BOX_WIDTH, BOX_HEIGHT = 212, 76
COLUMNS = (24, 264, 504, 744)
PLAN, EPISODE, PUBLISH, UPDATE, ALGORITHM = 20, 150, 280, 380, 476

# The figure brings its own colours, for a light and a dark page.
STYLE = """\
    text { font-family: system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif;
      fill: #1f2328; }
    .title { font-size: 15px; font-weight: 600; }
    .note { font-size: 12px; fill: #59636e; }
    .file { font-size: 11.5px; fill: #0a5cad;
      font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
    .box { fill: #f6f8fa; stroke: #8c959f; }
    .frame { fill: none; stroke: #8c959f; stroke-dasharray: 5 4; }
    .way { fill: none; stroke: #59636e; stroke-width: 1.6; }
    .part { fill: none; stroke: #8c959f; stroke-dasharray: 2 4; }
    .head { fill: #59636e; }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3; }
      .note { fill: #9198a1; }
      .file { fill: #79b8ff; }
      .box { fill: #161b22; stroke: #6e7681; }
      .frame, .part { stroke: #6e7681; }
      .way { stroke: #9198a1; }
      .head { fill: #9198a1; }
    }"""


@dataclass(frozen=True)
class Box:
    """A step on the way: its name, what it does, the file of `src/ludic` that defines it."""

    title: str
    note: str
    file: str
    x: int
    y: int
    width: int = BOX_WIDTH
    height: int = BOX_HEIGHT


_ROWS = {
    PLAN: (
        ("Curriculum", "what to play next", "rollouts/requests.py"),
        ("RolloutRequest", "names, arguments, seeds", "rollouts/requests.py"),
        ("RequestStrategy", "one request becomes a group", "rollouts/requests.py"),
        ("RolloutEngine", "runs the episodes", "rollouts/engine.py"),
    ),
    EPISODE: (
        ("LudicEnv", "states and rewards", "envs/env.py"),
        ("InteractionProtocol", "who acts when", "interaction/base.py"),
        ("Agent", "prompt, call, parse", "agents/base_agent.py"),
        ("ChatClient", "token ids in and out", "inference/client.py"),
    ),
    UPDATE: (
        ("Rollout", "one for each agent", "types.py"),
        ("CreditAssigner", "a weight for each turn", "saw/building.py"),
        ("SAWBatch", "state, action, weight", "saw/items.py"),
        ("Trainer", "log-probs, loss, step", "training/trainer.py"),
    ),
}
BOXES = (
    *(
        Box(title, note, file, x, y)
        for y, row in _ROWS.items()
        for x, (title, note, file) in zip(COLUMNS, row, strict=True)
    ),
    Box("PolicyPublisher", "new weights", "distributed/interfaces.py", COLUMNS[3], PUBLISH),
)
ALGORITHMS = Box(
    "RLAlgorithm",
    "a credit assigner and a loss, one file each",
    "training/algorithms",
    COLUMNS[1],
    ALGORITHM,
    COLUMNS[3] + BOX_WIDTH - COLUMNS[1],
    32,
)

EPISODE_FRAME = (12, EPISODE - 26, WIDTH - 24, BOX_HEIGHT + 40)
GAP = COLUMNS[1] - COLUMNS[0] - BOX_WIDTH


def figure() -> str:
    """Returns the figure as SVG."""
    middle = COLUMNS[3] + BOX_WIDTH // 2
    credit = COLUMNS[1] + BOX_WIDTH // 2
    rollout = COLUMNS[0] + BOX_WIDTH // 2
    frame_x, frame_y, frame_width, frame_height = EPISODE_FRAME
    parts = [
        f'<rect class="frame" x="{frame_x}" y="{frame_y}" width="{frame_width}" '
        f'height="{frame_height}" rx="10"/>',
        text("note", frame_x + 12, frame_y + 17, "one episode"),
        *(box(each) for each in BOXES),
        strip(ALGORITHMS),
        *(
            arrow(x - GAP, y + 38, x, y + 38, both=y == EPISODE)
            for y in (PLAN, EPISODE, UPDATE)
            for x in COLUMNS[1:]
        ),
        arrow(middle, PLAN + BOX_HEIGHT, middle, frame_y),
        arrow(rollout, frame_y + frame_height, rollout, UPDATE),
        arrow(middle, UPDATE, middle, PUBLISH + BOX_HEIGHT),
        arrow(middle, PUBLISH, middle, EPISODE + BOX_HEIGHT),
        dotted(credit, UPDATE + BOX_HEIGHT, ALGORITHM),
        dotted(middle, UPDATE + BOX_HEIGHT, ALGORITHM),
    ]
    body = "\n".join(f"  {part}" for part in parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img" aria-labelledby="name">\n'
        '  <title id="name">From a curriculum to new weights, with the file behind each step'
        "</title>\n"
        f"  <style>\n{STYLE}\n  </style>\n"
        "  <defs>\n"
        '    <marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
        'markerHeight="7" orient="auto-start-reverse">'
        '<path class="head" d="M0 0 10 5 0 10z"/></marker>\n'
        "  </defs>\n"
        f"{body}\n"
        "</svg>\n"
    )


def box(each: Box) -> str:
    """A step with its name, its note and its file."""
    lines = (("title", 24, each.title), ("note", 43, each.note), ("file", 63, each.file))
    words = (text(kind, each.x + 12, each.y + below, line) for kind, below, line in lines)
    return outline(each) + "".join(words)


def strip(each: Box) -> str:
    """A step in one line."""
    title = text("title", each.x + 12, each.y + 21, each.title)
    note = text("note", each.x + 126, each.y + 21, each.note)
    return outline(each) + title + note + text("file", COLUMNS[3] + 12, each.y + 21, each.file)


def outline(each: Box) -> str:
    """The frame of a step; what hovers over it is the whole path."""
    return (
        f'<rect class="box" x="{each.x}" y="{each.y}" width="{each.width}" '
        f'height="{each.height}" rx="6"><title>src/ludic/{escape(each.file)}</title></rect>'
    )


def text(kind: str, x: int, y: int, words: str) -> str:
    """A line of text."""
    return f'<text class="{kind}" x="{x}" y="{y}">{escape(words)}</text>'


def arrow(x1: int, y1: int, x2: int, y2: int, *, both: bool = False) -> str:
    """An arrow, or one with two heads."""
    start = ' marker-start="url(#head)"' if both else ""
    return f'<path class="way" d="M{x1} {y1}L{x2} {y2}"{start} marker-end="url(#head)"/>'


def dotted(x: int, y1: int, y2: int) -> str:
    """A line to what a step takes its rules from."""
    return f'<path class="part" d="M{x} {y1}V{y2}"/>'


def main() -> None:
    """The command."""
    FIGURE.write_text(figure(), encoding="utf-8")
    print(f"wrote {FIGURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
