"""Processes and memory outside of a backend's process, and a machine that stops: in one run of an ordinary user.

Its processes are fresh ones: a preloaded process changes who adopts a daemon.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from attncheck.reports.run_file.records import Record
from attncheck.reports.run_file.store import read_run

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="the deeds use Linux' own calls")]

SUITE = """\
suite: deeds
defaults: {batch: q5, layer: {num_heads: 1, num_kv_heads: 1, dtype: float32}}
cases:
  - {id: daemon, layer: {head_size: 16}}
  - {id: daemon_in_session, layer: {head_size: 32}}
  - {id: undumpable, layer: {head_size: 48}}
  - {id: stopped, layer: {head_size: 64}}
  - {id: memory, layer: {head_size: 80}}
"""
LIMIT_S = 15


def family_of(process: int) -> list[int]:
    """Return a process and its descendants."""
    children: list[int] = []
    with suppress(OSError):
        children = [int(each) for each in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return [process, *(number for child in children for number in family_of(child))]


def send(number: signal.Signals, processes: list[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def records(folder: Path, start: Callable[..., "subprocess.Popen[str]"], as_user: list[str]) -> dict[str, Record]:
    """The records of a run during which the machine stops once, for longer than the time limit of a case."""
    (folder / "deeds.yaml").write_text(SUITE)
    words = ["run", "./deeds.py:Deeds", "--suite", "deeds.yaml", "--output", "deeds.jsonl", "--memory-limit", "1.1GiB"]
    with start(*words, "--case-timeout", LIMIT_S, before=as_user) as process:
        while not (folder / "working").exists() and process.poll() is None:
            time.sleep(0.05)
        if process.poll() is None:
            family = family_of(process.pid)
            send(signal.SIGSTOP, family)
            time.sleep(LIMIT_S + 1)
            send(signal.SIGCONT, family)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 1, errors
    return {record.case_id: record for record in read_run(folder / "deeds.jsonl").records}


def test_no_process_outlives_the_run(records: dict[str, Record], folder: Path) -> None:
    started = list(map(int, (folder / "started").read_text().split()))
    assert len(started) >= 3
    left = list(filter(is_alive, started))
    send(signal.SIGKILL, left)
    assert left == []
    assert {records[case].outcome for case in ("daemon", "daemon_in_session", "undumpable")} == {"passed"}


def test_files_in_memory_count(records: dict[str, Record]) -> None:
    assert records["memory"].outcome == "crashed"
    assert "out of memory (limit 1.1 GiB" in str(records["memory"])


def test_a_machine_that_stops_costs_no_case(records: dict[str, Record]) -> None:
    assert records["stopped"].outcome == "passed"
