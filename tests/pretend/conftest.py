"""Fixture that runs attncheck's command in processes with the pretend device, or only a CPU."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
from pretend_cuda import PretendDevice, Settings, present

from attncheck.reports.run_file.records import RunFooter, RunHeader, parse_line

RunCommand = Callable[..., tuple[RunHeader, list]]
SMALL = """\
suite: small
description: one decode
defaults: {layer: {num_heads: 4, num_kv_heads: 2, head_size: 32, dtype: float32}}
cases: [{id: decode, batch: q1s20_q1s7}]
"""


@pytest.fixture
def device() -> Iterator[PretendDevice]:
    with present() as pretended:
        yield pretended


@pytest.fixture
def small_suite(tmp_path: Path) -> None:
    """The suite ``small.yaml``, in the folder of the commands."""
    (tmp_path / "small.yaml").write_text(SMALL)


@pytest.fixture
def run_attncheck(tmp_path: Path, small_suite: None, preloaded: None) -> RunCommand:
    """``run_attncheck(words, settings)`` returns header and records of a run, on the CPU without settings."""

    def run(words: Sequence[str], settings: Settings | None = None, command: str = "run") -> tuple[RunHeader, list]:
        device = "cpu" if settings is None else settings.type
        output = tmp_path / f"{device}.jsonl"
        paths = [str(Path(__file__).parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        if settings is not None:
            env["ATTNCHECK_PRETEND_CUDA"] = json.dumps(asdict(settings))
        line = [sys.executable, "-m", "attncheck", command, "--device", device, "--output", str(output), *words]
        done = subprocess.run(line, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert output.exists(), done.stdout + done.stderr
        header, *records, footer = map(parse_line, output.read_text(encoding="utf-8").splitlines())
        assert isinstance(footer, RunFooter)
        assert footer.errors == ()
        output.unlink()
        return header, records

    return run
