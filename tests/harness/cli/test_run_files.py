"""Where run files are kept, and how many."""

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from attncheck.errors import RunFileError
from attncheck.harness.cli import app as cli
from attncheck.harness.cli import run_files
from attncheck.harness.cli.fuzz import folder_for
from attncheck.harness.cli.run_files import (
    drop_old_runs,
    is_kept,
    kept_folder,
    kept_run,
    kept_runs,
    measured_costs,
    report_command,
    run_path,
)
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.store import RunWriter, read_run

Attncheck = Callable[..., int]
QUICK = ("reference", "--case", "prefill")


@pytest.fixture
def plain(folder: Path) -> Path:
    """The folder without ``results``."""
    (folder / "results").rmdir()
    return folder


def test_without_results_the_run_is_in_the_cache(
    here: Attncheck, plain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert here(*QUICK) == 0
    (path,) = (plain / "cache").rglob("*.jsonl")
    assert path.parent == kept_folder()
    assert path.parent.parent == plain / "cache" / "attncheck" / "runs"
    assert path.parent.name.startswith(f"{plain.name}-")
    assert str(path) in capsys.readouterr().out.splitlines()[-1]
    assert read_run(kept_run(kept_folder())).complete
    assert not (plain / "results").exists()


def test_no_output_writes_none(here: Attncheck, plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = set(plain.rglob("*"))
    assert here(*QUICK, "--no-output") == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(" s, no run file (--no-output)")
    assert {path for path in plain.rglob("*") if "__pycache__" not in path.parts} == before


def test_a_folder_that_cannot_be_written_costs_no_run(
    here: Attncheck, plain: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_files.tempfile, "tempdir", str(plain))
    monkeypatch.setenv("XDG_CACHE_HOME", str(plain / "wrong.py"))  # a file
    assert here(*QUICK) == 0
    printed = capsys.readouterr()
    assert "wrong.py/attncheck" in printed.err
    assert "Not a directory" in printed.err
    assert "--output FILE names another, --no-output writes none" in printed.err
    (path,) = plain.rglob("*.jsonl")
    assert printed.out.splitlines()[-1].endswith(f"run file: {path}")
    assert read_run(path).complete


def test_output_may_be_a_folder(here: Attncheck, plain: Path) -> None:
    (plain / "kept").mkdir()
    assert here(*QUICK, "--output", "kept") == 0
    assert len(kept_runs(plain / "kept")) == 1


def runs(folder: Path, *days: int) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"202611{day:02}-120000-{day}.jsonl" for day in days]
    for name in names:
        (folder / name).touch()
    return names


def test_only_the_newest_runs_that_attncheck_named_stay(tmp_path: Path) -> None:
    names = runs(tmp_path, *range(1, 8))
    others = ["20261101-120000-1.jsonl.xz", "times.jsonl", "20261101.jsonl", "notes.txt"]
    for name in others:
        (tmp_path / name).touch()
    drop_old_runs(tmp_path, 3, tmp_path / names[-1])
    assert {path.name for path in tmp_path.iterdir()} == {*names[-3:], *others}
    assert kept_run(tmp_path).name == names[-1]


def test_a_run_that_is_written_and_the_one_that_has_just_ended_stay(tmp_path: Path, header: RunHeader) -> None:
    names = runs(tmp_path, 2, 3, 4)
    with RunWriter(tmp_path / "20261101-120000-1.jsonl", header) as live:
        drop_old_runs(tmp_path, 1, tmp_path / names[0])
        assert kept_runs(tmp_path) == [live.path, tmp_path / names[0], tmp_path / names[2]]
    drop_old_runs(tmp_path, 1, tmp_path / names[0])
    assert kept_runs(tmp_path) == [tmp_path / names[0], tmp_path / names[2]]
    assert report_command(tmp_path / names[1]) == f"attncheck report {tmp_path / names[1]}"


def test_the_folder_of_kept_runs_is_the_users_alone(here: Attncheck, plain: Path) -> None:
    umask = os.umask(0o002)
    try:
        folder_for(None, "fuzz")
        assert kept_folder().stat().st_mode & 0o777 == 0o700
        kept_folder().chmod(0o775)  # as an earlier version made it
        assert here(*QUICK) == 0
    finally:
        os.umask(umask)
    assert kept_folder().stat().st_mode & 0o777 == 0o755
    assert kept_run(kept_folder()).parent == kept_folder()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_folder_that_cannot_be_searched_holds_no_runs(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = plain / "closed"
    closed.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(closed))
    monkeypatch.chdir("/")
    runs(kept_folder(), 1)
    os.seteuid(1234)
    try:
        assert kept_runs(kept_folder()) == []
        assert measured_costs(kept_folder(), "CPU") == {}
        with pytest.raises(RunFileError, match="cannot be looked at: Permission denied"):
            run_path("last")
    finally:
        os.seteuid(0)


def test_a_pipe_named_as_a_run_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "20261101-120000-1.jsonl")
    assert measured_costs(tmp_path, "CPU") == {}


def test_the_runs_of_the_cache_count_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    root = tmp_path / "attncheck" / "runs"
    runs(root / "a", 1, 2)
    (kept,) = runs(root / "b", 4)
    (latest,) = runs(root / "c", 5)
    drop_old_runs(root / "c", 2, root / "c" / latest)
    assert sorted(path.relative_to(root) for path in root.rglob("*")) == [
        Path("b"),
        Path("b") / kept,
        Path("c"),
        Path("c") / latest,
    ]


def test_costs_of_checks_come_from_the_newest_runs_on_this_device(
    here: Attncheck, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        assert here("reference", "--case", "prefill", "--check", "numerics", "--output", f"{number}.jsonl") == 0
        (plain / f"{number}.jsonl").rename(plain / runs(plain, number)[0])
    older, newer = map(read_run, kept_runs(plain))
    name = newer.header.environment.device_name
    expected = {("reference", each.case_hash, "numerics"): each.duration_s for each in newer.records}
    assert measured_costs(plain, name) == expected != {}
    (plain / runs(plain, 3)[0]).write_bytes(b'{"kind":"\xff')
    assert measured_costs(plain, name) == expected
    Path(newer.path).unlink()
    assert set(measured_costs(plain, name).values()) == {each.duration_s for each in older.records}
    assert [measured_costs(folder, other) for folder, other in ((None, name), (plain, "another"))] == [{}, {}]
    monkeypatch.setattr(run_files, "_READ_S", 0)
    assert measured_costs(plain, name) == {}


def test_words_name_kept_runs(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oldest, middle, newest = (kept_folder() / name for name in runs(kept_folder(), 1, 2, 3))
    words = {"last": newest, "last~0": newest, "1": newest, "last~1": middle, "2": middle, "last~2": oldest}
    assert {word: run_path(word) for word in words} == words
    assert run_path("./1") == Path("1")
    assert is_kept(newest)
    assert not is_kept(Path("1"))
    assert report_command(newest) == "attncheck report"
    assert report_command(middle) == f"attncheck report {middle}"
    with pytest.raises(RunFileError, match="holds 3 runs; the oldest is number 3"):
        run_path("last~3")
    (plain / "pyproject.toml").write_text('[tool.attncheck]\noutput = "kept"\n', encoding="utf-8")
    (own,) = runs(plain / "kept", 4)
    assert run_path("last") == Path("kept", own)


def test_the_newest_kept_run_is_the_default(here: Attncheck, capsys: pytest.CaptureFixture[str]) -> None:
    assert here(*QUICK) == 0
    assert here(*QUICK, "--output", "own.jsonl") == 0
    capsys.readouterr()
    assert cli.main(["report", "--section", "verdict"]) == 0
    assert "reference: PASSED" in capsys.readouterr().out
    assert cli.main(["compare", "own.jsonl"]) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("given", ["the file", "the folder"])
def test_a_kept_run_of_another_user_names_no_code_to_execute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = kept_folder()
    (name,) = runs(folder, 1)
    assert run_path("last") == folder / name
    os.chown(folder / name if given == "the file" else folder, 1234, -1)
    with pytest.raises(RunFileError, match="belongs to the user 1234, and attncheck runs as 0; to read it never"):
        run_path("last")


@pytest.mark.parametrize("given", ["the file", "the folder"])
def test_a_kept_run_that_others_may_write_names_no_code_to_execute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = kept_folder()
    (name,) = runs(folder, 1)
    (folder / name if given == "the file" else folder).chmod(0o777)
    with pytest.raises(RunFileError, match=r"written by every user|other users may write in it"):
        run_path("last")
    assert not is_kept(folder / name)


def test_a_disk_without_room_for_a_header_and_some_records_is_not_used(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        reason = run_files._fault_of_writing(tmp_path, 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert reason == "File too large"
    assert list(tmp_path.iterdir()) == []
