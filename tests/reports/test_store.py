"""Run files: written safely, read strictly, in compressed form as well, and shards of one run joined."""

import contextlib
import gzip
import json
import lzma
import sys
import tracemalloc
from functools import partial

import pytest

from attncheck.errors import QuestionError, RunFileError
from attncheck.reports.run_file import store
from attncheck.reports.run_file.header import CaseInfo
from attncheck.reports.run_file.merging import merge_runs
from attncheck.reports.run_file.records import RunFooter
from attncheck.reports.run_file.store import Run, RunWriter, count_outcomes, read_run


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


def due(make):
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


def lines_of(path):
    return path.read_text().splitlines()


@pytest.mark.parametrize(
    ("damage", "line", "message"),
    [
        (lambda lines: [], None, "is empty"),
        (lambda lines: lines[1:], 1, "is not a run file: its first line lacks kind 'header'"),
        (lambda lines: ['{"kind": "header", "format": 2}', *lines[1:]], 1, "format 2; this attncheck reads format 1"),
        (lambda lines: [lines[0], *lines], 2, "second header"),
        (lambda lines: [lines[0], "{", *lines[1:]], 2, "not a line of JSON"),
        (lambda lines: [lines[0], '{"kind": "finding"}'], 2, "finding"),
        (lambda lines: [lines[0], edit(lines[1], stderr="x")], 2, "unknown key 'stderr'"),
        (lambda lines: [lines[0], lines[1], lines[1]], 3, "there twice: smoke/edge, check numerics"),
        (lambda lines: [*lines, lines[1]], 5, "follow the footer"),
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


def edit(line, **changes):
    return json.dumps(json.loads(line) | changes)


ZSTD = ("compression.zstd", "backports.zstd")


@pytest.mark.parametrize(("ending", "pack"), [("gz", gzip.compress), ("xz", lzma.compress)])
def test_a_compressed_run_is_read_by_its_name(write, make, tmp_path, ending, pack):
    path = write(make("passed"))
    packed = tmp_path / f"run.jsonl.{ending}"
    packed.write_bytes(pack(path.read_bytes()))
    assert read_run(packed).records == read_run(path).records
    packed.write_bytes(path.read_bytes())
    with pytest.raises(RunFileError, match=f"is not compressed as its name states, by {ending}"):
        read_run(packed)


@pytest.mark.parametrize("name", ZSTD)
def test_zstd_is_read_by_any_of_its_packages(write, make, tmp_path, name, monkeypatch):
    module = pytest.importorskip(name)
    for other in set(ZSTD) - {name}:
        monkeypatch.setitem(sys.modules, other, None)
    path = write(make("passed"))
    packed = tmp_path / "run.jsonl.zst"
    packed.write_bytes(module.compress(path.read_bytes()))
    assert read_run(packed).records == read_run(path).records


def test_without_a_reader_of_zstd_the_message_states_what_to_install(tmp_path, monkeypatch):
    for name in ZSTD:
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "run.jsonl.zst").write_bytes(b"anything")
    with pytest.raises(RunFileError, match=r"run\.jsonl\.zst: .*pip install backports\.zstd"):
        read_run(tmp_path / "run.jsonl.zst")


@pytest.mark.parametrize(("name", "unpack"), [("deep/er/run.jsonl", bytes), ("run.jsonl.gz", gzip.decompress)])
def test_every_record_is_in_the_file_as_soon_as_it_is_added(tmp_path, make, header, name, unpack):
    path = tmp_path / name
    records = [make("passed", check=check) for check in ("numerics", "lse")]
    with RunWriter(path, header) as writer:
        for count, record in enumerate(records, start=1):
            writer.add(record)
            assert len(read_run(path).records) == count
            assert not read_run(path).complete
        writer.fail("an expectation matched nothing")
    run = read_run(path)
    assert (run.header, run.records, run.complete) == (header, tuple(records), True)
    assert run.footer.counts == {"passed": 2}
    assert run.errors == ("an expectation matched nothing",)
    written = path.read_bytes()
    assert unpack(written).count(b"\n") == 4  # a whole file for any other program
    with pytest.raises(RunFileError, match="exists already"), RunWriter(path, header):
        pass
    assert path.read_bytes() == written


def test_a_gz_that_was_cut_anywhere_is_read_up_to_there(tmp_path, make, header):
    path = tmp_path / "run.jsonl.gz"
    with RunWriter(path, header) as writer:
        headed = path.stat().st_size
        for name in "abcdefgh":
            writer.add(make("passed", case_id=name))
    content = path.read_bytes()
    counts = []
    for size in range(headed, len(content), 3):
        path.write_bytes(content[:size])
        counts.append(len(read_run(path).records))
    assert counts == sorted(counts)
    assert set(counts) == set(range(9))


@pytest.mark.parametrize("ending", ["xz", "zst"])
def test_a_form_that_no_cut_file_could_be_read_in_is_refused(tmp_path, header, ending):
    path = tmp_path / f"run.jsonl.{ending}"
    with pytest.raises(RunFileError, match=r"name it \.jsonl or \.jsonl\.gz"), RunWriter(path, header):
        pass
    assert not path.exists()


@pytest.mark.parametrize(("ending", "pack"), [("gz", gzip.compress), ("xz", partial(lzma.compress, preset=0))])
def test_of_a_file_that_decompresses_to_very_much_little_is_kept(tmp_path, ending, pack, monkeypatch):
    monkeypatch.setattr(store, "LONGEST_LINE", 2**21)
    path = tmp_path / f"run.jsonl.{ending}"
    path.write_bytes(pack(bytes(2**25)))
    assert path.stat().st_size < 2**17
    tracemalloc.start()
    try:
        with pytest.raises(RunFileError, match="a line of more than 2097152 bytes"):
            read_run(path)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 2**23
    with pytest.raises(RunFileError, match="a line of more than"):
        read_run("/dev/zero")  # it is not read to its end


def test_a_file_of_too_many_lines_is_refused(write, make, tmp_path, monkeypatch):
    path = write(*(make("passed", case_id=f"case-{number}") for number in range(100)))
    monkeypatch.setattr(store, "MAX_BYTES", path.stat().st_size - 1)
    with pytest.raises(RunFileError, match=r"holds more than .* bytes; divide the run by --shard"):
        read_run(path)


def test_a_line_that_is_read_in_pieces_is_whole(write, make, monkeypatch, tmp_path):
    path = write(*(make("passed", case_id=f"case-{number}") for number in range(3)))
    expected = read_run(path)
    for size in (1, 7, 300):
        monkeypatch.setattr(store, "_CHUNK", size)
        assert read_run(path) == expected


@pytest.fixture
def part(header):
    """``part("1/2", record, ...)``: a shard with these records; keywords are fields of its header."""

    def make(shard, *records, errors=(), complete=True, **fields):
        cases = tuple(CaseInfo(suite="smoke", id=name, shape="") for name in "abc")
        own = header.model_copy(update={"shard": shard, "cases": cases, "notes": ("one",), **fields})
        counts = count_outcomes(records)
        footer = RunFooter(finished=f"2026-01-0{shard[:1] or 1}T00:00:00+00:00", counts=counts, errors=errors)
        return Run(f"{shard.replace('/', 'of')}.jsonl", own, records, footer if complete else None)

    return make


def test_records_come_in_the_order_of_the_header(part, make_record):
    records = [
        make_record("passed", backend=backend, case_id=case, check=check, round=number)
        for number in (0, 1)
        for backend in ("reference", "Wrong")
        for case in "abc"
        for check in ("numerics", "lse")
    ]
    ours = [record for record in records if record.case_id == "b"]
    others = [record for record in records if record.case_id != "b"]
    merged = merge_runs([part("2/2", *others, notes=("two",), rounds=2), part("1/2", *ours, rounds=2)])
    assert list(merged.records) == records
    assert merged.header.shard == ""
    assert merged.header.notes == ("two", "one")
    assert merged.complete


def test_the_merged_run_began_with_the_first_and_ended_with_the_last(part, make_record):
    early, late = (f"2026-01-0{day}T00:00:00+00:00" for day in (1, 2))
    shards = part("1/2", started=late, errors=("x",)), part("2/2", started=early, errors=("x", "y"))
    merged = merge_runs(shards)
    assert (merged.header.started, merged.footer.finished) == (early, late)
    assert merged.errors == ("x", "y")


def test_shards_that_are_not_all_are_refused(part):
    for shards, words in (
        (["3/4"], "shards 1/4, 2/4, 4/4 are missing"),
        (["1/2", "2/3"], "one of 3 shards"),
    ):
        with pytest.raises(RunFileError, match=words):
            merge_runs([part(shard) for shard in shards])
    with pytest.raises(RunFileError, match="is incomplete; run that shard again"):
        merge_runs([part("1/2"), part("2/2", complete=False)])


def test_a_run_of_another_question_is_refused_by_what_differs(part, header):
    environment = header.environment.model_copy(update={"torch": "9.9"})
    fewer = (header.suites[0].model_copy(update={"cases": 1}), *header.suites[1:])
    for fields, words in (
        ({"seed": 3}, r"differ in seed \(0 and 3\); `attncheck compare` compares two runs$"),
        ({"environment": environment}, r"differ in environment.torch \('2.13.0\+cpu' and '9.9'\)"),
        ({"backends": header.backends[:1], "checks": ("lse",)}, "differ in backends, checks"),
        ({"cases": header.cases[1:], "suites": fewer}, "differ in cases; `"),
    ):
        with pytest.raises(RunFileError, match=words):
            merge_runs([part("1/2"), part("2/2", **fields)])


def test_what_two_runs_found_alike_is_kept_once(part, make_record):
    one, again = (make_record("passed", case_id="a", duration_s=seconds) for seconds in (1.0, 2.0))
    assert list(merge_runs([part("1/2", one), part("2/2", again)]).records) == [one]
    whole = part("", one)
    assert list(merge_runs([whole, part("3/7", again)]).records) == [one]


def test_records_that_contradict_each_other_are_named(part, make_record):
    with pytest.raises(RunFileError, match=r"2of2.jsonl: contradicts 1of2.jsonl: smoke/a, .* outcome \(passed and f"):
        merge_runs([part("1/2", make_record("passed", case_id="a")), part("2/2", make_record("failed", case_id="a"))])
    right, other = (make_record("passed", case_id="a", figures={"rows": rows}) for rows in (1, 2))
    with pytest.raises(RunFileError, match="differs in figures"):
        merge_runs([part("1/2", right), part("2/2", other)])
