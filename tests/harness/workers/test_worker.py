"""What a process of a backend does with its questions: cases, checks, the lines of the protocol, and surveys."""

import math
import os
import signal
import subprocess
import sys
from types import ModuleType

import pytest
from inline_snapshot import snapshot

from attncheck.backends import registry
from attncheck.cases.loader import load_suite
from attncheck.errors import BackendLoadError
from attncheck.harness.checks.findings import TimingSettings
from attncheck.harness.run.evaluate import environment_of
from attncheck.harness.run.outcomes import BackendDescription
from attncheck.harness.run.selection import select_cases
from attncheck.harness.workers.limits import Limit
from attncheck.harness.workers.process import ProcessEndedError, RefusedError, WorkerError, WorkerProcess
from attncheck.harness.workers.protocol import (
    EVENT,
    FAULT,
    REFUSED,
    RESULT,
    HarnessFailure,
    Refused,
    read_answer,
    signature_of,
    write_answer,
    write_call,
)
from attncheck.harness.workers.survey import survey
from attncheck.harness.workers.worker import Assignment, CaseServer, Examined, Imports, Stage, _examiner
from attncheck.reference.spec import BACKEND_CHECKS
from attncheck.reports.run_file.header import BackendInfo
from attncheck.reports.run_file.records import Errored, Passed, timing_of

pytestmark = pytest.mark.usefixtures("preloaded")

SUITE = """\
suite: small
defaults:
  layer: {num_heads: 2, num_kv_heads: 1, head_size: 16, dtype: float32}
cases:
  - {id: decode, batch: q1s9}
  - {id: blind, batch: q1s9, layer: {sliding_window: 64}}
"""
MINE = """\
import os
from attncheck.backends.candidates.reference import ReferenceBackend

class Needy(ReferenceBackend):
    @classmethod
    def required_environment(cls, device): return {"ATTNCHECK_TEST_NEED": device}
    @classmethod
    def unavailable_reasons(cls, device): return ["needs a moon"]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "small.yaml").write_text(SUITE)
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def assignment():
    selection = select_cases(["small.yaml"])
    return Assignment(
        suites=selection.refs,
        digests=tuple(suite.hash for suite in selection.suites),
        device="cpu",
        seed=3,
        dump=None,
        environment=environment_of("cpu").model_copy(update={"cpu": "another name"}),
        timing=TimingSettings(),
    )


def loading(ref, checks=BACKEND_CHECKS):
    """A process that loads the backend ``ref``; to be closed."""
    process = WorkerProcess()
    process.send(CaseServer.prepare, Imports(checks=checks))
    process.send(CaseServer.load, ref)
    return process


def described(process, assigned):
    process.send(CaseServer.assign, assigned)
    return process.call(None, CaseServer.describe)


def examined(process, case, *checks, number=0):
    """Everything up to the end of a case."""
    process.send(CaseServer.examine, case, checks, number, None)
    while not isinstance(answer := process.receive(), Examined):
        yield answer
    yield answer


def records_of(answers):
    return [answer for answer in answers if not isinstance(answer, Stage | Examined)]


def test_cases_are_examined_as_requested(folder):
    assigned = assignment()
    with loading("reference") as process:
        assert described(process, assigned).name == "reference"
        for case, number in (("small/decode", 2), ("small/blind", 0), ("small/decode", 2)):
            received = list(examined(process, case, "numerics", "lse", number=number))
            records = records_of(received)
            assert [(record.case_id, record.check) for record in records] == [
                ("decode", "numerics"),
                ("decode", "lse"),
            ][:number]
            assert {record.environment for record in records} <= {assigned.environment.digest}
            assert {record.seed for record in records} <= {3}
            assert {record.round for record in records} <= {number}
            stages = [answer.name for answer in received if isinstance(answer, Stage)]
            took_s = [each.reference_s for each in received if isinstance(each, Stage) and "check" in each.name]
            assert len(took_s) == number
            assert all(seconds > 0 for seconds in took_s)
            assert stages[:2] == ["declarations", "the preparation of the case"]
            assert stages[2:] == ["check numerics", "check lse"][:number]
            assert (received[-1].blind is None) == (number == 2)
        assert received[-1].blind is None
        with pytest.raises(WorkerError) as failed:
            list(examined(process, "small/none", "lse"))
        assert failed.value.fault.error == "KeyError: 'small/none'"
        assert "in examine" in failed.value.fault.traceback
        with pytest.raises(ProcessEndedError) as refused:
            process.receive()
        assert str(refused.value) == snapshot("exited with code 0")


def test_a_second_assignment_takes_the_place_of_the_first(folder):
    first = assignment()
    (ref,) = first.suites
    changed = f"{ref}{{cache.block_size: 32}}"
    (changed_hash,) = [case.hash for case in load_suite(changed).cases if case.id == "decode"]
    truths = folder / "truths"
    second = first.model_copy(
        update={
            "suites": (changed,),
            "digests": (load_suite(changed).hash,),
            "truths": truths,
            "timing": TimingSettings(limit_s=60, min_samples=3, max_samples=3),
        }
    )
    with loading("reference") as process:
        described(process, first)
        process.send(CaseServer.assign, second)
        records = records_of(examined(process, "small/decode", "numerics", "timing", number=2))
    assert [(record.outcome, record.case_hash, record.round) for record in records] == [("passed", changed_hash, 2)] * 2
    timing = timing_of(records[1])
    assert {len(latency.samples_ns) for latency in timing.latencies} == {3}
    assert len(list(truths.glob("*"))) == 1


def test_probes_are_shared_over_the_cases_of_the_run(folder):
    description = BackendDescription(info=BackendInfo(name="reference", ref="reference"))
    for update, shared in (
        ({}, ["decode", "blind"]),
        ({"cases": ("small/decode",)}, ["decode"]),
        ({"shares_probes": False}, []),
    ):
        examiner = _examiner(assignment().model_copy(update=update), description)
        cases = examiner.plan.cases_with("reference", "cudagraph")
        assert [case.id for case in cases] == shared


def test_probes_are_shared_over_the_suite_that_suits_the_backend(folder):
    selection = select_cases([])
    assigned = assignment().model_copy(
        update={
            "suites": selection.refs,
            "digests": tuple(suite.hash for suite in selection.suites),
            "cases": tuple(case.key for case in selection.cases),
            "by_default": True,
        }
    )
    for suite in ("smoke", "interpreted"):
        description = BackendDescription(info=BackendInfo(name="mine", ref="mine"), default_suite=suite)
        cases = _examiner(assigned, description).plan.cases_with("mine", "cudagraph")
        assert {case.suite for case in cases} == {suite}


def test_the_clock_is_imported_before_the_backend_whose_process_stores_no_truth(folder):
    truths = folder / "truths"
    (folder / "late.py").write_text(
        "import sys\n"
        "from attncheck.backends.candidates.reference import ReferenceBackend\n"
        "CLOCK = 'attncheck.harness.checks.timing.clock' in sys.modules\n"
        "class Late(ReferenceBackend):\n"
        "    @classmethod\n    def version(cls): return f'clock first: {CLOCK}'\n"
    )
    for check, is_first in (("timing", True), ("numerics", False)):  # what no check needs is not imported
        with loading("late.py:Late", (check,)) as process:
            found = described(process, assignment().model_copy(update={"truths": truths}))
            (record,) = records_of(examined(process, "small/decode", "numerics"))
        assert (found.version, record.outcome) == (f"clock first: {is_first}", "passed")
        assert list(truths.glob("*")) == []  # only that of a built-in backend does
    code = "from attncheck.harness.run.backend_loading import load_backend; print(load_backend('late.py:Late').version)"
    here = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert here.stdout == "clock first: True\n"


def test_a_process_chooses_the_device_before_it_has_a_backend_and_after(folder):
    with WorkerProcess() as process:
        process.send(CaseServer.prepare, Imports(checks=(), functions=False))
        chosen = process.call(None, CaseServer.choose_device, "cpu:0", ())
        assert (chosen.device, chosen.notes) == ("cpu", ())
        same_sources = {"git_commit": None}  # which may be edited meanwhile
        here = environment_of("cpu").model_copy(update=same_sources)
        assert chosen.environment.model_copy(update=same_sources) == here
        process.send(CaseServer.load, "reference")
        with pytest.raises(RefusedError) as refused:
            process.call(None, CaseServer.choose_device, "moon", ())
        assert str(refused.value) == snapshot("device 'moon': no such device; give cpu, cuda or cuda:N")
        assert described(process, assignment()).name == "reference"


def test_what_is_no_backend_is_refused_in_the_same_words(plain, folder):
    with loading("mine.py:Other") as process, pytest.raises(RefusedError) as refused:
        described(process, assignment())
    assert plain(str(refused.value)) == snapshot(
        "backend 'mine.py:Other': TMP/mine.py has no 'Other'; write TMP/mine.py:Needy"
    )


def test_a_suite_that_changed_in_the_meantime_is_refused(folder):
    assigned = assignment()
    (folder / "small.yaml").write_text(SUITE.replace("q1s9", "q1s8"))
    with loading("reference") as process:
        with pytest.raises(RefusedError) as refused:
            described(process, assigned)
        assert str(refused.value) == snapshot("small.yaml has changed since the run began")


def test_a_description_has_the_required_environment_and_why_it_cannot_run(folder):
    with loading("mine.py:Needy") as process:
        found = described(process, assignment())
        assert found.info.required_environment == {"ATTNCHECK_TEST_NEED": "cpu"}
        assert found.unavailable_reasons == snapshot(("needs a moon",))
        process.finish()
        with pytest.raises(ProcessEndedError) as refused:
            process.receive()
        assert str(refused.value) == snapshot("exited with code 0")


WHO = {
    "suite": "s",
    "case_id": "case",
    "case_hash": "0" * 12,
    "check": "numerics",
    "seed": 0,
    "backend": "b",
    "backend_ref": "b",
    "backend_version": "",
    "environment": "e" * 12,
    "attncheck_version": "0.1.0",
}
INFO = BackendInfo(name="b", ref="b", conventions={"lse_base": "e"}, required_environment={"A": "1"})
INFINITE = Passed.model_validate(WHO | {"figures": {"budget_share": math.inf}})
ERROR = {"stage": "s", "error_type": "E", "message": "two\nlines \x00", "traceback": "é"}


def test_an_answer_is_one_line_and_comes_back():
    answers = [
        (CaseServer.describe, RESULT, BackendDescription(info=INFO, is_mla=True)),
        (CaseServer.describe, REFUSED, Refused(reason="unknown backend 'b'")),
        (CaseServer.examine, EVENT, Stage(name="check lse")),
        (CaseServer.examine, EVENT, INFINITE),
        (CaseServer.examine, EVENT, Errored.model_validate(WHO | ERROR)),
        (CaseServer.examine, RESULT, Examined(blind="case s/case: blind")),
        (CaseServer.reasons_against, RESULT, ((), ("no", "never"))),
        (CaseServer.assign, FAULT, HarnessFailure(error="ValueError: x", traceback="Traceback ...")),
    ]
    for method, kind, value in answers:
        line = write_answer(b"token", method, kind, value)
        assert line.count(b"\n") == 1
        assert line.endswith(b"\n")
        assert read_answer(b"token", method, line[:-1]) == (kind, value)


def test_a_call_has_the_arguments_of_its_method():
    line = write_call(b"token", CaseServer.examine, ("smoke/decode", ("timing",), 3, None))
    assert line == b'token examine ["smoke/decode",["timing"],3,null]\n'
    arguments = signature_of(CaseServer.examine).arguments.validate_json(line.split(b" ", 2)[2])
    assert arguments == ("smoke/decode", ("timing",), 3, None)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b'result {"blind":null,"lost":null}',
        b'other result {"blind":null,"lost":null}',
        b'token results {"blind":null,"lost":null}',
        b'token result {"blind":null,"more":1}',
        b"token event {}",
    ],
)
def test_what_is_no_answer_to_the_call_is_refused(line):
    with pytest.raises(ValueError):
        read_answer(b"token", CaseServer.examine, line)


LIMIT = Limit(60)


@pytest.fixture
def library(monkeypatch):
    """A family of built-in backends by other names; ``deadly`` kills whatever loads it."""

    def load(ref):
        if ref == "some:deadly":
            os.kill(os.getpid(), signal.SIGKILL)
        return load_as_ever(ref.removeprefix("some:"))

    load_as_ever = registry.load
    monkeypatch.setattr(registry, "load", load)
    monkeypatch.setattr(registry, "SURVEYS", {"some": "their_survey"})
    module = ModuleType("their_survey")
    module.member_names = lambda: ("reference", "deadly", "torch_sdpa", "vllm", "triton_unified:x")
    module.declared_by = lambda name: ({"dtype": ("float16", name)}, {"supports_sink": "yes"}, "NEVER")
    monkeypatch.setitem(sys.modules, "their_survey", module)
    return module


def test_each_backend_is_reported_and_one_that_ends_the_process_costs_itself_alone(library):
    found = {each.name: each for each in survey("some", "cpu", (), LIMIT)}
    assert list(found) == ["some:reference", "some:deadly", "some:torch_sdpa", "some:vllm", "some:triton_unified:x"]
    assert [each.name for each in found.values() if not each.reason] == ["some:reference", "some:torch_sdpa"]
    assert found["some:torch_sdpa"].declared == {"dtype": ("float16", "torch_sdpa")}
    assert found["some:torch_sdpa"].level == "NEVER"
    assert "SIGKILL" in found["some:deadly"].reason
    assert found["some:vllm"].reason == snapshot("vllm names many backends")
    assert found["some:triton_unified:x"].reason == snapshot("triton_unified takes no argument")


def test_a_library_that_is_missing_or_no_family_is_a_wrong_question(library):
    def missing():
        raise ImportError("No module named 'some'")

    library.member_names = missing
    with pytest.raises(BackendLoadError) as refused:
        survey("some", "cpu", (), LIMIT)
    assert str(refused.value) == snapshot("backend 'some:*': its library cannot be imported: No module named 'some'")
    with pytest.raises(BackendLoadError) as refused:
        survey("other", "cpu", (), LIMIT)
    assert str(refused.value) == snapshot("backend 'other:*': 'other' is no family of backends; write some:*")
