"""The scripts beside the tests import Triton, which is not everywhere: they are none of pytest's modules."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

collect_ignore = ["launches.py", "census.py", "flex_calls.py"]


@pytest.fixture
def printed_by(preloaded: None) -> Callable[..., Any]:
    """``printed_by("launches.py", *arguments)``: what the script prints, read as JSON; Triton compiles in it."""

    def run(script: str, *arguments: object) -> Any:
        env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        command = [sys.executable, str(Path(__file__).with_name(script)), *map(str, arguments)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout)

    return run
