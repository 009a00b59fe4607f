"""The environment of a run is stated, and an installation needs neither git nor a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import attncheck
from attncheck.harness.run import environment
from attncheck.harness.run.environment import collect_environment

SRC = Path(attncheck.__file__).parents[1]


def test_what_it_says_is_what_runs() -> None:
    found = collect_environment("cpu")
    assert found.torch == torch.__version__
    assert found.attncheck == attncheck.__version__
    assert found.device == "cpu"
    assert found.driver is None
    assert found.cores >= 1
    assert found.cpu


def test_tools_are_asked_once_and_policies_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    first = collect_environment("cpu")
    monkeypatch.setattr(subprocess, "run", lambda *_a, **_k: pytest.fail("asked again"))
    assert collect_environment("cpu") == first
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: not first.deterministic)
    assert collect_environment("cpu").deterministic != first.deterministic


def test_a_missing_tool_is_none() -> None:
    assert environment._first_line("no-such-tool-at-all") is None
    assert environment._first_line("false") is None


def test_a_checkout_that_is_not_installed_knows_its_version() -> None:
    code = "import attncheck; print(attncheck.__version__)"
    # -S leaves site-packages out, so that only PYTHONPATH finds attncheck and no metadata is there.
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == attncheck.__version__
