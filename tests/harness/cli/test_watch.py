"""``attncheck run --watch``: what is examined after a save, by which process, and what is shown."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from attncheck.harness.cli import watch
from attncheck.harness.cli.watch import watch_run
from attncheck.harness.run.options import RunOptions
from attncheck.harness.workers.process import WorkerProcess
from attncheck.reports.run_file.store import read_run

MINE = """\
import pathlib, time
from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl

FACTOR = 1.0
SECONDS = 0

class Mine(ReferenceBackend):
    class Impl(ReferenceImpl):
        def forward(self, *args, **kwargs):
            result = super().forward(*args, **kwargs)
            if len(result) > 2:
                result.mul_(FACTOR)
            pathlib.Path("began").touch()
            time.sleep(SECONDS)
            return result
    @classmethod
    def get_impl_cls(cls): return cls.Impl
"""
WRONG = MINE.replace("FACTOR = 1.0", "FACTOR = 1.25")
SLOW = MINE.replace("SECONDS = 0", "SECONDS = 600")
Attncheck = Callable[..., int]


class Script:
    """Presses no key, but makes the next edit each time a change is waited for; ``q`` comes last."""

    def __init__(self, *edits: Callable[[], object]) -> None:
        self._edits: Iterator[Callable[[], object]] = iter(edits)

    def __call__(self, seconds: float) -> str:
        edit = next(self._edits, None)
        if edit is None:
            return "q"
        edit()
        return ""


@pytest.fixture
def mine(folder: Path, preloaded: None) -> Path:
    path = folder / "mine.py"
    path.write_text(MINE)
    return path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When each process of the test was started, by time.monotonic()."""
    times: list[float] = []

    class Noted(WorkerProcess):
        def __init__(self, *given: object) -> None:
            times.append(time.monotonic())
            super().__init__(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(watch, "WorkerProcess", Noted)
    monkeypatch.setattr("attncheck.harness.workers.pool.WorkerProcess", Noted)
    return times


def options(**given: object) -> RunOptions:
    usual = {"backends": ("./mine.py",), "suites": ("small.yaml",), "checks": ("numerics",), "device": "cpu"}
    return RunOptions(**usual | given)  # type: ignore[arg-type]


def test_what_fell_short_is_examined_first_by_a_process_that_was_ready(
    mine: Path, folder: Path, started: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    saves: list[float] = []

    def save(text: str) -> Callable[[], None]:
        def edit() -> None:
            saves.append(time.monotonic())
            mine.write_text(text)

        return edit

    script = Script(save(WRONG), save("def (:\n"), save(MINE))
    assert watch_run(options(folder=folder / "results"), None, color=False, keys=script) == 0
    rounds = capsys.readouterr().out.split("q or Ctrl-C ends\n")
    assert len(rounds) == 5
    assert "Mine: PASSED: 2 cases right" in rounds[0]
    assert "broken: small/prefill numerics\n" in rounds[1]
    assert "finding 1 of 1, Mine" in rounds[1]
    assert "SyntaxError" in rounds[2]
    lines = rounds[3].splitlines()
    assert lines[0].endswith("s after the save: small/prefill numerics: passed")  # without the error it would be decode
    assert "fixed: small/prefill numerics" in lines
    assert lines[-1] == "waiting for a change in mine.py or 2 other files; "
    assert len(started) == 5  # one for each round, and the next one
    assert all(began < save for began, save in zip(started[1:], saves, strict=False))
    (run,) = (folder / "results").iterdir()
    assert [record.case_id for record in read_run(run).records] == ["prefill", "decode"]


def test_a_case_file_that_breaks_leaves_no_process(
    mine: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    processes: list[WorkerProcess] = []

    class Kept(WorkerProcess):
        def __init__(self, *given: object) -> None:
            super().__init__(*given)  # type: ignore[arg-type]
            processes.append(self)

    monkeypatch.setattr(watch, "WorkerProcess", Kept)
    script = Script(lambda: (folder / "small.yaml").write_text("cases: ["))
    assert watch_run(options(folder=folder / "results"), None, color=False, keys=script) == 1
    assert "error: " in capsys.readouterr().out
    assert [process.has_ended for process in processes] == [True] * 3


def test_a_save_ends_the_round_and_what_it_wrote_is_not_kept(
    mine: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine.write_text(SLOW)
    began = folder / "began"

    def save_meanwhile() -> None:
        while not began.exists():
            time.sleep(0.02)
        mine.write_text(WRONG)

    thread = threading.Thread(target=save_meanwhile)
    thread.start()
    assert watch_run(options(folder=folder / "results"), None, color=False, keys=Script()) == 1
    thread.join()
    text = capsys.readouterr().out
    assert text.count("waiting for a change") == 1
    assert "Mine: FAILED: 1 finding in 1 of 2 cases; 1 right" in text
    assert "crashed" not in text
    (run,) = (folder / "results").iterdir()
    assert [record.outcome for record in read_run(run).records] == ["passed", "failed"]


def test_the_option_is_one_of_run(
    run: Attncheck, mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[RunOptions] = []
    monkeypatch.setattr(watch, "watch_run", lambda options, *_, **__: given.append(options) or 1)
    monkeypatch.setattr(WorkerProcess, "__init__", lambda *_, **__: None)
    monkeypatch.setattr(WorkerProcess, "close", lambda _: None)
    assert run("./mine.py", "--watch") == 1
    assert given[0].backends == ("./mine.py",)
