"""``attncheck run`` in a process of its own, as users run it on vLLM's classes."""

import os
import subprocess
import sys

import pytest

from attncheck.reports.run_file.store import read_run

QUIET = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {
    "VLLM_LOGGING_LEVEL": "ERROR"
}


@pytest.fixture(scope="session")
def run_vllm():
    """``run_vllm(output, "--backend", ..., code=0, NAME=value)``: the run in the file ``output``, and what it prints."""

    def run_vllm(output, *words, code=0, **environment):
        command = [sys.executable, "-m", "attncheck", "run", *words, "--output", str(output)]
        env = QUIET | environment
        done = subprocess.run(
            command, env=env, cwd=output.parent, capture_output=True, text=True, check=False, timeout=900
        )
        assert done.returncode == code, done.stdout + done.stderr
        return read_run(output), done.stdout

    return run_vllm
