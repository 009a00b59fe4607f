"""What a shell completes, as typer requests it: by environment variables, without torch."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from attncheck.cases.loader import suite_names
from attncheck.harness.cli.common import backends, cases, checks, suites


def test_names_are_completed(folder):
    assert backends("torch_") == ["torch_sdpa", "torch_varlen", "torch_mla"]
    assert suites("smo") == ["smoke"]
    assert suites("smoke,dec") == ["smoke,decode"]
    assert checks("num") == ["numerics"]
    assert set(suites("")) == set(suite_names())
    assert backends("./wr") == []  # the shell completes files


@pytest.mark.parametrize("named", [["small.yaml"], ["small.yaml", "nothing.yaml"], None])
def test_cases_are_of_the_suites_that_are_typed(named, folder):
    context = SimpleNamespace(params={"suites": named})
    assert cases(context, "small/pre") == (["small/prefill"] if named else [])
    assert ("smoke/decode.float16" in cases(context, "smoke/dec")) != bool(named)
    assert "prefill" in cases(context, "pre")


@pytest.mark.parametrize(("typed", "expected"), [("run --suite smo", "smoke"), ("do", "doctor")])
def test_the_shell_gets_them_without_torch(typed, expected):
    code = "import sys; from attncheck.harness.cli.app import main; main([]); sys.exit('torch' in sys.modules)"
    asked = {"_ATTNCHECK_COMPLETE": "complete_bash", "COMP_WORDS": f"attncheck {typed}"}
    env = os.environ | asked | {"COMP_CWORD": str(len(typed.split()))}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, [expected]), done.stderr
