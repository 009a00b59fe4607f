"""What is seen while a run goes: nothing on stdout, a bar on terminals, few lines elsewhere."""

import io
import itertools
import re
import sys
import threading
from contextlib import nullcontext

import pytest
from inline_snapshot import snapshot

from attncheck.harness.cli import progress
from attncheck.harness.cli.progress import CompiledKernels, ProgressLines, Tally, progress_bar
from attncheck.reports.run_file.records import Crashed, Failed, Passed, Unsupported


def record(number, *, failed=False, backend="b[1]", check="numerics", round_number=0):
    who = {
        "suite": "s",
        "case_id": f"case{number}",
        "case_hash": "0" * 12,
        "check": check,
        "round": round_number,
        "seed": 0,
        "backend": backend,
        "backend_ref": "b",
        "backend_version": "",
        "environment": "e" * 12,
        "attncheck_version": "0.1.0",
    }
    return Failed.model_validate(who | {"summary": "1 of 2 rows"}) if failed else Passed.model_validate(who)


@pytest.fixture
def lines(capsys, monkeypatch):
    """``lines(records, cases, seconds=6)``: what a run outside a terminal prints; each look at the clock takes so long."""

    def lines(records, cases, rounds=1, *, seconds=0.0, verbose=False):
        clock = itertools.count(step=seconds)
        monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
        tally = Tally(cases, rounds)
        printer = ProgressLines(tally, verbose=verbose)
        for each in records:
            tally.see(each)
            printer.see(each)
        printed = capsys.readouterr()
        assert printed.out == ""
        return printed.err.splitlines()

    return lines


def test_lines_state_the_first_failures_at_once_and_every_record_if_verbose(lines):
    records = [record(number, failed=number % 2 == 0) for number in range(30)]
    found = lines(records, 30)
    assert found[0] == "failed  b[1]  s/case0  numerics: 1 of 2 rows"
    assert len(found) == progress.PRINTED_AT_ONCE
    found = lines(records, 30, verbose=True)
    assert len(found) == 30
    assert found[:2] == snapshot(
        ["failed  b[1]  s/case0  numerics: 1 of 2 rows", "passed  b[1]  s/case1  numerics  0.00 s"]
    )


def test_the_checks_of_a_case_that_one_end_of_the_process_prevents_share_a_line(lines):
    who = record(0).model_dump(exclude={"outcome", "check"}, include=set(Crashed.model_fields))
    who |= {"stage": "check numerics", "cause": "killed by SIGSEGV"}
    ended = [("case0", "numerics"), ("case0", "lse"), ("case1", "numerics")]
    found = lines((Crashed.model_validate(who | {"case_id": case, "check": check}) for case, check in ended), 2)
    assert [line.split()[2:4] for line in found] == [["s/case0", "numerics:"], ["s/case1", "numerics:"]]


def test_lines_state_the_progress_now_and_then_and_a_case_counts_once_a_backend(lines):
    assert lines(map(record, range(3)), 3, seconds=6.0) == snapshot(
        ["case 2 of 3, 0 did not pass, about 20 s left", "case 3 of 3, 0 did not pass"]
    )
    by_backend = [record(0, backend=backend) for backend in ("a", "a", "b")]
    assert lines(by_backend, 4, seconds=11.0)[-1] == snapshot("case 2 of 4, 0 did not pass, about 2 min left")


def test_a_case_counts_in_every_round_it_is_timed_in_and_once_for_all_else(lines):
    fields = record(1, check="timing").model_dump(
        exclude={"figures", "notes", "graph", "chosen_kernels", "bits", "timing"}
    )
    unsupported = Unsupported.model_validate(fields | {"outcome": "unsupported", "reasons": ["no windows"]})
    timed = [record(0, check="timing", round_number=number) for number in range(3)]
    untimed = [record(0, check="numerics"), record(0, check="lse"), record(1)]
    found = lines([*untimed, timed[0], unsupported, *timed[1:]], 2 * (1 + 3), rounds=3, seconds=11.0)
    # Later rounds leave out what the first one did not examine, so it counts as done at once.
    assert [int(line.split()[1]) for line in found] == [1, 1, 2, 3, 6, 7, 8]
    assert found[-1] == "case 8 of 8, 0 did not pass"


@pytest.mark.parametrize(
    ("cases", "seconds_a_case", "expected"),
    [
        (200, 2.0, [None] * 9 + ["about 6 min left"]),  # 5 % are 10 cases; 190 cases of 2 s are left
        (20, 1.0, [None] * 9 + ["about 10 s left"]),  # ten seconds
        (20, 600.0, ["about 3 h left"]),
        (3, 40.0, ["about 1 min left", "about 40 s left", None]),
    ],
)
def test_the_time_left_is_estimated_once_there_is_a_pace(cases, seconds_a_case, expected, monkeypatch):
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    tally = Tally(cases, 1)
    times_left = []
    for number in range(len(expected)):
        now += seconds_a_case
        tally.see(record(number))
        times_left.append(tally.left or None)
    assert times_left == expected


@pytest.mark.parametrize("is_terminal", [False, True])
def test_kernels_are_counted_while_some_are_compiled(is_terminal, monkeypatch):
    screen = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    kernels = CompiledKernels(lambda: {0: 40, 11: 41}.get(now, 43))  # in the caches, also those of earlier runs
    tally = Tally(3000, 1)
    printer = ProgressLines(tally, kernels)
    with progress_bar(tally, kernels, is_timed=True, color=True) if is_terminal else nullcontext(printer.see) as see:
        printed = []
        for number in range(4):
            now += 11.0
            before = len(screen.getvalue())
            see(record(number))
            printed.append(re.findall(r"compiling, \d+ kernels? so far", screen.getvalue()[before:]))
    assert [found[:1] for found in printed] == [
        ["compiling, 1 kernel so far"],
        ["compiling, 3 kernels so far"],
        [],
        [],
    ]


def test_the_time_of_explaining_failures_is_not_expected_of_the_cases_left(monkeypatch):
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    tally = Tally(100, 1)
    for number in range(10):
        seconds = 61.0 if number < 5 else 1.0
        now += seconds
        tally.see(record(number, failed=number < 5).model_copy(update={"duration_s": seconds}))
    assert tally.left == "about 2 min left"  # 90 cases of 1 s; at the pace so far it is 47 min


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("is_timed", [False, True])
def test_a_terminal_gets_a_bar_that_is_not_drawn_while_a_time_is_taken(is_timed, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    threads = threading.active_count()
    tally = Tally(2, 1)
    with progress_bar(tally, is_timed=is_timed, color=True) as draw:
        assert (threading.active_count() == threads) == is_timed  # a thread draws now and then
        tally.see(record(0, failed=True))
        draw(record(0, failed=True))
    text = terminal.getvalue()
    assert "0/2" in text
    assert "b[1]  s/case0, 1 did not pass" in text
    assert text.endswith("\x1b[?25h\r\x1b[1A\x1b[2K")  # nothing stays


def test_remaining_cases_are_mentioned_only_while_there_are_some():
    tally, rest = Tally(2, 1), []
    for number in range(2):
        tally.see(record(number))
        rest.append(tally.rest)
    assert rest == snapshot(["; the remaining cases were not examined", ""])
