"""A run is prepared: without a named suite, each backend gets the one that it declares."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot

import attncheck
from attncheck.cases.loader import load_suite
from attncheck.errors import QuestionError, SelectionError
from attncheck.harness.run.backend_loading import ThisProcess
from attncheck.harness.run.options import RunOptions
from attncheck.harness.run.outcomes import not_loaded
from attncheck.harness.run.run import Run
from attncheck.harness.run.selection import DEFAULT_INTERPRETED, DEFAULT_SUITES, Selection, select_cases
from attncheck.reports.run_file.records import Record

SLOW = """
from attncheck.backends.candidates.reference import ReferenceBackend

class Slow(ReferenceBackend):
    @classmethod
    def default_suite(cls, device): return "interpreted"

class Slower(Slow):
    pass

class Odd(ReferenceBackend):
    @classmethod
    def default_suite(cls, device): return "decode"
"""
CASES = ["decode", "decode.float16", "shared-cache"]
"""The first is a case of `interpreted` alone, the second of `smoke` alone, the third of both."""


@pytest.fixture
def slow(tmp_path: Path) -> str:
    path = tmp_path / "slow.py"
    path.write_text(SLOW)
    return f"{path}:Slow"


def examined_keys(records: list[Record]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for record in records:
        found.setdefault(record.backend, set()).add(f"{record.suite}/{record.case_id}")
    return found


def opened(selection: Selection, refs: Sequence[str], here: ThisProcess | None = None, **how: Any) -> Run:
    return Run.open(selection, RunOptions(backends=tuple(refs), device="cpu"), here or ThisProcess(), **how)


def examined(run: Run, here: ThisProcess) -> list[Record]:
    return list(here.examiner(run).run())


def test_each_backend_is_examined_on_its_own_suite(slow: str) -> None:
    selection = select_cases([], CASES, ["numerics"])
    here = ThisProcess()
    prepared = opened(selection, ["reference", slow], here)
    assert examined_keys(examined(prepared, here)) == {
        "reference": {"smoke/decode.float16", "smoke/decode.bfloat16", "smoke/decode.float32", "smoke/shared-cache"},
        "Slow": {"interpreted/decode", "interpreted/shared-cache"},
    }
    assert [suite.name for suite in prepared.selection.suites] == ["smoke", "interpreted"]
    assert prepared.notes == (f"reference: suite smoke; {slow}: suite interpreted",)
    lone = opened(select_cases([], ["decode.float16"]), ["reference", slow])
    assert lone.notes == (f"reference: suite smoke; {slow}: no case of suite interpreted",)


def test_every_backend_is_examined_on_a_named_suite(slow: str) -> None:
    plan = opened(select_cases(["smoke"], ["decode.float16"]), ["reference", slow]).plan
    assert [[case.key for case in plan.cases_of(ref)] for ref in ("reference", slow)] == [["smoke/decode.float16"]] * 2


def test_a_suite_without_a_backend_is_not_part_of_the_run(slow: str) -> None:
    for ref, suite in ((slow, "interpreted"), ("reference", "smoke")):
        prepared = opened(select_cases([], (), ["numerics"]), [ref])
        assert prepared.selection.refs == (suite,)
        assert {case.suite for case in prepared.plan.cases} == {suite}
        assert prepared.notes == ()


def test_cases_of_another_suite_are_refused_by_its_name(slow: str) -> None:
    with pytest.raises(SelectionError, match=r"^no such case in interpreted, the default suite; give --suite smoke$"):
        opened(select_cases([], ["decode.float16"]), [slow, slow.replace("Slow", "Slower")])


def test_a_run_that_names_nothing_is_short() -> None:
    """Of the real candidates: those that are interpreted on a CPU, and those that serve latent caches alone."""
    pytest.importorskip("triton", reason="without Triton nothing is interpreted")
    prepared = opened(select_cases([]), [])
    case_keys = {each.ref: {case.key for case in prepared.plan.cases_of(each.ref)} for each in prepared.backends}
    assert case_keys["triton_unified"] == {f"interpreted/{case}" for case in DEFAULT_INTERPRETED}
    assert case_keys["triton_mla"] == {"interpreted/latent"}
    assert case_keys["torch_mla"] == {"smoke/latent", "smoke/latent-float32"}
    assert case_keys["torch_sdpa"] == {case.key for case in load_suite("smoke").cases}
    assert set(prepared.selection.cases) == set(prepared.plan.cases)
    assert {case.key for case in prepared.plan.cases} == set().union(*case_keys.values())
    (note,) = prepared.notes
    assert re.search(r"triton_unified.*: 9 of 79 cases of suite interpreted; ", note)
    assert note == snapshot(
        "reference, torch_sdpa, flex_attention, torch_varlen, flash_attn, flashinfer: suite smoke; triton_unified, xformers: 9 of 79 cases of suite interpreted; reference_mla, torch_mla: 2 of 78 cases of suite smoke; triton_mla: 1 of 79 cases of suite interpreted; --case '*' selects all"
    )


def test_a_run_that_names_a_backend_or_a_case_is_whole(slow: str) -> None:
    whole = {case.key for case in load_suite("interpreted").cases}
    named = opened(select_cases([]), [slow])
    assert {case.key for case in named.plan.cases_of(slow)} == whole
    pytest.importorskip("triton", reason="without Triton nothing is interpreted")
    by_case = opened(select_cases([], ["*"]), [])
    assert {case.key for case in by_case.plan.cases_of("triton_mla")} == whole
    assert "of 77 cases" not in by_case.notes[0]


def test_a_backend_that_cannot_run_here_is_refused_or_kept() -> None:
    gone = not_loaded("gone", ("no library",))
    selection, here = select_cases(["smoke"]), ThisProcess([gone])
    with pytest.raises(SelectionError, match=r"^backend 'gone' is unavailable here: no library$"):
        opened(selection, ["gone"], here)
    prepared = opened(selection, ["gone"], here, keeps_unavailable=True)
    assert [each.unavailable_reasons for each in prepared.backends] == [("no library",)]
    assert here.examiner(prepared).plan.backends == (gone,)


def test_a_seed_below_zero_is_refused() -> None:
    with pytest.raises(SelectionError, match="seed -1"):
        Run.open(select_cases(["smoke"]), RunOptions(backends=("reference",), device="cpu", seed=-1), ThisProcess())


def test_from_python_too(slow: str) -> None:
    examination = attncheck.examine(slow, cases="decode", checks="numerics")
    assert examined_keys(list(examination.records)) == {"Slow": {"interpreted/decode"}}
    assert [suite.name for suite in examination.header.suites] == ["interpreted"]


def test_a_default_suite_is_one_of_the_two(slow: str) -> None:
    with pytest.raises(QuestionError, match="default_suite answered 'decode', none of smoke, interpreted"):
        attncheck.examine(slow.replace("Slow", "Odd"))
    assert DEFAULT_SUITES == ("smoke", "interpreted")


PICKY = """
from attncheck.backends.candidates.reference import ReferenceBackend

class Picky(ReferenceBackend):
    supported_layouts = ("HND",)

    @classmethod
    def get_supported_kernel_block_sizes(cls): return [48]

class Broken(ReferenceBackend):
    @classmethod
    def get_supported_kernel_block_sizes(cls): raise RuntimeError("no sizes")
"""


@pytest.fixture
def picky(tmp_path: Path) -> str:
    path = tmp_path / "picky.py"
    path.write_text(PICKY)
    return f"{path}:Picky"


@pytest.mark.parametrize("suites", [["smoke"], []])
def test_a_named_backend_is_examined_on_pages_that_it_takes(picky: str, suites: list[str]) -> None:
    selection = select_cases(suites, ["decode.float32"], ["numerics"])
    here = ThisProcess()
    prepared = opened(selection, [picky], here, fits_pages=True)
    assert prepared.selection.refs == ("smoke{cache.block_size: 48, cache.layout: HND}",)
    (record,) = examined(prepared, here)
    assert (record.outcome, record.case_hash) == ("passed", prepared.selection.cases[0].hash)
    assert prepared.notes[0] == snapshot(
        "suite smoke: cache.block_size=48 instead of 16, cache.layout=HND instead of NHD, for Picky; --set chooses others"
    )


def test_declarations_that_raise_choose_no_pages(picky: str) -> None:
    selection = select_cases(["smoke"], ["decode.float32"], ["numerics"])
    prepared = opened(selection, [picky.replace("Picky", "Broken")], fits_pages=True)
    assert prepared.selection.refs == ("smoke",)
