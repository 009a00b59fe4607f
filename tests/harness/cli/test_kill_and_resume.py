"""A run that is killed at any moment and resumed has the records of one that was left alone, in their order."""

import json
import random
import signal
import subprocess
import sys
import time

import pytest

from attncheck.reports.run_file.store import lacks_header, read_run

WORDS = "run reference ./wrong.py:Wrong --suite smoke --case decode.*,soft-cap --check numerics,lse --device cpu"
COMMAND = [sys.executable, "-m", "attncheck", *WORDS.split(), "-j", "2", "--no-cache", "--quiet"]
KILLS = 12


def started(*words):
    return subprocess.Popen([*COMMAND, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def records(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "duration_s"} for line in lines if line["kind"] == "record"]


@pytest.mark.slow
def test_a_run_that_is_killed_and_resumed_is_that_of_a_run_left_alone(folder, preloaded, workers_of, is_alive):
    subprocess.run([sys.executable, "-c", ""], check=True)  # waits until the preloaded process is there
    began = time.monotonic()
    assert started("--output", "whole.jsonl").wait(60) == 1
    took = time.monotonic() - began
    moments = random.Random(KILLS)
    for number in range(KILLS):
        cut = folder / f"cut{number}.jsonl"
        process = started("--output", cut.name)
        time.sleep(moments.uniform(0, took))
        process.send_signal(signal.SIGSTOP)  # so that it starts no worker behind the list
        workers = workers_of(process.pid)
        process.kill()
        process.wait()
        killed = time.monotonic()
        while any(map(is_alive, workers)):
            assert time.monotonic() - killed < 5  # a second, and what a busy machine adds
            time.sleep(0.005)
        kept = cut.read_bytes().rpartition(b"\n")[0] if cut.exists() else b""
        if not cut.exists() or lacks_header(cut) or not read_run(cut).complete:
            assert started("--resume" if cut.exists() else "--output", cut.name).wait(60) == 1
        assert read_run(cut).complete
        assert cut.read_bytes().startswith(kept)
        assert records(cut) == records(folder / "whole.jsonl")
