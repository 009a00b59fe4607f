"""``attncheck run --resume`` as typed: the rest of a run that was cut off, and nothing twice."""

import json
import shlex
import sys
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from attncheck.errors import RunFileError
from attncheck.harness.cli import app as cli
from attncheck.harness.cli.run_files import found_in, read_part, resume_command
from attncheck.reports.run_file.store import RunWriter, read_run

WORDS = ["--backend", "reference", "--backend", "torch_sdpa", "--suite", "smoke", "--case", "decode.*,soft-cap"]
OPTIONS = [*WORDS, "--check", "numerics,lse,cache_write", "--in-process", "--no-cache", "--quiet"]


def records(text):
    lines = [json.loads(line) for line in text.splitlines()[1:]]
    return [{k: v for k, v in line.items() if k != "duration_s"} for line in lines if line["kind"] == "record"]


def run(*words):
    return cli.main(["run", *words])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The text of a run file that was not cut off."""
    path = tmp_path_factory.mktemp("whole") / "run.jsonl"
    assert run(*OPTIONS, "--output", str(path)) == 0
    return path.read_text()


@pytest.fixture
def cut(whole, tmp_path, monkeypatch):
    """``cut(lines, rest="")``: a run file of so many lines, and a piece of the next; in the folder to type in."""
    monkeypatch.chdir(tmp_path)

    def make(lines, rest=""):
        (tmp_path / "cut.jsonl").write_text("".join(whole.splitlines(keepends=True)[:lines]) + rest)
        return tmp_path / "cut.jsonl"

    return make


@pytest.mark.parametrize("lines", [1, 6, -1])
def test_the_rest_is_added_and_the_file_is_that_of_a_whole_run(cut, whole, lines, capsys):
    lines = lines if lines > 0 else len(whole.splitlines()) - 1
    path = cut(lines)
    before = path.read_text()
    assert run(*OPTIONS, "--resume", "cut.jsonl") == 0
    text = path.read_text()
    assert text.startswith(before)
    assert records(text) == records(whole)
    assert json.loads(text.splitlines()[-1])["counts"] == json.loads(whole.splitlines()[-1])["counts"]
    assert cli.main(["report", "cut.jsonl"]) == 0


@pytest.mark.parametrize("whole_line", [False, True])
def test_a_torn_last_line_is_written_again(cut, whole, capsys, whole_line):
    line = whole.splitlines()[5]
    path = cut(5, line if whole_line else line[: len(line) // 2])
    assert run(*OPTIONS, "--resume", "cut.jsonl") == 0
    assert records(path.read_text()) == records(whole)
    assert capsys.readouterr().err == snapshot("note: cut.jsonl: the last line was cut off, and is written again\n")


def test_a_cut_at_any_byte_of_the_last_two_lines_costs_only_what_it_tears(header, make_record, write_run, tmp_path):
    found = [make_record("passed", case_id="a"), make_record("failed", case_id="b", summary="größer: 7 of 40 rows")]
    content = write_run(tmp_path / "whole.jsonl", header, *found).read_bytes()
    path = tmp_path / "cut.jsonl"
    *_, last, footer = content.splitlines(keepends=True)
    for end in range(len(content) - len(last) - len(footer), len(content) - 1):
        path.write_bytes(content[:end])
        part = read_part(path, header)
        assert part.records == tuple(found[: 2 if end >= len(content) - len(footer) else 1])
        if end % 32:
            continue
        with RunWriter(path, header, part) as writer:
            for record in found[len(part.records) :]:
                writer.add(record)
        assert read_run(path).records == tuple(found)
        assert read_run(path).complete


def test_a_run_file_has_one_writer(plain, header, make_record, tmp_path):
    path = tmp_path / "live.jsonl"
    with RunWriter(path, header) as live:
        live.add(make_record("passed", case_id="a"))
        early = read_part(path, header)
        with pytest.raises(RunFileError) as refused, RunWriter(path, header, early):
            pass
        assert plain(str(refused.value)) == snapshot(
            "TMP/live.jsonl: another run writes this file; wait until it has ended"
        )
        live.add(make_record("passed", case_id="b"))
    with pytest.raises(RunFileError) as refused, RunWriter(path, header, early):
        pass
    assert plain(str(refused.value)) == snapshot("TMP/live.jsonl: another run has written it in the meantime")
    assert [each.case_id for each in read_run(path).records] == ["a", "b"]


def test_a_run_that_lacks_records_is_incomplete_until_it_is_resumed(cut, whole, capsys):
    header, *lines, footer = whole.splitlines(keepends=True)
    counts = json.loads(footer)
    counts["counts"][json.loads(lines[4])["outcome"]] -= 1
    path = cut(0, "".join([header, *lines[:4], *lines[5:], json.dumps(counts), "\n"]))
    assert cli.main(["report", "cut.jsonl"]) == 0
    printed = capsys.readouterr().out
    assert "cut.jsonl is incomplete: 1 of 5 cases lack records, such as smoke/" in printed
    assert printed.splitlines()[-1].startswith("unfinished: ")
    Path("whole.jsonl").write_text(whole)
    assert cli.main(["compare", "whole.jsonl", "cut.jsonl"]) == 1
    assert "NEW is incomplete: 1 of 5 cases lack records" in capsys.readouterr().out
    assert run(*OPTIONS, "--resume", "cut.jsonl") == 0
    assert sorted(map(str, records(path.read_text()))) == sorted(map(str, records(whole)))
    assert read_run(path).complete


def test_a_file_that_was_cut_within_its_header_is_begun_anew(plain, header, make_record, write_run, tmp_path, capsys):
    record = make_record("passed")
    path = write_run(tmp_path / "cut.jsonl", header, record)
    content = path.read_bytes()
    for end in range(0, content.index(b"\n"), 17):
        path.write_bytes(content[:end])
        with RunWriter(path, header, read_part(path, header)) as writer:
            writer.add(record)
        assert read_run(path).records == (record,)
        assert plain(capsys.readouterr().err) == snapshot(
            "note: TMP/cut.jsonl: its header was cut off; the run starts from the beginning\n"
        )


def test_a_file_that_is_no_run_is_left_as_it_is(plain, header, tmp_path):
    path = tmp_path / "notes.jsonl"
    path.write_text("notes of mine")
    with pytest.raises(RunFileError) as refused:
        read_part(path, header)
    assert plain(str(refused.value)) == snapshot(
        "TMP/notes.jsonl:1: is not a run file: its first line is not JSON (expected ident at line 1 column 2)"
    )
    assert path.read_text() == "notes of mine"


REPEAT = "error: cut.jsonl: cannot be resumed: these differ from the run: {}; restore them, or start a new run\n"
DIFFERENT = {
    "--seed 3": "seed (0 and 3)",
    "--check containment": "checks",
    "--backend flex_attention": "backends",
    "--shard 1/2": "shard ('' and '1/2')",
    "--expect known.yaml": "options.expect ('' and 'HASH')",
}


def test_another_question_is_refused_by_what_differs(cut, plain, capsys):
    path = cut(4)
    entry = "{backend: torch_sdpa, case: smoke/decode.float16, check: numerics, outcome: failed, reason: known}"
    (path.parent / "known.yaml").write_text(f"- {entry}\n")
    before = path.read_text()
    for words, what in DIFFERENT.items():
        assert run(*OPTIONS, *words.split(), "--resume", "cut.jsonl") == 2
        assert plain(capsys.readouterr().err) == REPEAT.format(what)
    assert path.read_text() == before


def test_times_taken_otherwise_are_another_question(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    timed = ["time", "torch_sdpa", "--suite", "smoke", "--case", "decode.float16", "--time-limit", "0.01"]
    timed += ["--in-process", "-q"]
    assert cli.main([*timed, "--output", "cut.jsonl"]) == 0
    path = tmp_path / "cut.jsonl"
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    for words, what in {
        "--time-limit 0.02": "options.time_limit (0.01 and 0.02)",
        "--warm-cache": "options.warm_cache (False and True)",
        "--kernels": "options.kernels (False and True)",
    }.items():
        assert cli.main([*timed, *words.split(), "--resume", "cut.jsonl"]) == 2
        assert capsys.readouterr().err == REPEAT.format(what)


CODE = {
    "mine.py": """\
from attncheck.backends.candidates.torch_sdpa import SDPABackend
from resume_helper import SCALE

class Mine(SDPABackend):
    pass
""",
    "resume_helper.py": "SCALE = 1.0\n",
    "kernel.so": "not loaded yet",
    "resume_pkg/__init__.py": "",
    "resume_pkg/back.py": """\
from attncheck.backends.candidates.torch_sdpa import SDPABackend
from .scales import SCALE

class Packed(SDPABackend):
    pass
""",
    "resume_pkg/scales.py": "SCALE = 1.0\n",
}


@pytest.mark.parametrize(
    ("ref", "file", "named"),
    [
        ("./mine.py:Mine", "mine.py", "mine.py of backend Mine"),
        ("./mine.py", "resume_helper.py", "resume_helper.py of backend Mine"),
        ("./mine.py", "kernel.so", "kernel.so of backend Mine"),
        ("./resume_pkg/back.py", "resume_pkg/scales.py", "scales.py of backend Packed"),
        ("resume_pkg.back:Packed", "resume_pkg/scales.py", "resume_pkg/scales.py of backend Packed"),
    ],
)
def test_an_edited_file_of_a_backend_is_another_question(tmp_path, monkeypatch, capsys, ref, file, named):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("resume_helper", "resume_pkg", "resume_pkg.back", "resume_pkg.scales"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    if ref.startswith("resume_pkg"):
        monkeypatch.syspath_prepend(tmp_path)
    for name, text in CODE.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    words = [ref, "--suite", "smoke", "--case", "decode.float16", "--check", "cache_write", "--in-process", "-q"]
    assert run(*words, "--output", "run.jsonl") == 0
    Path("cut.jsonl").write_text(Path("run.jsonl").read_text().splitlines(keepends=True)[0])
    Path(file).write_text(f"{CODE[file]}# edited\n")
    assert run(*words, "--resume", "cut.jsonl") == 2
    assert f"these differ from the run: the file {named}; restore them, or start a new run" in capsys.readouterr().err


def test_a_complete_run_ends_as_it_ended(cut, whole, capsys):
    """An error of the run, here an entry about no case, fails it again."""
    path = cut(len(whole.splitlines()))
    assert run(*OPTIONS, "--resume", "cut.jsonl") == 0
    printed = capsys.readouterr()
    assert "passed: 2 backends (2 passed)" in printed.out
    assert printed.err == "note: cut.jsonl is complete: nothing is left to examine\n"
    assert path.read_text() == whole

    entry = {"backend": "reference", "case": "soft-cap", "check": "lse", "outcome": "errored", "reason": "x"}
    Path("known.yaml").write_text(json.dumps([entry]))
    assert run(*OPTIONS, "--expect", "known.yaml", "--output", "failed.jsonl") == 1
    capsys.readouterr()
    assert run(*OPTIONS, "--expect", "known.yaml", "--resume", "failed.jsonl") == 1
    assert "error: known.yaml:1" in capsys.readouterr().out


def test_an_expected_failure_of_the_first_part_is_not_missed(cut, whole, capsys):
    path = cut(1)
    (path.parent / "known.yaml").write_text(
        "- {backend: reference, case: smoke/decode.float16, check: numerics, outcome: failed, reason: known}\n"
    )
    expected = ["--expect", "known.yaml"]
    path.unlink()
    assert run(*OPTIONS, *expected, "--output", "cut.jsonl") == 1
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:4]))
    capsys.readouterr()
    assert run(*OPTIONS, *expected, "--resume", "cut.jsonl") == 1
    assert json.loads(path.read_text().splitlines()[-1])["errors"] == json.loads(lines[-1])["errors"]


def test_a_time_that_was_not_taken_in_the_first_round_is_not_taken_in_others(make_record):
    taken = make_record("passed", check="timing", case_id="a")
    refused = make_record("unsupported", check="timing", case_id="b")
    found = found_in([taken, refused], rounds=3)
    assert {(case, number) for _, case, _, number in found} == {
        ("smoke/a", 0),
        ("smoke/b", 0),
        ("smoke/b", 1),
        ("smoke/b", 2),
    }


def test_the_command_that_resumes_is_that_of_the_run(tmp_path):
    words = ["attncheck", "run", "a b", "--output", "x.jsonl", "--seed", "1", "--output=y.jsonl"]
    command = shlex.split(resume_command(words, tmp_path / "r.jsonl"))
    assert command == ["attncheck", "run", "a b", "--seed", "1", "--resume", str(tmp_path / "r.jsonl")]
    assert shlex.split(resume_command(command, tmp_path / "r.jsonl")) == command
