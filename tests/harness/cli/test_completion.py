"""What a shell completes, as typer requests it: by environment variables, without torch."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from attncheck.cases.loader import load_suite, suite_names
from attncheck.harness.cli.common import backends, cases, checks, suites


def test_names_are_completed(folder: Path) -> None:
    assert backends("torch_") == ["torch_sdpa", "torch_varlen", "torch_mla"]
    assert suites("smo") == ["smoke"]
    assert suites("smoke,dec") == ["smoke,decode"]
    assert checks("num") == ["numerics"]
    assert set(suites("")) == set(suite_names())
    assert backends("./wr") == []  # the shell completes files


@pytest.mark.parametrize("named", [None, ["small.yaml"], ["small.yaml", "nothing.yaml"]])
def test_cases_are_of_the_suites_that_are_typed(named: list[str] | None, folder: Path) -> None:
    context = SimpleNamespace(params={"suites": named})
    expected = (
        ["prefill", "small/prefill"]
        if named
        else [name for case in load_suite("smoke").cases for name in (case.id, case.key)]
    )
    found = [name for begin in ("pre", "small/pre") for name in cases(context, begin)]
    assert found == [name for name in expected if name.startswith(("pre", "small/pre"))]


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("attncheck run --suite smo", "smoke"),
        ("attncheck do", "doctor"),
    ],
)
def test_the_shell_gets_them_without_torch(typed: str, expected: str) -> None:
    code = "import sys; from attncheck.harness.cli.app import main; main([]); sys.exit('torch' in sys.modules)"
    env = os.environ | {
        "_ATTNCHECK_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split()) - 1),
    }
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, [expected]), done.stderr
