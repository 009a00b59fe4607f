"""``attncheck run --resume``: the rest of a run that was cut off or killed at any moment, and nothing twice."""

import json
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from attncheck.errors import RunFileError
from attncheck.harness.cli import app as cli
from attncheck.harness.cli.run_files import found_in, read_part, resume_command
from attncheck.reports.run_file.store import RunWriter, lacks_header, read_run

WORDS = "run --backend reference --backend torch_sdpa --suite smoke --case decode.*,soft-cap"
RUN = f"{WORDS} --check numerics,lse,cache_write --in-process --no-cache --quiet"
KNOWN = "- {{backend: reference, case: smoke/{}, check: {}, outcome: failed, reason: known}}\n"


def records(text):
    lines = [json.loads(line) for line in text.splitlines()[1:]]
    return [{k: v for k, v in line.items() if k != "duration_s"} for line in lines if line["kind"] == "record"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The text of a run file that was not cut off."""
    path = tmp_path_factory.mktemp("whole") / "run.jsonl"
    assert cli.main([*RUN.split(), "--output", str(path)]) == 0
    return path.read_text()


@pytest.fixture
def cut(whole, tmp_path, monkeypatch):
    """``cut(lines, rest="")``: a run file of so many lines, and a piece of the next; in the folder to type in."""
    monkeypatch.chdir(tmp_path)

    def make(lines, rest=""):
        (tmp_path / "cut.jsonl").write_text("".join(whole.splitlines(keepends=True)[:lines]) + rest)
        return tmp_path / "cut.jsonl"

    return make


@pytest.fixture
def resume(typed):
    return lambda words="": typed(f"{RUN} {words} --resume cut.jsonl")


@pytest.mark.parametrize(("lines", "torn"), [(1, 0), (6, 0), (-1, 0), (5, 0.5), (5, 1)])
def test_the_rest_is_added_and_the_file_is_that_of_a_whole_run(cut, whole, resume, lines, torn):
    """``torn``: the share of the next line that is there, without its end."""
    line = whole.splitlines()[lines]
    path = cut(lines, line[: round(len(line) * torn)])
    kept = "".join(whole.splitlines(keepends=True)[:lines])
    done = resume()
    note = snapshot("note: cut.jsonl: the last line was cut off, and is written again\n")
    assert (done.code, done.err) == (0, note if torn else "")
    text = path.read_text()
    assert text.startswith(kept)
    assert records(text) == records(whole)
    assert json.loads(text.splitlines()[-1])["counts"] == json.loads(whole.splitlines()[-1])["counts"]


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


def test_a_run_file_has_one_writer(plain, header, make_record, tmp_path):
    path = tmp_path / "live.jsonl"
    with RunWriter(path, header) as live:
        live.add(make_record("passed", case_id="a"))
        early = read_part(path, header)
        with pytest.raises(RunFileError) as during, RunWriter(path, header, early):
            pass
        live.add(make_record("passed", case_id="b"))
    with pytest.raises(RunFileError) as after, RunWriter(path, header, early):
        pass
    assert [plain(str(refused.value)) for refused in (during, after)] == snapshot(
        [
            "TMP/live.jsonl: another run writes this file; wait until it has ended",
            "TMP/live.jsonl: another run has written it in the meantime",
        ]
    )
    assert [each.case_id for each in read_run(path).records] == ["a", "b"]


def test_a_run_that_lacks_records_is_incomplete_until_it_is_resumed(cut, whole, resume, typed):
    header, *lines, footer = whole.splitlines(keepends=True)
    counts = json.loads(footer)
    counts["counts"][json.loads(lines[4])["outcome"]] -= 1
    path = cut(0, "".join([header, *lines[:4], *lines[5:], json.dumps(counts), "\n"]))
    printed = typed("report cut.jsonl").out
    assert "cut.jsonl is incomplete: 1 of 5 cases lack records, such as smoke/" in printed
    assert printed.splitlines()[-1].startswith("unfinished: ")
    Path("whole.jsonl").write_text(whole)
    done = typed("compare whole.jsonl cut.jsonl")
    assert (done.code, "NEW is incomplete: 1 of 5 cases lack records" in done.out) == (1, True)
    assert resume().code == 0
    assert sorted(map(str, records(path.read_text()))) == sorted(map(str, records(whole)))
    assert read_run(path).complete


REPEAT = "error: cut.jsonl: cannot be resumed: these differ from the run: {}; restore them, or start a new run\n"
TIME = "time torch_sdpa --suite smoke --case decode.float16 --time-limit 0.01 --in-process -q"


def test_another_question_is_refused_by_what_differs(cut, plain, typed):
    path = cut(4)
    Path("known.yaml").write_text(KNOWN.format("decode.float16", "numerics"))
    assert typed(f"{TIME} --output timed.jsonl").code == 0
    timed = Path("timed.jsonl").read_text().splitlines(keepends=True)[0]
    for text, command, words, what in [
        (path.read_text(), RUN, "--seed 3", "seed (0 and 3)"),
        (path.read_text(), RUN, "--check containment", "checks"),
        (path.read_text(), RUN, "--backend flex_attention", "backends"),
        (path.read_text(), RUN, "--shard 1/2", "shard ('' and '1/2')"),
        (path.read_text(), RUN, "--expect known.yaml", "options.expect ('' and 'HASH')"),
        (timed, TIME, "--time-limit 0.02", "options.time_limit (0.01 and 0.02)"),
        (timed, TIME, "--warm-cache", "options.warm_cache (False and True)"),
        (timed, TIME, "--kernels", "options.kernels (False and True)"),
    ]:
        path.write_text(text)
        done = typed(f"{command} {words} --resume cut.jsonl")
        assert (done.code, plain(done.err)) == (2, REPEAT.format(what))
        assert path.read_text() == text


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
    ("ref", "edited"),
    [
        ("./mine.py:Mine", {"mine.py": "mine.py", "resume_helper.py": "resume_helper.py", "kernel.so": "kernel.so"}),
        ("./resume_pkg/back.py", {"resume_pkg/scales.py": "scales.py"}),
        ("resume_pkg.back:Packed", {"resume_pkg/scales.py": "resume_pkg/scales.py"}),
    ],
)
def test_an_edited_file_of_a_backend_is_another_question(tmp_path, monkeypatch, typed, ref, edited):
    """``edited``: by file, how the message names it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("resume_helper", "resume_pkg", "resume_pkg.back", "resume_pkg.scales"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    if ref.startswith("resume_pkg"):
        monkeypatch.syspath_prepend(tmp_path)
    for name, text in CODE.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    words = f"run {ref} --suite smoke --case decode.float16 --check cache_write --in-process -q"
    assert typed(f"{words} --output run.jsonl").code == 0
    Path("cut.jsonl").write_text(Path("run.jsonl").read_text().splitlines(keepends=True)[0])
    backend = read_run("run.jsonl").header.backends[0].name
    for file, named in edited.items():
        Path(file).write_text(f"{CODE[file]}# edited\n")
        done = typed(f"{words} --resume cut.jsonl")
        assert (done.code, done.err) == (2, REPEAT.format(f"the file {named} of backend {backend}"))
        Path(file).write_text(CODE[file])


def test_a_complete_run_ends_as_it_ended(cut, whole, resume, typed):
    """An error of the run, here an entry about no case, fails it again."""
    path = cut(len(whole.splitlines()))
    done = resume()
    assert done.code == 0
    assert "passed: 2 backends (2 passed)" in done.out
    assert done.err == "note: cut.jsonl is complete: nothing is left to examine\n"
    assert path.read_text() == whole
    Path("known.yaml").write_text(KNOWN.format("soft-cap", "lse"))
    path.unlink()
    assert typed(f"{RUN} --expect known.yaml --output cut.jsonl").code == 1
    done = resume("--expect known.yaml")
    assert (done.code, "error: known.yaml:1" in done.out) == (1, True)


def test_an_expected_failure_of_the_first_part_is_not_missed(tmp_path, monkeypatch, typed, resume):
    monkeypatch.chdir(tmp_path)
    Path("known.yaml").write_text(KNOWN.format("decode.float16", "numerics"))
    assert typed(f"{RUN} --expect known.yaml --output cut.jsonl").code == 1
    lines = Path("cut.jsonl").read_text().splitlines(keepends=True)
    Path("cut.jsonl").write_text("".join(lines[:4]))
    assert resume("--expect known.yaml").code == 1
    assert json.loads(Path("cut.jsonl").read_text().splitlines()[-1])["errors"] == json.loads(lines[-1])["errors"]


def test_a_time_that_was_not_taken_in_the_first_round_is_not_taken_in_others(make_record):
    taken = make_record("passed", check="timing", case_id="a")
    refused = make_record("unsupported", check="timing", case_id="b")
    found = {(case, number) for _, case, _, number in found_in([taken, refused], rounds=3)}
    assert found == {("smoke/a", 0), ("smoke/b", 0), ("smoke/b", 1), ("smoke/b", 2)}


def test_the_command_that_resumes_is_that_of_the_run(tmp_path):
    words = ["attncheck", "run", "a b", "--output", "x.jsonl", "--seed", "1", "--output=y.jsonl"]
    command = shlex.split(resume_command(words, tmp_path / "r.jsonl"))
    assert command == ["attncheck", "run", "a b", "--seed", "1", "--resume", str(tmp_path / "r.jsonl")]
    assert shlex.split(resume_command(command, tmp_path / "r.jsonl")) == command


KILLED = "run reference ./wrong.py:Wrong --suite smoke --case decode.*,soft-cap --check numerics,lse --device cpu"
COMMAND = [sys.executable, "-m", "attncheck", *KILLED.split(), "-j", "2", "--no-cache", "--quiet"]
KILLS = 12


def started(*words):
    return subprocess.Popen([*COMMAND, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def records_of(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "duration_s"} for line in lines if line["kind"] == "record"]


@pytest.mark.slow
def test_a_run_that_is_killed_and_resumed_is_that_of_a_run_left_alone(folder, preloaded, workers_of, is_alive):
    subprocess.run([sys.executable, "-c", ""], check=True)  # waits until the preloaded process is there
    began = time.monotonic()
    assert started("--output", "whole.jsonl").wait(60) == 1
    took = time.monotonic() - began
    moments = random.Random(KILLS)
    for number in range(KILLS):
        cut = folder / f"cut{number}.jsonl"
        process = started("--output", cut.name)
        time.sleep(moments.uniform(0, took))
        process.send_signal(signal.SIGSTOP)  # so that it starts no worker behind the list
        workers = workers_of(process.pid)
        process.kill()
        process.wait()
        killed = time.monotonic()
        while any(map(is_alive, workers)):
            assert time.monotonic() - killed < 5  # a second, and what a busy machine adds
            time.sleep(0.005)
        kept = cut.read_bytes().rpartition(b"\n")[0] if cut.exists() else b""
        if not cut.exists() or lacks_header(cut) or not read_run(cut).complete:
            assert started("--resume" if cut.exists() else "--output", cut.name).wait(60) == 1
        assert read_run(cut).complete
        assert cut.read_bytes().startswith(kept)
        assert records_of(cut) == records_of(folder / "whole.jsonl")
