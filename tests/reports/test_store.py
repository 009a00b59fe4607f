"""Run files: written safely, read strictly."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from attncheck.errors import QuestionError, RunFileError
from attncheck.reports.run_file.header import CaseInfo
from attncheck.reports.run_file.records import Record
from attncheck.reports.run_file.store import RunWriter, read_run

Make = Callable[..., Record]


def test_what_was_written_is_read(write, make, header):
    records = (make("passed"), make("failed", check="cache_write"), make("unsupported", check="lse"))
    run = read_run(write(*records, errors=("an expectation matched nothing",)))
    assert run.header == header
    assert run.records == records
    assert run.complete
    assert run.footer is not None
    assert run.footer.counts == {"passed": 1, "failed": 1, "unsupported": 1}
    assert run.errors == ("an expectation matched nothing",)


def test_an_interrupted_run_has_no_footer(tmp_path, make, header):
    path = tmp_path / "run.jsonl"
    with contextlib.suppress(KeyboardInterrupt), RunWriter(path, header) as writer:
        writer.add(make("passed"))
        raise KeyboardInterrupt
    run = read_run(path)
    assert not run.complete
    assert not run.cut_line
    assert len(run.records) == 1


def test_a_line_cut_off_in_the_middle_is_tolerated_and_reported(write, make):
    path = write(make("passed"), make("passed", check="lse"))
    header, first, second, footer = lines_of(path)
    path.write_text(f"{header}\n{first}\n{second[:50]}")
    run = read_run(path)
    assert run.cut_line
    assert not run.complete
    assert [record.check for record in run.records] == ["numerics"]
    path.write_text(f"{header}\n{first}\n{second}\n{footer}")  # which only lacks its newline
    assert read_run(path).complete


def test_what_cannot_be_read_or_written_is_refused(tmp_path, make, header):
    (tmp_path / "file").write_bytes(b"\xff\xfe\x00\n")
    with pytest.raises(RunFileError, match="cannot be read: No such file"):
        read_run(tmp_path / "nothing.jsonl")
    with pytest.raises(RunFileError, match="is not a run file"):
        read_run(tmp_path / "file")
    with pytest.raises(QuestionError, match="cannot be written"), RunWriter(tmp_path / "file" / "run.jsonl", header):
        pass
    with RunWriter(tmp_path / "run.jsonl", header) as writer:
        writer.add(make("passed"))
        with pytest.raises(ValueError, match="came twice: smoke/edge"):
            writer.add(make("failed"))


def due(make: Make) -> list[Record]:
    """All records of two cases, the second for one backend alone; two rounds of times, but none of what is refused."""
    return [
        *(make("passed", case_id="a", backend=name) for name in ("reference", "Wrong")),
        *(make("passed", case_id="a", check="timing", round=number) for number in (0, 1)),
        make("unsupported", case_id="a", check="timing", backend="Wrong"),
        make("passed", case_id="b"),
    ]


@pytest.mark.parametrize(
    ("dropped", "header_fields", "errors", "lacking"),
    [
        (None, {}, (), ()),
        (0, {}, (), ("smoke/a",)),
        (3, {}, (), ("smoke/a",)),
        (4, {}, (), ("smoke/a",)),
        (5, {}, (), ("smoke/b",)),
        (5, {"shard": "1/2"}, (), ()),
        (0, {"shard": "1/2"}, (), ("smoke/a",)),
        (5, {}, ("case smoke/b: blind to sinks: no row",), ()),
        (5, {}, ("another error",), ("smoke/b",)),
        (5, {}, ("case smoke/b-long: blind to sinks: no row", "case smoke/b[x]: blind"), ("smoke/b",)),
    ],
)
def test_a_run_is_complete_with_all_records_that_its_header_announces(
    write_run, make, header, tmp_path, dropped, header_fields, errors, lacking
):
    one = CaseInfo(suite="smoke", id="a", shape="", checks=("numerics", "timing"), shard=1)
    other = CaseInfo(suite="smoke", id="b", shape="", checks=("numerics",), backends=("reference",), shard=2)
    stated = {"checks": ("numerics", "timing"), "rounds": 2, "cases": (one, other), **header_fields}
    records = [record for index, record in enumerate(due(make)) if index != dropped]
    if header_fields and dropped != 5:
        records = records[:-1]  # no case of the other shard
    path = tmp_path / "stated.jsonl"
    run = read_run(write_run(path, header.model_copy(update=stated), *records, errors=errors))
    assert run.lacking == lacking
    assert run.complete == (not lacking)


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines()


@pytest.mark.parametrize(
    ("damage", "line", "message"),
    [
        (lambda lines: [], None, "is empty"),
        (lambda lines: ["\n", "  "], None, "is empty"),
        (lambda lines: lines[1:], 1, "is not a run file: its first line lacks kind 'header'"),
        (lambda lines: ["suite: smoke", *lines], 1, "is not a run file"),
        (lambda lines: ['{"kind": "header", "format": 2}', *lines[1:]], 1, "format 2; this attncheck reads format 1"),
        (lambda lines: [lines[0], *lines], 2, "second header"),
        (lambda lines: [lines[0], "{", *lines[1:]], 2, "not a line of JSON"),
        (lambda lines: [lines[0], "", *lines[1:]], 2, "not a line of JSON"),
        (lambda lines: [lines[0], '{"kind": "finding"}'], 2, "finding"),
        (lambda lines: [lines[0], edit(lines[1], outcome="crashed")], 2, "crashed"),
        (lambda lines: [lines[0], edit(lines[1], stderr="x")], 2, "unknown key 'stderr'"),
        (lambda lines: [lines[0], edit(lines[1], seed=None)], 2, "seed"),
        (lambda lines: [lines[0], lines[1], lines[1]], 3, "there twice: smoke/edge, check numerics"),
        (lambda lines: [*lines, lines[1]], 5, "follow the footer"),
        (lambda lines: [*lines, "cut off {"], 5, "follow the footer"),
        (lambda lines: [lines[0], lines[1], lines[3]], 3, "counts 2 passed, the file holds 1"),
        (lambda lines: [lines[0], edit(lines[1], suite="alibi")], 2, "suite 'alibi' is not in the header"),
        (lambda lines: [lines[0], edit(lines[1], backend="other")], 2, "backend 'other' is not in the header"),
        (lambda lines: [lines[0], edit(lines[1], check="timing")], 2, "check 'timing' is not in the header"),
        (lambda lines: [lines[0], edit(lines[1], seed=9)], 2, "seed 9 is not in the header"),
        (lambda lines: [lines[0], edit(lines[1], environment="ffff")], 2, "environment 'ffff' is not in the header"),
        (lambda lines: ["[" * 100_000], 1, "not JSON .recursion limit"),
        (lambda lines: [f'{{"kind": "header", "format": {"9" * 5000}}}'], 1, "not JSON .number out of range"),
        (lambda lines: [lines[0], f'{{"kind": {"[" * 100_000}'], 2, "not a line of JSON: recursion limit"),
        (
            lambda lines: [edit(lines[0], checks=[{}, ["claims"]]), *lines[1:]],
            1,
            "header.checks.0: Input should be a val",
        ),
        (
            lambda lines: [edit(lines[0], checks="claims", notes=7), *lines[1:]],
            1,
            "header.checks: Input should be a val",
        ),
        (lambda lines: [edit(lines[0], shard="1/99999999"), *lines[1:]], 1, "header.shard: String should match"),
        (lambda lines: [edit(lines[0], backends=json.loads(lines[0])["backends"] * 200)], 1, "at most 256 items"),
        (lambda lines: [lines[0], edit(lines[1], backend="\x1b[2J")], 2, r"'\\x1b\[2J' is not in the header"),
        (
            lambda lines: [lines[0], edit(lines[1], suite="s" * 9000)],
            2,
            r"s{900} \.\.\. .*\(which has 'smoke', 'mine'\)",
        ),
    ],
)
def test_a_file_that_contradicts_itself_is_refused_with_the_line(write, make, damage, line, message):
    path = write(make("passed"), make("passed", check="lse"))
    path.write_text("".join(f"{text}\n" for text in damage(lines_of(path))))
    with pytest.raises(RunFileError, match=message) as caught:
        read_run(path)
    assert caught.value.line == line
    assert str(caught.value).startswith(str(path))
    assert len(str(caught.value)) < 3000


def test_a_check_by_its_former_name_is_read_as_the_one_of_today(tmp_path, write, make, header):
    """Run files from before have no findings and no cases either."""
    run_header = header.model_copy(update={"checks": ("numerics", "refusals"), "notes": ("on battery",)})
    with RunWriter(tmp_path / "old.jsonl", run_header) as writer:
        writer.add(make("failed", summary="7 of 40 rows are wrong, the first is row 3"))
        writer.add(make("passed", check="refusals"))
    lines = lines_of(tmp_path / "old.jsonl")
    assert all("refusals" in line for line in (lines[0], lines[2]))
    old = [json.loads(line.replace('"refusals"', '"claims"')) for line in lines]
    del old[0]["cases"], old[1]["graph"], old[1]["finding"], old[1]["concerns"], old[1]["output"]
    (tmp_path / "old.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in old))
    run = read_run(tmp_path / "old.jsonl")
    assert run.header.checks == ("numerics", "refusals")
    assert run.header.notes == ("on battery", "the check refusals is called claims in this run file")
    assert [record.check for record in run.records] == ["numerics", "refusals"]
    assert run.records[0] == make("failed", summary="7 of 40 rows are wrong, the first is row 3")
    assert run.header.cases == ()
    assert read_run(write(make("passed"))).header.notes == ()


def edit(line: str, **changes: object) -> str:
    return json.dumps(json.loads(line) | changes)
