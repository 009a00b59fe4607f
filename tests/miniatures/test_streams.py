"""The check ``streams`` finds a missing wait between two streams, and raises no alarm about streams that wait.

A run on a GPU, if there is one, else on the pretend device, whose held streams keep back what they write.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from inline_snapshot import snapshot
from preloaded_python import Preloaded

from attncheck.reports.run_file.records import parse_line

HERE = Path(__file__).resolve().parent
RIGHT = ("WaitsForBoth", "WaitsOnTheHost")
WRONG = ("LeavesForward", "StartsEarly", "OnTheDefaultStream", "LeavesTheWriter")
BY_CHANCE = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may write the cache in time by chance")
SUITE = """\
suite: small
description: two calls of forward
defaults: {layer: {num_heads: 4, num_kv_heads: 2, head_size: 32, dtype: float32}}
cases:
  - {id: cut, batch: q1s9_q3s7_q5, path: {micro_batch: {cuts: [2]}}}
"""


@pytest.fixture(scope="module")
def records(tmp_path_factory, _preloaded):
    folder = tmp_path_factory.mktemp("streams")
    (folder / "small.yaml").write_text(SUITE)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if not torch.cuda.is_available():
        paths = [str(HERE.parent / "pretend"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        env |= {"PYTHONPATH": os.pathsep.join(paths), "ATTNCHECK_PRETEND_CUDA": "{}"}
    words = [f"--backend={HERE / 'streams.py'}:{name}" for name in (*RIGHT, *WRONG)]
    words += ["--suite=small.yaml", "--check=streams", "--device=cuda", "--in-process", "--output=run.jsonl"]
    command = [sys.executable, "-m", "attncheck", "run", *words]
    if _preloaded is not None:
        _preloaded.install()
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=False)
    Preloaded.uninstall()
    assert done.returncode == 1, done.stdout + done.stderr
    lines = (folder / "run.jsonl").read_text(encoding="utf-8").splitlines()
    return {found.backend: found for found in map(parse_line, lines[1:-1])}


@pytest.mark.parametrize("name", RIGHT)
def test_streams_that_wait_for_each_other_raise_no_alarm(records, name):
    found = records[name]
    assert found.outcome == "passed"
    waits = [note for note in found.notes if note.startswith("forward waits for the device")]
    assert len(waits) == (name == "WaitsOnTheHost")


@pytest.mark.parametrize("name", [*WRONG[:-1], pytest.param(WRONG[-1], marks=BY_CHANCE)])
def test_a_missing_wait_is_found(records, name):
    found = records[name]
    assert found.outcome == "failed"
    assert found.summary.startswith("on a stream of its own, as of the end of forward's work there: ")
    causes = {"LeavesForward": "changed later", "StartsEarly": "are NaN", "OnTheDefaultStream": "are NaN"}
    assert causes.get(name, "another stream") in found.meaning


def test_the_finding_names_what_is_wrong_and_the_likely_cause(records):
    found = records["LeavesForward"]
    assert found.summary == snapshot(
        "on a stream of its own, as of the end of forward's work there: 7 slots are wrong, the first: slot 21 (page 1, offset 5; request 1, position 5) was never written"
    )
    assert found.meaning == snapshot(
        "result or cache changed later: probably the current stream does not wait for work on another stream"
    )
