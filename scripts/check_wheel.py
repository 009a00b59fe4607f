"""Check that a built wheel is complete, works outside the checkout, and partly works without torch.

    python scripts/check_wheel.py DIST_FOLDER SCRATCH_FOLDER

The import root contains the rooms as links. A build that did not follow them, or lost the suites, could still be
installed. So the wheel's files are compared with those of the rooms, and the wheel is installed into a clean
environment in SCRATCH_FOLDER with its light dependencies only. There `attncheck list` and `attncheck list schema` must
name every suite without torch. A second environment has all dependencies. In it the first steps of
docs/adding-a-backend.md must work: `attncheck new backend`, the command it prints, and the test it writes. Exits with a
message if a check fails.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("reference", "cases", "backends", "reports", "harness")
LIGHT = ("pydantic", "PyYAML", "typer", "rich", "tabulate")
"""Dependencies of listing, validating and reporting."""
WAYS = ("function", "classes")
"""Kinds of backends that need only attncheck; `tox run -e vllm` tries those that need vLLM."""


def expected_files() -> set[str]:
    """Return the path inside the wheel of every file that belongs in it: all that git has of the rooms."""
    root = {f"attncheck/{path.name}" for path in (ROOT / "src" / "attncheck").iterdir() if path.is_file()}
    words = ["git", "ls-files", "-z", *ROOMS]
    tracked = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    rooms = {f"attncheck/{name}" for name in tracked.stdout.split("\0") if name}
    expected = {f"attncheck/expected/{path.name}" for path in (ROOT / "docs" / "expected").glob("*.yaml")}
    return root | rooms | expected


def check_files(wheel: Path) -> None:
    """Exit if the wheel lacks a file of the rooms, or has a file that they do not have."""
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("attncheck/")}
    expected = expected_files()
    if packed != expected:
        sys.exit(f"{wheel.name}: missing {sorted(expected - packed)}, unexpected {sorted(packed - expected)}")


class Home:
    """A clean environment with the packages of ``installations``; its programs run in the folder ``outside``."""

    def __init__(self, folder: Path, outside: Path, *installations: Sequence[str]) -> None:
        self.folder, self.outside = folder, outside
        venv.create(folder, clear=True, with_pip=True)
        pip = [self.tool("python"), "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
        for words in installations:
            subprocess.run([*pip, *words], check=True)
        found = self.run("python", "-c", "import attncheck; print(attncheck.__file__)")
        if not found.startswith(str(folder)):
            sys.exit(f"the clean environment is not clean: attncheck is at {found}")

    def tool(self, name: str) -> str:
        """Return the path of one of its programs."""
        return str(self.folder / "bin" / name)

    def run(self, program: str, *arguments: str) -> str:
        """Run one of its programs and return its standard output; exit with all output if it fails."""
        # Variables such as PYTHONPATH would make the checkout visible.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        words = [self.tool(program), *arguments]
        done = subprocess.run(words, cwd=self.outside, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{shlex.join(words)} left with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout


def check_without_torch(wheel: Path, scratch: Path, outside: Path) -> None:
    """Install without torch, and run the two commands that must not need it."""
    home = Home(scratch / "without_torch", outside, LIGHT, ["--no-deps", str(wheel)])
    if (found := home.run("python", "-c", "import importlib.util as u; print(u.find_spec('torch'))").strip()) != "None":
        sys.exit(f"the clean environment is not clean: {found}")
    listed = home.run("attncheck", "list")
    absent = [path.stem for path in (ROOT / "cases" / "suites").glob("*.yaml") if path.stem not in listed.split()]
    if absent:
        sys.exit(f"`attncheck list` does not name the suites {absent}:\n{listed}")
    if "properties" not in json.loads(home.run("attncheck", "list", "schema")):
        sys.exit("`attncheck list schema` printed no JSON schema")


def check_first_steps(wheel: Path, scratch: Path, outside: Path) -> None:
    """Install with all dependencies, and create, run and test a backend of each kind in :data:`WAYS`."""
    home = Home(scratch / "with_torch", outside, [str(wheel)])
    for kind in WAYS:
        printed = home.run("attncheck", "new", "backend", "mine", "--kind", kind, "--output", kind)
        run, test = (shlex.split(line) for line in re.findall(r"^  (.*)$", printed, re.MULTILINE))
        if "passed: 1 backend, 4 cases" not in (output := home.run(*run, "--case", "decode*")):
            sys.exit(f"the {kind} that is written does not pass:\n{output}")
        output = home.run(*test)
        if not re.search(r"=+ \d+ passed", output) or re.search(r"\d+ (failed|error)", output):
            sys.exit(f"the test of the {kind} that is written does not pass:\n{output}")


def main() -> None:
    """Check the only wheel in the folder given."""
    dist, scratch = (Path(argument).resolve() for argument in sys.argv[1:3])
    (wheel,) = dist.glob("attncheck-*.whl")
    check_files(wheel)
    # SCRATCH_FOLDER may be inside the checkout, where pytest would use the checkout's settings.
    with tempfile.TemporaryDirectory() as outside:
        check_without_torch(wheel, scratch, Path(outside))
        check_first_steps(wheel, scratch, Path(outside))
    print(f"{wheel.name}: whole, works without the checkout, and without torch where it need not compute")


if __name__ == "__main__":
    main()
