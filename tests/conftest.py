"""Settings of every test: property tests repeat exactly, and no machine is too slow for one. How docs are tried."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    # Triton reads it when a kernel is decorated, at the import of whichever test comes first.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The documents show what a terminal of 100 columns shows, and pytest-xdist sets the width of its workers.
os.environ["COLUMNS"] = "100"

# Tests compute every truth, and leave the user's cache as it is.
os.environ["ATTNCHECK_NO_CACHE"] = "1"

settings.register_profile("attncheck", derandomize=True, deadline=None, database=None)
settings.load_profile("attncheck")


@pytest.fixture(scope="session")
def shell() -> Callable[[str, Path], tuple[int, str]]:
    """``shell(command, folder)``: run it there, without a GPU, with this interpreter first; exit code and output."""

    def run(command: str, folder: Path) -> tuple[int, str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        env = {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.fixture(scope="session")
def assert_printed() -> Callable[[str, str], None]:
    """``assert_printed(expected, printed)``: every line stands there, in order; ``...`` stands for any lines.

    Figures with a decimal point and the machine's own words are not compared; counts are.
    """

    def check(expected: str, printed: str) -> None:
        rest = iter([_plain(line) for line in printed.splitlines()])
        for line in expected.splitlines():
            if line.strip() not in ("", "..."):
                assert _plain(line) in rest, f"said was {line!r}; printed was:\n{printed}"

    return check


def _plain(line: str) -> str:
    """A line without what differs from machine to machine: torch's version, cores, figures, padding of tables."""
    line = re.sub(r"torch \S+,|\d+ cores?", "#", line)
    return " ".join(re.sub(r"\d+(\.\d+)+(e[+-]?\d+)?", "#", line).split())
