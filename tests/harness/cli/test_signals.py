"""Signals that end a run, at each of its stages: at once, without a traceback, and without a process that stays."""

import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from attncheck.reports.run_file.store import read_run

Start = Callable[..., "subprocess.Popen[str]"]
Workers = Callable[[int], list[int]]
IsAlive = Callable[[int], bool]

HANGS = "__import__('pathlib').Path('began').touch(); __import__('ctypes').PyDLL(None).sleep(60)"
"""Hangs in C, and holds the lock of the interpreter."""

# Tests that run in the background ignore SIGINT, and so do processes that they start.
TYPED = """\
import signal, sys
from attncheck.__main__ import main
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main())
"""


def wait_for(is_there: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_there():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def catches(pid: int, number: int) -> bool:
    (mask,) = re.findall(r"^SigCgt:\s+(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.fixture
def start(folder: Path, preloaded: None) -> Start:
    """``start(*words, forward=TEXT, top=TEXT)``: a run of a backend with these statements in its forward or module."""

    def start(*more: str, forward: str = "", top: str = "", **streams: int) -> "subprocess.Popen[str]":
        wrong = (folder / "wrong.py").read_text()
        (folder / "mine.py").write_text(f"{top}\n{wrong.replace('result.mul_(1.25)', forward)}")
        (folder / "typed.py").write_text(TYPED)
        words = ["run", "--suite", "small.yaml", *more, "--backend", "./mine.py:Wrong", "--output", "cut.jsonl", "-j2"]
        piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
        return subprocess.Popen([sys.executable, "typed.py", *words], text=True, **piped)  # type: ignore[call-overload, no-any-return]

    return start


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_while_a_backend_hangs_in_its_import_ends_the_run(
    start: Start, workers_of: Workers, is_alive: IsAlive, number: signal.Signals
) -> None:
    process = start(top=HANGS)
    wait_for(Path("began").exists)
    workers = workers_of(process.pid)
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert workers
    assert (process.returncode, out, err) == (128 + number, "", f"interrupted by {number.name}\n")
    wait_for(lambda: not any(map(is_alive, workers)), 10)


def test_a_signal_before_the_first_record_leaves_a_file_that_can_be_resumed(
    start: Start,
    workers_of: Workers,
    is_alive: IsAlive,
) -> None:
    process = start(forward=HANGS)
    wait_for(Path("began").exists)
    workers = workers_of(process.pid)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (130, "interrupted by SIGINT\n")
    assert "interrupted by SIGINT: 0 of 2 cases begun; the remaining cases were not examined" in out
    assert re.search(r"^resume: .* run --suite small.yaml .*--resume cut.jsonl$", out, re.MULTILINE)
    assert read_run("cut.jsonl").records == ()
    wait_for(lambda: not any(map(is_alive, workers)), 10)


def test_a_signal_ends_with_what_was_found_and_leaves_a_run_that_can_be_read(start: Start) -> None:
    number = signal.SIGTERM
    process = start("--backend", "reference", forward=HANGS)
    wait_for(Path("began").exists)
    wait_for(lambda: any(record.case_id == "prefill" for record in read_run("cut.jsonl").records))
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert err.splitlines()[-1] == f"interrupted by {number.name}"
    assert re.search(r"^numerics +2/2$", out, re.MULTILINE)
    assert f"\ninterrupted by {number.name}: 2 of 4 cases begun; the remaining cases were not examined\n" in out
    assert re.search(r"^resume: .* run --suite small.yaml .*--resume cut.jsonl$", out, re.MULTILINE)
    assert re.search(r"^unfinished: 2 backends \(1 passed, 1 not examined\)", out, re.MULTILINE)
    stored = read_run("cut.jsonl")
    assert not stored.complete
    assert {record.backend for record in stored.records} == {"reference"}


def test_a_second_signal_ends_a_run_whose_report_is_not_read(
    start: Start, workers_of: Workers, is_alive: IsAlive
) -> None:
    number = signal.SIGTERM
    reading, writing = os.pipe()
    process = start(forward=HANGS, stdout=writing)
    wait_for(Path("began").exists)
    workers = workers_of(process.pid)
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ)))
    os.set_blocking(writing, True)
    process.send_signal(number)
    wait_for(lambda: not catches(process.pid, number))
    wait_for(lambda: not any(map(is_alive, workers)), 10)
    assert process.poll() is None
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    os.close(reading)
    os.close(writing)
    assert (process.returncode, err) == (-number, "")
    assert not read_run("cut.jsonl").complete


def test_the_processes_of_a_run_that_is_killed_end_though_they_hang(
    start: Start,
    workers_of: Workers,
    is_alive: IsAlive,
) -> None:
    process = start(forward=HANGS)
    wait_for(Path("began").exists)
    workers = workers_of(process.pid)
    process.kill()
    process.communicate()
    killed = time.monotonic()
    wait_for(lambda: not any(map(is_alive, workers)), 10)
    assert workers
    assert time.monotonic() - killed < 5  # of the 60 that they would take


def test_a_process_whose_run_is_gone_before_it_begins_ends(tmp_path: Path) -> None:
    """Whatever requests wait in its pipe."""
    reads, writes = os.pipe()
    os.write(writes, b'{"kind":"prepare"}\n' * 3)
    code = "import sys; from attncheck.harness.workers.worker import main; main(sys.argv[1:])\n"
    code += "print('torch' in sys.modules)"
    words = [sys.executable, "-c", code, str(reads), str(writes), "1"]
    done = subprocess.run(words, pass_fds=(reads, writes), capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "False\n")
    os.close(reads)
    os.close(writes)
