"""attncheck run --provider: exit codes, what is printed, what the run file holds and what a report makes of it."""

import re
import shlex
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from attncheck.harness.cli import app as cli
from attncheck.harness.providers import examine
from attncheck.reports.run_file.store import read_run

SUITE = """\
suite: small
defaults:
  layer: {num_heads: 4, num_kv_heads: 2, head_size: 32, dtype: float32}
cases:
  - {id: decode, batch: q1s20_q1s7}
  - {id: mixed, batch: q1s20_q17, checks: [numerics]}
"""
RIGHT = "from attncheck.reference import PAD_SLOT_ID, slice_query_start_locs\n__version__ = '7.1'\n"
WRONG = """\
from attncheck.reference import PAD_SLOT_ID, split_attn_metadata
from attncheck.reference import slice_query_start_locs as right

def slice_query_start_locs(query_start_loc, request_slice):
    return right(query_start_loc, request_slice) + 1
"""


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("providers")
    files = {"small.yaml": SUITE, "right.py": RIGHT, "wrong.py": WRONG, "broken.py": "import nowhere\n", "none.py": ""}
    for name, text in files.items():
        (path / name).write_text(text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.setattr(examine, "drawn_batches", lambda _seed: [])  # drawing batches has tests of its own
        yield


def run(*words):
    return cli.main(["run", "--suite", "small.yaml", *words])


@pytest.fixture(scope="module")
def printed():
    """What a run of the wrong provider prints; its file is ``wrong.jsonl``."""
    with redirect_stdout(StringIO()) as text:
        assert run("--provider", "wrong.py", "--output", "wrong.jsonl") == 1
    return text.getvalue()


def test_a_right_provider_ends_with_0_and_a_record_for_every_function(capsys):
    assert run("--provider", "right.py", "--output", "right.jsonl") == 0
    printed = capsys.readouterr().out
    assert "utilities of right 7.1" in printed
    assert re.search(r"^slice_query_start_locs: verdict equal, questions (\d+), equal \1$", printed, re.MULTILINE)
    assert re.search(r"^split_attn_metadata: verdict missing$", printed, re.MULTILINE)
    assert re.search(r"passed: 1 provider, \d+ functions: 2 passed, \d+ unsupported", printed)
    found = read_run("right.jsonl")
    assert {record.check for record in found.records} == {"utilities"}
    passed = {record.case_id for record in found.records if record.outcome == "passed"}
    assert passed == {"PAD_SLOT_ID", "slice_query_start_locs"}
    assert [(info.name, info.ref, info.version) for info in found.header.backends] == [("right", "right.py", "7.1")]


def test_a_wrong_one_ends_with_1_both_values_and_a_cause(printed):
    assert re.search(r"^slice_query_start_locs: verdict differs, ", printed, re.MULTILINE)
    assert re.search(r"^split_attn_metadata: verdict equal, ", printed, re.MULTILINE)
    flat = " ".join(printed.split())
    assert "request_slice 0:1: returned[0]: expected 0 of int32 [0, 1]; got 1 of int32 [1, 2]" in flat
    assert "likely cause: each wrong number is 1 too large" in flat
    (record,) = (record for record in read_run("wrong.jsonl").records if record.outcome == "failed")
    assert record.figures["differs"] + record.figures["equal"] == record.figures["questions"]
    assert record.figures["equal"] == 2  # what the reference refuses, this one refuses too


def test_the_line_that_repeats_it_does(printed, capsys):
    (line,) = re.findall(r"repeat: attncheck (run .*)", printed)
    assert cli.main(shlex.split(line)) == 1
    assert "1 provider, 1 function: 1 failed" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["terminal", "markdown"])
@pytest.mark.usefixtures("printed")
def test_a_run_file_is_reported(form, capsys):
    assert cli.main(["report", "wrong.jsonl", "--format", form]) == 0
    report = capsys.readouterr().out
    assert "utilities of wrong" in report
    assert "expected 0 of int32" in " ".join(report.replace("\\", "").split())
    assert "not examined" not in report.lower()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--provider", "broken.py"), "No module named 'nowhere'"),
        (("--provider", "absent.py"), "cannot read absent.py"),
        (("--provider", "no.such.module"), "no module 'no' is installed"),
        (("--provider", "what is this"), "neither a module's name nor a Python file"),
        (("--provider", "none.py"), "offers none of these functions"),
        (("--case", "slice*"), "no case of small.yaml matches 'slice*'"),
        (("--check", "utilities"), "use --provider"),
        (("--provider", "right.py", "--check", "numerics"), "leaves out"),
        (("--provider", "right.py", "--check", "numerics", "--check", "utilities"), "give --backend"),
        (("--provider", "right.py", "--backend", "reference", "--check", "utilities"), "leave out --backend"),
        (("--provider", "right.py", "--case", "slice_query"), "did you mean 'slice_query_start_locs'"),
        (("--provider", "right.py", "--provider", "./right.py"), "two of the providers are called 'right'"),
    ],
)
def test_wrong_questions_end_with_2(words, why, capsys):
    assert run(*words) == 2
    assert why in capsys.readouterr().err


def test_functions_are_chosen_by_pattern_which_a_case_may_resemble():
    assert run("--provider", "wrong.py", "--case", "PAD*", "--in-process", "--output", "chosen.jsonl") == 0
    assert [record.case_id for record in read_run("chosen.jsonl").records] == ["PAD_SLOT_ID"]
    like = SUITE.replace("small", "like").replace("id: mixed", "id: split_prefill_chunk")
    Path("like.yaml").write_text(like, encoding="utf-8")
    words = ("--backend", "reference", "--suite", "like.yaml", "--case", "split_prefill_chunk")
    assert run("--provider", "right.py", *words, "--dry-run") == 0


def test_beside_a_backend_both_are_examined(capsys):
    words = ("--backend", "reference", "--check", "numerics", "--check", "utilities", "--case", "slice*")
    assert run("--provider", "right.py", *words, "--output", "both.jsonl") == 0
    assert "passed: 1 backend, 2 cases: 2 right; 1 provider, 1 function: 1 passed" in capsys.readouterr().out
    records = [(record.backend, record.check) for record in read_run("both.jsonl").records]
    assert records == [("reference", "numerics")] * 2 + [("right", "utilities")]


def test_an_expected_difference_is_no_failure():
    entry = "backend: wrong, case: slice_query_start_locs, check: utilities, outcome: failed, reason: known"
    Path("known.yaml").write_text(f"- {{{entry}}}\n", encoding="utf-8")
    assert run("--provider", "wrong.py", "--expect", "known.yaml", "--output", "expected.jsonl") == 0
    assert {record.outcome for record in read_run("expected.jsonl").records} == {"passed", "xfailed", "unsupported"}
    assert run("--provider", "right.py", "--expect", "known.yaml") == 0
