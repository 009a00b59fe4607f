"""A backend that loses the device, wherever it first shows: its check has crashed, and the process is given up."""

import pytest
import torch

from attncheck.backends.candidates.reference import ReferenceImpl
from attncheck.harness.run import evaluate
from attncheck.harness.run.evaluate import Examiner, RunPlan
from attncheck.harness.run.outcomes import DeviceLostError

REPEAT = "repeat with CUDA_LAUNCH_BLOCKING=1 or under compute-sanitizer"
ILLEGAL = "CUDA error: an illegal memory access was encountered"
LOST = f"the device was lost: {ILLEGAL}; {REPEAT}"
LEFT = "CUDA error: invalid configuration argument"
LEFT_BEHIND = f"a CUDA error was left behind: {LEFT}; {REPEAT}"


def raising(message):
    """A function of torch's, by its name and file, that raises as after a fault of the device."""
    scope = {"__name__": "torch", "torch": torch, "message": f"{message}\nSearch for it"}
    source = "def fail(*_, **__):\n    raise torch.AcceleratorError(message)"
    exec(compile(source, torch.__file__, "exec"), scope)
    return scope["fail"]


@pytest.fixture
def lose(monkeypatch):
    """``lose(message)``: from now on waiting for the device raises it."""
    synchronize = raising(ILLEGAL)

    def lose(message=ILLEGAL):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", synchronize if message == ILLEGAL else raising(message))

    return lose


@pytest.fixture
def records(with_impl, loaded):
    """``records(case, deed, checks)``: what becomes of a case whose forward does ``deed`` at its end."""

    def records(case, deed, checks=("numerics", "lse"), **plan):
        def forward(self, *arguments, **keywords):
            out = ReferenceImpl.forward(self, *arguments, **keywords)
            deed()
            return out

        backend = loaded(with_impl(forward=forward))
        return list(Examiner(RunPlan((case,), (backend,), checks, **plan)).records(case, backend))

    return records


@pytest.fixture
def crash(records):
    """``crash(...)``: the record of the check that lost the device, of a run as by ``records``."""

    def crash(*arguments, **plan):
        with pytest.raises(DeviceLostError) as caught:
            records(*arguments, **plan)
        return caught.value.record

    return crash


@pytest.mark.parametrize(
    ("loses", "clone", "cause"), [(True, None, LOST), (True, ILLEGAL, LOST), (False, LEFT, LEFT_BEHIND)]
)
def test_a_check_has_crashed_also_if_a_call_of_the_harness_raises_first(
    make_case, crash, lose, monkeypatch, loses, clone, cause
):
    def deed():
        if loses:
            lose()
        if clone is not None:
            monkeypatch.setattr(torch.Tensor, "clone", raising(clone))

    record = crash(make_case(), deed)
    assert (record.check, record.stage, record.cause) == ("numerics", "check numerics", cause)


def test_what_the_backend_raised_names_its_stage(make_case, crash, lose):
    def deed():
        lose()
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    record = crash(make_case(), deed)
    assert (record.stage, record.cause) == ("check numerics, in forward", LOST)
    assert "test_lost_device.py" in record.output
    assert " in deed" in record.output


def test_the_step_that_lost_the_device_is_named_not_a_later_one(make_case, crash, lose):
    number = 0

    def deed():
        nonlocal number
        number += 1
        if number >= 7:
            lose()
            raising(ILLEGAL)()

    record = crash(make_case(), deed, checks=("invariance",))
    assert record.stage.startswith("check invariance, in forward of the step with strides.query: ")
    assert number == 7


def test_out_of_memory_is_no_lost_device(make_case, records, lose):
    found = records(make_case(), lambda: lose("CUDA error: out of memory"))
    assert [record.outcome for record in found] == ["passed", "passed"]


@pytest.mark.parametrize("step", ["shortage", "build_problem"])
def test_a_device_lost_by_a_declaration_shows_as_the_case_is_prepared(make_case, crash, monkeypatch, step):
    monkeypatch.setattr(evaluate, step, raising(ILLEGAL))
    assert crash(make_case(), lambda: None).stage == "check numerics"


def test_a_fault_of_ours_stays_one(make_case, records, monkeypatch):
    monkeypatch.setattr(evaluate, "shortage", lambda *_: {}["ours"])
    with pytest.raises(KeyError, match="ours"):
        records(make_case(), lambda: None)


def test_tensors_that_a_lost_device_holds_are_not_dumped(make_case, crash, lose, monkeypatch, tmp_path):
    wrong = evaluate.Broken("wrong", {})
    monkeypatch.setattr("attncheck.harness.run.evaluate.finding_of", lambda examination, check: wrong)
    monkeypatch.setattr("attncheck.harness.checks.case_checks.dump_case", raising(ILLEGAL))
    lose()
    assert crash(make_case(), lambda: None, dump=tmp_path).cause == LOST
