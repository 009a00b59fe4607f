"""Runs of one backend each become one run, and nothing about them is lost."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attncheck.errors import RunFileError
from attncheck.reports.run_file.header import BackendInfo, RunHeader
from attncheck.reports.run_file.joining import join_runs
from attncheck.reports.run_file.records import Record
from attncheck.reports.run_file.store import Run, RunWriter, read_run


@pytest.fixture
def part(tmp_path: Path, header: RunHeader, make: Callable[..., Record]) -> Callable[..., Run]:
    """``part("a", **fields)``: the run of backend a alone, its header changed by ``fields``."""

    def part(name: str, *, cut: bool = False, errors: tuple[str, ...] = (), **fields: Any) -> Run:
        own = header.model_copy(update={"backends": (BackendInfo(name=name, ref=name),), **fields})
        path = tmp_path / f"{name}.jsonl"
        with RunWriter(path, own) as writer:
            for case_id in ("edge", "window"):
                writer.add(make("passed", backend=name, backend_ref=name, case_id=case_id))
            for error in errors:
                writer.fail(error)
        if cut:
            path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
        return read_run(path)

    return part


def test_the_whole_holds_all_records_backends_notes_and_errors(part: Callable[..., Run], tmp_path: Path) -> None:
    runs = [
        part("a", notes=("slow",)),
        part("b", notes=("slow", "cold"), errors=("a stale entry",)),
        part("c", cut=True),
    ]
    join_runs(runs, tmp_path / "all.jsonl", ("scripts/x", "--y"))
    whole = read_run(tmp_path / "all.jsonl")
    assert whole.complete
    assert whole.records == tuple(record for run in runs for record in run.records)
    assert [backend.name for backend in whole.header.backends] == ["a", "b", "c"]
    assert whole.header.notes == ("slow", "cold")
    assert whole.header.command == ("scripts/x", "--y")
    assert whole.errors == ("a stale entry", "the run of c was cut off after 2 records")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"checks": ("numerics",)}, "not the same checks"), ({"device": "cuda"}, "not the same device")],
)
def test_runs_of_other_questions_are_not_joined(
    part: Callable[..., Run], tmp_path: Path, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RunFileError, match=f"b.jsonl: cannot be joined with .*a.jsonl: {reason}"):
        join_runs([part("a"), part("b", **fields)], tmp_path / "all.jsonl")
    assert not (tmp_path / "all.jsonl").exists()


def test_a_record_that_two_runs_hold_is_refused(part: Callable[..., Run], tmp_path: Path) -> None:
    run = part("a")
    with pytest.raises(ValueError, match="came twice"):
        join_runs([run, run], tmp_path / "all.jsonl")
