"""Signals that end a run, at each of its stages: at once, without a traceback, and without a process that stays."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from attncheck.harness.cli.common import interruptible, signal_of
from attncheck.reports.run_file.store import read_run

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
RESUME = re.compile(r"^resume: .* run .*--suite small.yaml .*--resume cut.jsonl$", re.MULTILINE)


def wait_for(is_there, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not is_there():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def catches(pid, number):
    (mask,) = re.findall(r"^SigCgt:\s+(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.fixture
def start(folder, preloaded, workers_of, is_alive):
    """``start(others, forward=TEXT, top=TEXT)``: a run of others, and of one with these statements in forward or module.

    Returns the run when the statements begin. No process of a backend stays at the end.
    """
    workers = []

    def start(others="", *, forward="", top="", **streams):
        wrong = (folder / "wrong.py").read_text()
        (folder / "mine.py").write_text(f"{top}\n{wrong.replace('result.mul_(1.25)', forward)}")
        (folder / "typed.py").write_text(TYPED)
        words = f"run {others} ./mine.py:Wrong --suite small.yaml --check numerics --output cut.jsonl -j2".split()
        piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
        process = subprocess.Popen([sys.executable, "typed.py", *words], text=True, **piped)
        wait_for(Path("began").exists)
        workers.extend(workers_of(process.pid))
        return process

    yield start
    assert workers
    wait_for(lambda: not any(map(is_alive, workers)), 10)  # of the 60 seconds that they would take


def test_a_signal_while_a_backend_hangs_in_its_import_ends_the_run(start):
    process = start(top=HANGS)
    process.send_signal(signal.SIGHUP)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (128 + signal.SIGHUP, "", "interrupted by SIGHUP\n")


def test_a_signal_before_the_first_record_leaves_a_file_that_can_be_resumed(start):
    process = start(forward=HANGS)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (130, "interrupted by SIGINT\n")
    assert "interrupted by SIGINT: 0 of 2 cases begun; the remaining cases were not examined" in out
    assert RESUME.search(out)
    assert read_run("cut.jsonl").records == ()


def test_a_signal_ends_with_what_was_found_and_leaves_a_run_that_can_be_read(start):
    process = start("reference --report json=found.json", forward=HANGS)
    wait_for(lambda: any(record.case_id == "prefill" for record in read_run("cut.jsonl").records))
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err.splitlines()[-1]) == (143, "interrupted by SIGTERM")
    assert "reference: PASSED: 2 cases right" in out
    assert "\ninterrupted by SIGTERM: 2 of 4 cases begun; the remaining cases were not examined\n" in out
    assert RESUME.search(out)
    assert re.search(r"^unfinished: 2 backends \(1 passed, 1 not examined\)", out, re.MULTILINE)
    stored = read_run("cut.jsonl")
    assert not stored.complete
    assert {record.backend for record in stored.records} == {"reference"}
    assert json.loads(Path("found.json").read_text())["runs"][0]["complete"] is False


def test_a_second_signal_ends_a_run_whose_report_is_not_read(start):
    number = signal.SIGTERM
    reading, writing = os.pipe()
    process = start(forward=HANGS, stdout=writing)
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ)))
    os.set_blocking(writing, True)
    process.send_signal(number)
    wait_for(lambda: not catches(process.pid, number))
    assert process.poll() is None
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    os.close(reading)
    os.close(writing)
    assert (process.returncode, err) == (-number, "")
    assert not read_run("cut.jsonl").complete


def test_a_process_whose_run_is_gone_before_it_begins_ends(tmp_path):
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_the_first_signal_is_raised_and_the_second_ends_the_process(number):
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with interruptible():
            with pytest.raises(KeyboardInterrupt) as caught:
                os.kill(os.getpid(), number)
            assert signal_of(caught.value) == number
            assert signal.getsignal(number) == signal.SIG_DFL
        assert signal.getsignal(number) == signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN)
        with interruptible():  # as under nohup
            os.kill(os.getpid(), number)
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)
    assert signal_of(KeyboardInterrupt()) == signal.SIGINT


def test_another_thread_leaves_the_handlers_alone():
    found = []

    def work():
        with interruptible():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGTERM)]
