"""Prove a built wheel: the rooms are whole in it, and it works where neither the checkout nor torch is.

    python scripts/check_wheel.py DIST_FOLDER SCRATCH_FOLDER

The import root reaches the rooms by links; a build that did not follow them, or lost the suites, still installs. So the
wheel's list of files is compared with the rooms, and the wheel is installed into a clean environment of SCRATCH_FOLDER
together with its light dependencies only. There `attncheck list` and `attncheck schema` must name every suite and load
no torch. Exits with a message when something is missing.
"""

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("reference", "cases", "backends", "reports", "harness")
LIGHT = ("pydantic", "PyYAML", "typer", "rich", "tabulate")
"""What listing, validating and reporting need."""


def expected_files() -> set[str]:
    """Every file of ours that belongs into the wheel, as its path inside it."""
    root = {f"attncheck/{path.name}" for path in (ROOT / "src" / "attncheck").iterdir() if path.is_file()}
    modules = {f"attncheck/{path.relative_to(ROOT)}" for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    suites = {f"attncheck/cases/suites/{path.name}" for path in (ROOT / "cases" / "suites").glob("*.*")}
    return root | modules | suites


def check_files(wheel: Path) -> None:
    """Refuse a wheel that lacks a file of the rooms, or holds a module they no longer have."""
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("attncheck/")}
    expected = expected_files()
    if packed != expected:
        sys.exit(f"{wheel.name}: missing {sorted(expected - packed)}, unexpected {sorted(packed - expected)}")


def check_installed(wheel: Path, scratch: Path) -> None:
    """Install without torch, away from the checkout, and ask the two commands that must not need it."""
    home = scratch / "installed"
    venv.create(home, clear=True, with_pip=True)
    python = str(home / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, *LIGHT], check=True)
    subprocess.run([*pip, "--no-deps", str(wheel)], check=True)

    def ask(*arguments: str) -> str:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        done = subprocess.run(arguments, check=True, cwd=home, env=environment, capture_output=True, text=True)
        return done.stdout

    found = ask(
        python, "-c", "import importlib.util as u; print(u.find_spec('torch'), u.find_spec('attncheck').origin)"
    )
    if not found.startswith("None ") or str(home) not in found:
        sys.exit(f"the clean environment is not clean: {found}")
    command = str(home / "bin" / "attncheck")
    listed = ask(command, "list")
    absent = [path.stem for path in (ROOT / "cases" / "suites").glob("*.yaml") if path.stem not in listed.split()]
    if absent:
        sys.exit(f"`attncheck list` does not name the suites {absent}:\n{listed}")
    if "properties" not in json.loads(ask(command, "schema")):
        sys.exit("`attncheck schema` printed no JSON schema")


def main() -> None:
    """Check the one wheel of the folder given."""
    dist, scratch = (Path(argument).resolve() for argument in sys.argv[1:3])
    (wheel,) = dist.glob("attncheck-*.whl")
    check_files(wheel)
    check_installed(wheel, scratch)
    print(f"{wheel.name}: whole, and works without torch and the checkout")


if __name__ == "__main__":
    main()
