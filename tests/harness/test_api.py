"""``attncheck.examine``: candidates of every kind, typed records, silence, and errors for wrong questions only."""

import ctypes
import os
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from torch import Tensor

import attncheck
from attncheck.backends.candidates.reference import ReferenceBackend
from attncheck.errors import (
    BackendLoadError,
    CaseFileError,
    QuestionError,
    RunFileError,
    SelectionError,
    UnknownNameError,
)
from attncheck.harness.run.evaluate import Examiner
from attncheck.harness.run.outcomes import DeviceLostError
from attncheck.reports.run_file.records import (
    Crashed,
    Errored,
    Failed,
    Passed,
    RunFooter,
    TimedOut,
    Unsupported,
    timing_of,
)
from attncheck.reports.run_file.store import read_run

SUITE = """\
suite: small
description: two small questions
defaults:
  layer: {num_heads: 4, num_kv_heads: 2, head_size: 32, dtype: float32}
cases:
  - {id: decode, batch: q1s20_q1s7}
  - {id: window, batch: q1s20, layer: {sliding_window: 4}}
"""


@pytest.fixture
def suite(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SUITE)
    return str(path)


def attend(query, key_cache, value_cache, metadata, params, out):
    """Causal attention, one request after the other, by a dense softmax."""
    for request in range(metadata.num_reqs):
        start, end = metadata.query_start_loc[request : request + 2].tolist()
        seq_len = int(metadata.seq_lens[request])
        blocks = metadata.block_table_tensor[request].long()
        keys = key_cache[blocks].flatten(0, 1)[:seq_len].repeat_interleave(params.num_heads // params.num_kv_heads, 1)
        values = (
            value_cache[blocks].flatten(0, 1)[:seq_len].repeat_interleave(params.num_heads // params.num_kv_heads, 1)
        )
        scores = torch.einsum("qhd,khd->hqk", query[start:end], keys) * params.scale
        sees = torch.arange(seq_len) <= torch.arange(seq_len - (end - start), seq_len)[:, None]
        weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, values)


def zeros(query, key_cache, value_cache, metadata, params, out):
    out.zero_()


Zeros = attncheck.kernel_backend(zeros, name="zeros")


def broken(query, key_cache, value_cache, metadata, params, out):
    raise RuntimeError("no such kernel")


def test_times_are_taken_once_where_they_are_requested(suite):
    quick = attncheck.TimingSettings(limit_s=60, min_samples=3, max_samples=3)
    found = attncheck.examine(attend, suite, cases="decode", checks="timing", device="cpu", timing=quick)
    assert (found.verdict, found.header.checks, found.header.rounds) == ("passed", ("timing",), 1)
    (record,) = found.records
    timing = timing_of(record)
    forward = timing.latency("forward")
    assert len(forward.samples_ns) == 3
    with pytest.raises(SelectionError, match="timing= configures the check timing"):
        attncheck.examine(attend, suite, checks="numerics", device="cpu", timing=quick)


def test_a_right_function_passes_and_what_it_does_not_declare_is_unsupported(suite):
    found = attncheck.examine(attend, suite, device="cpu")
    assert found.verdict == "passed"
    assert found.passed
    assert found.failures == ()
    outcomes = {(record.case_id, record.check): type(record) for record in found.records}
    assert outcomes["decode", "numerics"] is Passed
    assert outcomes["decode", "lse"] is Unsupported
    assert outcomes["decode", "cache_write"] is Unsupported
    assert outcomes["window", "numerics"] is Unsupported
    assert found.worst_share is not None
    assert found.worst_share <= 1


def test_a_feature_declared_and_ignored_is_found(suite):
    found = attncheck.examine(attend, suite, features=["sliding_window"], checks="numerics", device="cpu")
    assert found.verdict == "failed"
    (record,) = found.failures
    assert isinstance(record, Failed)
    assert record.case == "small/window"
    assert record.figures["budget_share"] > 1


def test_a_wrong_function_fails_and_the_repro_line_is_python(suite):
    found = attncheck.examine(zeros, suite, cases="decode", checks=["numerics"], device="cpu", seed=7)
    assert found.verdict == "failed"
    assert f"attncheck.examine(zeros, {suite!r}, cases='decode', checks='numerics', seed=7, device='cpu')" in str(found)
    assert "1 case, check numerics; the examination fails because of it" in str(found)  # there is no run
    found = attncheck.examine(Zeros, suite, cases="decode", checks="numerics", device="cpu")
    assert f"attncheck.examine(Zeros, {suite!r}, cases='decode'" in str(found)  # the variable, not the backend's name


def test_what_a_function_raises_is_a_record(suite, capfd):
    found = attncheck.examine(broken, suite, name="mine", checks="numerics", cases="decode", device="cpu")
    (record,) = found.records
    assert isinstance(record, Errored)
    assert (record.backend, record.error_type, record.message) == ("mine", "RuntimeError", "no such kernel")
    assert "in broken" in record.traceback
    assert "/attncheck/harness/" not in record.traceback
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("result", [torch.zeros(3, 2), (torch.zeros(3, 2), None)])
def test_a_result_that_is_returned_and_not_written_is_named(suite, result):
    def returning(*arguments):
        return result

    (record,) = attncheck.examine(returning, suite, cases="decode", checks="numerics", device="cpu").records
    assert isinstance(record, Failed)
    assert record.summary.startswith("2 of 2 rows were never written")
    kind = "a tensor of shape [3, 2]" if isinstance(result, Tensor) else "a tuple"
    assert record.details == (f"returning returned {kind}, which is ignored: write the result into `out`",)


def test_a_function_may_return_something_besides_what_it_writes(suite):
    def returning(*arguments):
        attend(*arguments)
        return torch.zeros(3)

    assert attncheck.examine(returning, suite, cases="decode", checks="numerics", device="cpu").passed


@pytest.mark.parametrize("candidate", ["reference", ReferenceBackend])
def test_backends_by_name_and_by_class(suite, candidate, tmp_path):
    found = attncheck.examine(candidate, suite, cases="decode", device="cpu")
    assert found.verdict == "passed"
    assert found.header.suites[0].ref == suite
    assert list(tmp_path.iterdir()) == [Path(suite)]


def test_an_examination_demands_and_shows_itself(suite):
    right = attncheck.examine(attend, suite, cases="decode", checks="numerics", device="cpu")
    right.check()
    assert repr(right) == "<Examination passed: 1 backend, 1 case: 1 right>"

    wrong = attncheck.examine(zeros, suite, cases="decode", checks="numerics", device="cpu", name="<b>")
    with pytest.raises(AssertionError) as caught:
        wrong.check()
    assert isinstance(caught.value, attncheck.ExaminationFailedError)
    assert str(caught.value).splitlines()[0] == "failed: 1 backend, 1 case: 1 failed"
    for text in (str(caught.value), repr(wrong), str(wrong)):
        assert "perhaps: the output is all zeros" in text
    assert "# attncheck report" in wrong._repr_markdown_()
    assert wrong._repr_html_().startswith("<pre>")
    assert "&lt;b&gt;" in wrong._repr_html_()
    assert "<b>" not in wrong._repr_html_()

    nothing = attncheck.examine(attend, suite, cases="window", checks="numerics", device="cpu")
    assert (nothing.verdict, nothing.passed) == ("not examined", False)
    with pytest.raises(attncheck.ExaminationFailedError, match="not examined: 1 backend"):
        nothing.check()


def test_an_examination_is_saved_as_a_run_file_and_rendered(suite, tmp_path):
    found = attncheck.examine(zeros, suite, checks="numerics", device="cpu")
    path = tmp_path / "new" / "run.jsonl"
    found.save(path)
    run = read_run(path)
    assert (run.header, run.records, run.complete) == (found.header, found.records, True)
    again = attncheck.Examination.load(path)
    assert (again.records, again.verdict, str(again)) == (found.records, "failed", str(found))
    with pytest.raises(RunFileError, match="exists already"):
        found.save(path)

    (case,) = (
        each for each in ET.fromstring(found.render("junit")).iter("testcase") if each.find("failure") is not None
    )
    assert case.get("name") == "numerics"
    assert found.render("html").startswith("<!doctype html>")
    with pytest.raises(UnknownNameError, match="unknown report format 'pdf'"):
        found.render("pdf")

    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    with pytest.raises(RunFileError, match="was cut off"):
        attncheck.Examination.load(path)
    errors = RunFooter(finished="", counts={}, errors=("an expectation is not met",))
    assert attncheck.Examination(found.header, (), errors).verdict == "failed"


def test_stop_at_first(suite):
    assert len(attncheck.examine(zeros, suite, device="cpu", stop_at_first=True).records) == 1


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"candidate": "refrence"}, UnknownNameError),
        ({"candidate": 3}, SelectionError),
        ({"candidate": int}, BackendLoadError),
        ({"candidate": lambda query: None}, BackendLoadError),
        ({"features": ["windows"]}, BackendLoadError),
        ({"speed": "fast"}, UnknownNameError),
        ({"candidate": "reference", "features": ["lse"]}, SelectionError),
        ({"suite": "smoky"}, UnknownNameError),
        ({"suite": "nothing.yaml"}, CaseFileError),
        ({"cases": "nothing"}, SelectionError),
        ({"checks": "numeric"}, UnknownNameError),
        ({"device": "tpu"}, QuestionError),
        ({"seed": -1}, SelectionError),
        ({"timeout": -1}, SelectionError),
        ({"timeout": float("nan")}, SelectionError),
    ],
)
def test_wrong_questions_raise(suite, change, error):
    arguments = {"candidate": attend, "suite": suite, "device": "cpu"}
    with pytest.raises(error):
        attncheck.examine(**arguments | change)


def test_an_argument_that_does_not_exist_is_named_with_the_one_that_does():
    for candidate in ("reference", attend, ReferenceBackend):
        with pytest.raises(UnknownNameError, match="unknown argument of examine 'case'; did you mean 'cases'"):
            attncheck.examine(candidate, case="decode")


def test_a_case_that_sees_nothing_is_a_wrong_question(suite, monkeypatch):
    def blind(self, *_pair, **_checks):
        self.blind.append(SelectionError("blind"))
        return iter(())

    monkeypatch.setattr(Examiner, "records", blind)
    with pytest.raises(SelectionError, match="blind"):
        attncheck.examine("reference", suite, device="cpu")


def test_the_package_exports_its_all():
    assert set(attncheck.__all__) <= set(dir(attncheck))
    assert all(getattr(attncheck, name) is not None for name in attncheck.__all__)
    door = lambda: attncheck.nothing_of_that_name  # noqa: E731
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        door()


def test_a_class_whose_library_is_missing_is_a_wrong_question(suite):
    def get_impl_cls():
        raise ImportError("no such library")

    lazy = type("Lazy", (ReferenceBackend,), {"get_impl_cls": staticmethod(get_impl_cls)})
    with pytest.raises(SelectionError, match=r"'Lazy' is unavailable here: .*no such library"):
        attncheck.examine(lazy, suite, device="cpu")


def test_a_lost_device_ends_the_call_with_its_record(suite, monkeypatch):
    def fail(*_):
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    def losing(query, key_cache, value_cache, metadata, params, out):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", fail)

    with pytest.raises(DeviceLostError, match="CUDA error: unspecified launch failure") as caught:
        attncheck.examine(losing, suite=suite, cases="decode", checks="numerics", device="cpu")
    assert (caught.value.record.case_id, caught.value.record.outcome) == ("decode", "crashed")


def hanging(query, key_cache, value_cache, metadata, params, out):
    ctypes.PyDLL(None).sleep(600)  # and holds the GIL


def dying(query, key_cache, value_cache, metadata, params, out):
    os.abort()


@pytest.mark.parametrize("candidate", [attend, "torch_sdpa"], ids=["function", "reference"])
def test_with_a_time_limit_records_are_those_of_this_process(suite, candidate):
    torch.ones(1000, 1000) @ torch.ones(1000, 1000)  # by threads, which a copy of this process has not
    apart, here = (
        attncheck.examine(candidate, suite, checks=["numerics", "lse"], timeout=limit) for limit in (60, None)
    )
    assert [record.model_copy(update={"duration_s": 0}) for record in apart.records] == [
        record.model_copy(update={"duration_s": 0}) for record in here.records
    ]
    assert apart.verdict == "passed"


def test_what_hangs_or_dies_apart_is_a_record(suite):
    hung, *_ = attncheck.examine(hanging, suite, cases="decode", checks="numerics", timeout=0.5).records
    assert isinstance(hung, TimedOut)
    assert (hung.limit_s, hung.recurrence) == (0.5, "always")
    assert "in hanging" in hung.output
    died, *_ = attncheck.examine(dying, suite, cases="decode", checks="numerics", timeout=60).records
    assert isinstance(died, Crashed)
    assert died.cause == "killed by SIGABRT"
    made = {}  # by exec, so that no source is there
    exec("def nothing(query, key_cache, value_cache, metadata, params, out):\n    out.zero_()", made)
    assert attncheck.examine(made["nothing"], suite, checks="numerics", timeout=60).verdict == "failed"


def test_a_copy_of_a_process_that_used_cuda_is_refused(suite, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(SelectionError, match=r"timeout= copies this process.*give a reference to attend"):
        attncheck.examine(attend, suite, timeout=60)
