"""What runs on the other side: nothing here imports anything but the standard library.

These files are sent to the worker as source, since the worker sees neither this package nor the
environment that it is installed in. There they have the names that they have here, in packages
that hold nothing else.
"""

from pathlib import Path

LOADER = """
import sys, types
def load(sources):
    for name, source in sources.items():
        parents = name.split(".")[:-1]
        for end in range(1, len(parents) + 1):
            parent = ".".join(parents[:end])
            if parent not in sys.modules:
                sys.modules[parent] = types.ModuleType(parent)
                sys.modules[parent].__path__ = []
        module = types.ModuleType(name)
        sys.modules[name] = module
        setattr(sys.modules[".".join(parents)], name.rpartition(".")[2], module)
        exec(compile(source, f"<ludic {name}>", "exec", dont_inherit=True), module.__dict__)
"""
"""Defines `load`, which makes modules of what `sources` returns."""


def sources(*names: str) -> dict[str, str]:
    """The named files of this package, by their modules' names, in the order to load them in."""
    folder = Path(__file__).parent
    return {f"{__name__}.{n}": (folder / f"{n}.py").read_text(encoding="utf-8") for n in names}


OWN_PID = 0x4C756469
"""Stands in a seccomp filter for the number of the process that installs it."""
