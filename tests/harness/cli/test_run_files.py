"""Where run files are kept, and how many."""

import os
import resource
from pathlib import Path

import pytest

from attncheck.errors import RunFileError
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
from attncheck.reports.run_file.store import RunWriter, read_run

QUICK = "reference --case prefill"


@pytest.fixture
def cached(folder):
    """The folder without ``results``, so that runs are kept in the cache."""
    (folder / "results").rmdir()
    return folder


def runs(folder, *days):
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"202611{day:02}-120000-{day}.jsonl" for day in days]
    for name in names:
        (folder / name).touch()
    return names


def test_without_results_the_run_is_in_the_cache_and_the_default_of_commands(here, cached, typed):
    last = here(QUICK).out.splitlines()[-1]
    (path,) = (cached / "cache").rglob("*.jsonl")
    assert last.endswith(f"run file: {path}")
    assert path.parent == kept_folder()
    assert path.parent.parent == cached / "cache" / "attncheck" / "runs"
    assert path.parent.name.startswith(f"{cached.name}-")
    assert read_run(kept_run(kept_folder())).complete
    assert not (cached / "results").exists()
    (cached / "kept").mkdir()
    assert here(f"{QUICK} --output kept").code == 0
    (own,) = kept_runs(cached / "kept")
    assert "reference: PASSED" in typed("report --section verdict").out
    assert typed("compare", own).code == 0


def test_no_output_writes_none(here, cached):
    before = set(cached.rglob("*"))
    assert here(f"{QUICK} --no-output").out.splitlines()[-1].endswith(" s, no run file (--no-output)")
    assert {path for path in cached.rglob("*") if "__pycache__" not in path.parts} == before


def test_a_folder_that_cannot_be_written_costs_no_run(here, cached, monkeypatch):
    monkeypatch.setattr(run_files.tempfile, "tempdir", str(cached))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cached / "wrong.py"))  # a file
    done = here(QUICK)
    assert done.code == 0
    assert "wrong.py/attncheck" in done.err
    assert "Not a directory" in done.err
    assert "--output FILE names another, --no-output writes none" in done.err
    (path,) = cached.rglob("*.jsonl")
    assert done.out.splitlines()[-1].endswith(f"run file: {path}")
    assert read_run(path).complete


def test_only_the_newest_runs_that_attncheck_named_stay(tmp_path, header):
    names = runs(tmp_path, *range(2, 8))
    others = ["20261101-120000-1.jsonl.xz", "times.jsonl", "20261101.jsonl", "notes.txt"]
    for name in others:
        (tmp_path / name).touch()
    drop_old_runs(tmp_path, 3, tmp_path / names[-1])
    assert {path.name for path in tmp_path.iterdir()} == {*names[-3:], *others}
    assert kept_run(tmp_path).name == names[-1]
    ended, newest = tmp_path / names[-3], tmp_path / names[-1]
    with RunWriter(tmp_path / "20261101-120000-1.jsonl", header) as live:  # stays, and so does the one that has ended
        drop_old_runs(tmp_path, 1, ended)
        assert kept_runs(tmp_path) == [live.path, ended, newest]
    drop_old_runs(tmp_path, 1, ended)
    assert kept_runs(tmp_path) == [ended, newest]


def test_the_runs_of_the_cache_count_together(cached):
    root = kept_folder().parent
    runs(root / "a", 1, 2)
    (kept,) = runs(root / "b", 4)
    (latest,) = runs(root / "c", 5)
    drop_old_runs(root / "c", 2, root / "c" / latest)
    left = [Path("b"), Path("b") / kept, Path("c"), Path("c") / latest]
    assert sorted(path.relative_to(root) for path in root.rglob("*")) == left


def test_the_folder_of_kept_runs_is_the_users_alone(here, cached):
    umask = os.umask(0o002)
    try:
        folder_for(None, "fuzz")
        assert kept_folder().stat().st_mode & 0o777 == 0o700
        kept_folder().chmod(0o775)  # as an earlier version made it
        assert here(QUICK).code == 0
    finally:
        os.umask(umask)
    assert kept_folder().stat().st_mode & 0o777 == 0o755
    assert kept_run(kept_folder()).parent == kept_folder()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_folder_that_cannot_be_searched_holds_no_runs(cached, monkeypatch):
    closed = cached / "closed"
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


def test_costs_of_checks_come_from_the_newest_runs_on_this_device(here, tmp_path, monkeypatch):
    for number in (1, 2):
        assert here(f"{QUICK} --check numerics --output {number}.jsonl").code == 0
        Path(f"{number}.jsonl").rename(runs(tmp_path, number)[0])
    older, newer = map(read_run, kept_runs(tmp_path))
    name = newer.header.environment.device_name
    expected = {("reference", each.case_hash, "numerics"): each.duration_s for each in newer.records}
    assert measured_costs(tmp_path, name) == expected != {}
    Path(runs(tmp_path, 3)[0]).write_bytes(b'{"kind":"\xff')
    os.mkfifo("20261104-120000-1.jsonl")  # which is not opened
    assert measured_costs(tmp_path, name) == expected
    Path(newer.path).unlink()
    assert set(measured_costs(tmp_path, name).values()) == {each.duration_s for each in older.records}
    assert [measured_costs(folder, other) for folder, other in ((None, name), (tmp_path, "another"))] == [{}, {}]
    monkeypatch.setattr(run_files, "_READ_S", 0)
    assert measured_costs(tmp_path, name) == {}


def test_words_name_kept_runs(cached):
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
    (cached / "pyproject.toml").write_text('[tool.attncheck]\noutput = "kept"\n', encoding="utf-8")
    (own,) = runs(cached / "kept", 4)
    assert run_path("last") == Path("kept", own)


FOREIGN = "belongs to the user 1234, and attncheck runs as 0; to read it never"
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


@pytest.mark.parametrize("given", ["the file", "the folder"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda path: os.chown(path, 1234, -1), FOREIGN, marks=ROOT, id="of another user"),
        pytest.param(
            lambda path: path.chmod(0o777), "written by every user|other users may write in it", id="writable"
        ),
    ],
)
def test_a_kept_run_that_others_may_have_written_names_no_code_to_execute(cached, change, message, given):
    folder = kept_folder()
    (name,) = runs(folder, 1)
    assert run_path("last") == folder / name
    change(folder / name if given == "the file" else folder)
    with pytest.raises(RunFileError, match=message):
        run_path("last")
    assert not is_kept(folder / name)


def test_a_disk_without_room_for_a_header_and_some_records_is_not_used(tmp_path):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        reason = run_files._fault_of_writing(tmp_path, 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert reason == "File too large"
    assert list(tmp_path.iterdir()) == []
