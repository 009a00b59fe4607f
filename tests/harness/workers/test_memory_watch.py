"""The watch over memory: whom it kills and why, when it looks again, and that real processes are caught."""

import os
import time
from pathlib import Path

import pytest

from attncheck.harness.workers import limits
from attncheck.harness.workers import starting as starting_module
from attncheck.harness.workers.limits import Limit, MemoryWatch, causes, held_bytes, reserve_of, seconds_to_wait
from attncheck.harness.workers.process import ProcessEndedError, WorkerProcess

MIB, GIB = 2**20, 2**30


def start(monkeypatch, code):
    """A process that runs ``code`` where the worker would be."""
    monkeypatch.setattr(starting_module, "_START", f"import os, sys, time\n{code}")
    return WorkerProcess()


@pytest.mark.parametrize(
    ("held", "limit", "room", "expected"),
    [
        ({1: 4 * GIB, 2: GIB}, 4 * GIB, GIB, {}),
        ({1: 4.25 * GIB, 2: GIB}, 4 * GIB, GIB, {1: "out of memory (limit 4 GiB, it took 4.25 GiB)"}),
        ({1: 5 * GIB, 2: 6 * GIB}, None, 0, {}),
        (
            {1: 5 * GIB, 2: 13.2 * GIB},
            None,
            -1,
            {2: "out of memory (the host had 900 MiB left; the process took 13.2 GiB)"},
        ),
        ({1: 5 * GIB, 2: 6 * GIB}, 5.5 * GIB, -1, {2: "out of memory (limit 5.5 GiB, it took 6 GiB)"}),
        ({1: 900 * MIB}, None, -1, {}),
        ({1: 9 * GIB}, None, None, {}),
        ({}, GIB, -1, {}),
    ],
)
def test_one_over_its_limit_is_killed_or_else_the_largest_where_the_host_runs_short(held, limit, room, expected):
    assert causes(held, limit, room, 900 * MIB) == expected


def test_it_looks_again_before_a_process_can_fill_what_is_left():
    assert seconds_to_wait([], None, None) == 0.2
    assert seconds_to_wait([GIB], 2 * GIB, 512 * MIB) == 0.125
    assert seconds_to_wait([GIB, 1.6 * GIB], 2 * GIB, 4 * GIB) == pytest.approx(0.1)
    assert seconds_to_wait([3 * GIB], 2 * GIB, -GIB) == 0.05
    # most of a small host is used
    assert [reserve_of(free * GIB) / GIB for free in (1, 2, 16, 80)] == [0.25, 0.5, 1, 4]


def test_one_that_takes_too_much_with_what_it_started_is_killed_and_the_others_are_not(monkeypatch):
    forks = """
for _ in range(3):
    if not os.fork():
        held = b'x' * (60 * 2**20)
        time.sleep(60)
time.sleep(60)
"""
    watch = MemoryWatch(150 * MIB)
    with start(monkeypatch, "time.sleep(60)") as quiet, start(monkeypatch, forks) as process:
        watch.add(quiet)
        watch.add(process)
        with pytest.raises(ProcessEndedError, match=r"out of memory \(limit 150 MiB, it took \d\d\d"):
            process.receive(Limit(60))
        assert not quiet.has_ended
        session, deadline = process.identity, time.monotonic() + 60
        while held_bytes([session], None)[session] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert held_bytes([session], None) == {session: 0}


def test_files_in_memory_count_once(monkeypatch):
    code = """
import mmap
file = os.memfd_create('held')
for _ in range(50): os.write(file, bytes(2**20))
mapped = mmap.mmap(file, 0)
print("written", flush=True)
os.read(int(sys.argv[1]), 1)
for place in range(0, len(mapped), 4096): mapped[place]
print("mapped", flush=True)
time.sleep(60)
"""
    with start(monkeypatch, code) as process:
        for word in ("written", "mapped"):
            deadline = time.monotonic() + 60
            while word not in process.output() and time.monotonic() < deadline:
                time.sleep(0.01)
            assert 50 * MIB < held_bytes([process.identity], None)[process.identity] < 80 * MIB
            os.write(process._writing, b"x")


def test_pages_that_copies_share_count_once(monkeypatch):
    code = """
held = b'x' * (50 * 2**20)
for _ in range(8): os.fork() or time.sleep(60)
os.write(1, b"forked")
time.sleep(60)
"""
    with start(monkeypatch, code) as process:
        deadline = time.monotonic() + 60
        while process.output() != "forked" and time.monotonic() < deadline:
            time.sleep(0.01)
        session = process.identity
        assert held_bytes([session], None)[session] > 400 * MIB
        if not Path("/proc/self/smaps_rollup").exists():
            pytest.skip("this kernel does not report the share of a process")
        assert 50 * MIB < held_bytes([session], 400 * MIB)[session] < 120 * MIB


def test_where_the_host_runs_short_the_largest_is_killed_and_the_next_only_if_that_does_not_help(monkeypatch):
    killed = []

    class Fake:
        def __init__(self, identity):
            self.identity, self.has_ended = identity, False

        def end_for(self, cause):
            killed.append(f"{self.identity}: {cause}")
            self.has_ended = True

    free, held = 64 * GIB, {1: 2 * GIB, 2: 3 * GIB, 3: GIB // 2}
    monkeypatch.setattr(limits, "free_host_bytes", lambda: free)
    monkeypatch.setattr(limits, "held_bytes", lambda sessions, _enough: {each: held[each] for each in sessions})
    watch = MemoryWatch()
    monkeypatch.setattr(watch, "_is_running", True)  # without its thread
    for process in map(Fake, held):
        watch.add(process)
    watch._look()
    assert killed == []
    free = GIB
    watch._look()
    assert killed == ["2: out of memory (the host had 1 GiB left; the process took 3 GiB)"]
    watch._look()  # its memory has not come back yet
    assert len(killed) == 1
    held[2] = 0
    watch._look()
    assert killed[1:] == ["1: out of memory (the host had 1 GiB left; the process took 2 GiB)"]
    held[1] = 0
    watch._look()
    assert len(killed) == 2  # the third is too small to be the reason


def test_the_thread_ends_with_the_last_process_and_begins_with_the_next(monkeypatch):
    watch = MemoryWatch(GIB)
    for _ in range(2):
        with start(monkeypatch, "time.sleep(60)") as process:
            watch.add(process)
            assert watch._is_running
        deadline = time.monotonic() + 60
        while watch._is_running and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not watch._is_running
