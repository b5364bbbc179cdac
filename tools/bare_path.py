"""What a fresh machine has: every program on the PATH but those that come with extra packages.

    PATH=$(python -m tools.bare_path FOLDER) make test

fills a new FOLDER with links and prints it. The tests then run as they do for someone who has only
what the README asks for.
"""

from __future__ import annotations

import argparse
import os
from fnmatch import fnmatch
from pathlib import Path

HIDDEN = (
    *("bwrap", "redis-*", "valkey-*"),
    *("chromium*", "chrome", "chromedriver*", "google-chrome*"),
    *("rustc", "cargo"),
)
"""The programs of bubblewrap, Redis, chromium and Rust, and of what would stand in for them."""


def link_programs(folder: Path, path: str) -> None:
    """Makes `folder`, with a link to the first program of each name on `path`, but the hidden."""
    folder.mkdir(parents=True)
    linked: set[str] = set()
    for place in path.split(os.pathsep):
        if not place or not os.path.isdir(place):
            continue
        for entry in sorted(os.scandir(os.path.abspath(place)), key=lambda e: e.name):
            is_hidden = any(fnmatch(entry.name, pattern) for pattern in HIDDEN)
            if is_hidden or entry.name in linked or not os.access(entry.path, os.X_OK):
                continue
            (folder / entry.name).symlink_to(entry.path)
            linked.add(entry.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.absolute()
    link_programs(folder, os.environ.get("PATH", os.defpath))
    print(folder)


if __name__ == "__main__":
    main()
