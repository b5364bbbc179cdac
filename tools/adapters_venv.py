"""Makes the environment of `make test-adapters`: the adapters' packages over the project's own.

`python -m tools.adapters_venv FOLDER`. What the project's environment has is seen from the new one
and not installed again; only what is missing, or wanted in another version, goes into it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("gameboy", "gymnasium", "mcp", "ray", "reasoning_gym", "textarena", "verifiers")
TESTED = (
    "gymnasium==1.4.0",
    "mcp==1.30.0",  # verifiers 0.3 wants mcp 1
    "openai==3.49.0",  # for the stock agent that is trained
    "pyboy==2.8.1",
    "ray==2.60.0",  # for `make test-cluster`
    "reasoning-gym==0.1.25",
    "textarena==0.7.4",
    "verifiers==0.3.1",
)
"""The versions that are tested together; the docs' tables are theirs."""


def wanted() -> list[str]:
    """The requirements of the adapters' extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    return [*(requirement for extra in EXTRAS for requirement in extras[extra]), *TESTED]


def make(folder: Path) -> None:
    """Makes the environment, or finds it made for these requirements."""
    mark, requirements = folder / ".ludic-ready", wanted()
    if mark.is_file() and mark.read_text(encoding="utf-8") == "\n".join(requirements):
        return
    print(f"==> the adapters' packages into {folder}", flush=True)
    venv.create(folder, with_pip=False, clear=True)
    python = folder / "bin" / "python"
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run(
        [python, "-c", asked], check=True, capture_output=True, text=True
    ).stdout.strip()
    base = sysconfig.get_path("purelib")
    Path(site, "ludic_base.pth").write_text(f"import site; site.addsitedir({base!r})\n")
    uv = shutil.which("uv")
    if uv is None or not with_uv(uv, python, requirements):
        with_pip(python, requirements)
    mark.write_text("\n".join(requirements), encoding="utf-8")


def with_uv(uv: str, python: Path, requirements: list[str]) -> bool:
    """Installs what uv would add to the project's environment, which it can see; it does not look
    below the new one. Returns whether it could."""
    env = {**os.environ, "UV_SYSTEM_CERTS": "1"}
    plan = subprocess.run(
        [uv, "pip", "install", "--dry-run", "--python", sys.executable, *requirements],
        env=env, capture_output=True, text=True,
    )  # fmt: skip
    missing = re.findall(r"^ \+ (\S+)$", plan.stderr, re.M)
    if plan.returncode or not missing:
        return False
    install = [uv, "pip", "install", "-q", "--no-deps", "--python", str(python), *missing]
    return subprocess.run(install, env=env).returncode == 0


def with_pip(python: Path, requirements: list[str]) -> None:
    """Installs with the project's pip, which finds what lies below."""
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q"]
    subprocess.run([*pip, "--disable-pip-version-check", *requirements], check=True)


if __name__ == "__main__":
    make(Path(sys.argv[1]).absolute())
