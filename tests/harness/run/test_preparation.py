"""A run is prepared: without a named suite, each backend gets the one that it declares, on pages that it takes."""

import re

import pytest
from inline_snapshot import snapshot

import attncheck
from attncheck.cases.loader import load_suite
from attncheck.errors import QuestionError, SelectionError
from attncheck.harness.run.backend_loading import ThisProcess
from attncheck.harness.run.options import RunOptions
from attncheck.harness.run.outcomes import not_loaded
from attncheck.harness.run.run import Run
from attncheck.harness.run.selection import DEFAULT_INTERPRETED, DEFAULT_SUITES, select_cases

MINE = """
from attncheck.backends.candidates.reference import ReferenceBackend

class Slow(ReferenceBackend):
    @classmethod
    def default_suite(cls, device): return "interpreted"

class Slower(Slow):
    pass

class Odd(ReferenceBackend):
    @classmethod
    def default_suite(cls, device): return "decode"

class Picky(ReferenceBackend):
    supported_layouts = ("HND",)

    @classmethod
    def get_supported_kernel_block_sizes(cls): return [48]

class Broken(ReferenceBackend):
    @classmethod
    def get_supported_kernel_block_sizes(cls): raise RuntimeError("no sizes")
"""
CASES = ["decode", "decode.float16", "shared-cache"]
"""The first is a case of `interpreted` alone, the second of `smoke` alone, the third of both."""


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return str(path)


def examined_keys(records):
    found = {}
    for record in records:
        found.setdefault(record.backend, set()).add(f"{record.suite}/{record.case_id}")
    return found


def opened(selection, refs, here=None, **how):
    return Run.open(selection, RunOptions(backends=tuple(refs), device="cpu"), here or ThisProcess(), **how)


def test_each_backend_is_examined_on_its_own_suite(mine):
    here, slow = ThisProcess(), f"{mine}:Slow"
    run = opened(select_cases([], CASES, ["numerics"]), ["reference", slow], here)
    assert examined_keys(list(here.examiner(run).run())) == {
        "reference": {"smoke/decode.float16", "smoke/decode.bfloat16", "smoke/decode.float32", "smoke/shared-cache"},
        "Slow": {"interpreted/decode", "interpreted/shared-cache"},
    }
    assert [suite.name for suite in run.selection.suites] == ["smoke", "interpreted"]
    assert run.notes == (f"reference: suite smoke; {slow}: suite interpreted",)
    lone = opened(select_cases([], ["decode.float16"]), ["reference", slow])
    assert lone.notes == (f"reference: suite smoke; {slow}: no case of suite interpreted",)
    named = opened(select_cases(["smoke"], ["decode.float16"]), ["reference", slow]).plan
    assert [[case.key for case in named.cases_of(ref)] for ref in ("reference", slow)] == [["smoke/decode.float16"]] * 2


def test_a_suite_without_a_backend_is_not_part_of_the_run(mine):
    for ref, suite in ((f"{mine}:Slow", "interpreted"), ("reference", "smoke")):
        run = opened(select_cases([], (), ["numerics"]), [ref])
        assert run.selection.refs == (suite,)
        assert {case.suite for case in run.plan.cases} == {suite}
        assert run.notes == ()


def test_a_run_that_names_nothing_is_short():
    """Of the real candidates: those that are interpreted on a CPU, and those that serve latent caches alone."""
    pytest.importorskip("triton", reason="without Triton nothing is interpreted")
    run = opened(select_cases([]), [])
    case_keys = {each.ref: {case.key for case in run.plan.cases_of(each.ref)} for each in run.backends}
    assert case_keys["triton_unified"] == {f"interpreted/{case}" for case in DEFAULT_INTERPRETED}
    assert case_keys["triton_mla"] == {"interpreted/latent"}
    assert case_keys["torch_mla"] == {"smoke/latent", "smoke/latent-float32"}
    assert case_keys["torch_sdpa"] == {case.key for case in load_suite("smoke").cases}
    assert set(run.selection.cases) == set(run.plan.cases)
    assert {case.key for case in run.plan.cases} == set().union(*case_keys.values())
    (note,) = run.notes
    assert re.search(r"triton_unified.*: 9 of 79 cases of suite interpreted; ", note)
    assert note == snapshot(
        "reference, torch_sdpa, flex_attention, torch_varlen, flash_attn, flashinfer: suite smoke; triton_unified, xformers: 9 of 79 cases of suite interpreted; reference_mla, torch_mla: 2 of 78 cases of suite smoke; triton_mla: 1 of 79 cases of suite interpreted; --case '*' selects all"
    )


def test_a_run_that_names_a_backend_or_a_case_is_whole(mine):
    whole = {case.key for case in load_suite("interpreted").cases}
    named = opened(select_cases([]), [f"{mine}:Slow"])
    assert {case.key for case in named.plan.cases_of(f"{mine}:Slow")} == whole
    pytest.importorskip("triton", reason="without Triton nothing is interpreted")
    by_case = opened(select_cases([], ["*"]), [])
    assert {case.key for case in by_case.plan.cases_of("triton_mla")} == whole


def test_a_backend_that_cannot_run_here_is_refused_or_kept():
    gone = not_loaded("gone", ("no library",))
    selection, here = select_cases(["smoke"]), ThisProcess([gone])
    with pytest.raises(SelectionError, match=r"^backend 'gone' is unavailable here: no library$"):
        opened(selection, ["gone"], here)
    kept = opened(selection, ["gone"], here, keeps_unavailable=True)
    assert [each.unavailable_reasons for each in kept.backends] == [("no library",)]
    assert here.examiner(kept).plan.backends == (gone,)


def test_what_is_wrong_is_refused_before_anything_is_examined(mine):
    with pytest.raises(SelectionError, match=r"^no such case in interpreted, the default suite; give --suite smoke$"):
        opened(select_cases([], ["decode.float16"]), [f"{mine}:Slow", f"{mine}:Slower"])
    with pytest.raises(QuestionError, match="default_suite answered 'decode', none of smoke, interpreted"):
        attncheck.examine(f"{mine}:Odd")
    assert DEFAULT_SUITES == ("smoke", "interpreted")
    with pytest.raises(SelectionError, match="seed -1"):
        Run.open(select_cases(["smoke"]), RunOptions(backends=("reference",), device="cpu", seed=-1), ThisProcess())


def test_from_python_too(mine):
    examination = attncheck.examine(f"{mine}:Slow", cases="decode", checks="numerics")
    assert examined_keys(examination.records) == {"Slow": {"interpreted/decode"}}
    assert [suite.name for suite in examination.header.suites] == ["interpreted"]


@pytest.mark.parametrize("suites", [["smoke"], []])
def test_a_named_backend_is_examined_on_pages_that_it_takes(mine, suites):
    selection = select_cases(suites, ["decode.float32"], ["numerics"])
    here = ThisProcess()
    run = opened(selection, [f"{mine}:Picky"], here, fits_pages=True)
    assert run.selection.refs == ("smoke{cache.block_size: 48, cache.layout: HND}",)
    (record,) = here.examiner(run).run()
    assert (record.outcome, record.case_hash) == ("passed", run.selection.cases[0].hash)
    unfitted = opened(selection, [f"{mine}:Broken"], fits_pages=True)  # its declarations raise
    assert unfitted.selection.refs == ("smoke",)
