"""What is seen while a run goes: nothing on stdout, a bar on terminals, few lines elsewhere."""

import io
import itertools
import sys

import pytest

from attncheck.harness import progress
from attncheck.harness.progress import Bar, Lines, Silent, watching
from attncheck.reports.records import Failed, Passed


def record(number: int, *, failed: bool = False, backend: str = "b[1]") -> Failed | Passed:
    who = {
        "suite": "s",
        "case_id": f"case{number}",
        "case_hash": "0" * 12,
        "check": "numerics",
        "seed": 0,
        "backend": backend,
        "backend_ref": "b",
        "backend_version": "",
        "environment": "e" * 12,
        "attncheck_version": "0.1.0",
    }
    return Failed.model_validate(who | {"summary": "1 of 2 rows"}) if failed else Passed.model_validate(who)


def test_lines_tell_the_first_failures_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with watching(30) as watcher:
        assert isinstance(watcher, Lines)
        for number in range(30):
            watcher.see(record(number, failed=number % 2 == 0))
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert lines[0] == "failed  b[1]  s/case0  numerics: 1 of 2 rows"
    assert len(lines) == progress.TOLD_AT_ONCE


def test_lines_say_now_and_then_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(step=6.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with watching(3) as watcher:
        for number in range(3):
            watcher.see(record(number))
    assert "case 2 of 3, 0 fell short" in capsys.readouterr().err.splitlines()


def test_a_case_counts_once_a_backend(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(step=11.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with watching(4) as watcher:
        for backend in ("a", "a", "b"):
            watcher.see(record(0, backend=backend))
    assert capsys.readouterr().err.splitlines()[-1] == "case 2 of 4, 0 fell short"


def test_a_terminal_gets_a_bar_that_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with watching(2) as watcher:
        assert isinstance(watcher, Bar)
        watcher.see(record(0, failed=True))
    assert "b[1]  s/case0, 1 fell short" in terminal.getvalue()


def test_a_debugger_sees_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with watching(2, silent=True) as watcher:
        assert isinstance(watcher, Silent)
        watcher.see(record(0, failed=True))
    assert capsys.readouterr() == ("", "")
