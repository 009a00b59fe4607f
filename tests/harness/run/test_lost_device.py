"""A backend that loses the device, wherever it first shows: its check has crashed, and the process is given up."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from attncheck.backends.candidates.reference import ReferenceImpl
from attncheck.cases.model import Case
from attncheck.harness.run import evaluate
from attncheck.harness.run.evaluate import Examiner, RunPlan
from attncheck.harness.run.outcomes import DeviceLostError
from attncheck.reports.run_file.records import Crashed, Record

REPEAT = "repeat with CUDA_LAUNCH_BLOCKING=1 or under compute-sanitizer"
ILLEGAL = "CUDA error: an illegal memory access was encountered"
LOST = f"the device was lost: {ILLEGAL}; {REPEAT}"
LEFT = "CUDA error: invalid configuration argument"
LEFT_BEHIND = f"a CUDA error was left behind: {LEFT}; {REPEAT}"


def raising(message: str) -> Callable[..., NoReturn]:
    """A function of torch's, by its name and file, that raises as after a fault of the device."""
    scope: dict[str, Any] = {"__name__": "torch", "torch": torch, "message": f"{message}\nSearch for it"}
    source = "def fail(*_, **__):\n    raise torch.AcceleratorError(message)"
    exec(compile(source, torch.__file__, "exec"), scope)
    fail: Callable[..., NoReturn] = scope["fail"]
    return fail


@pytest.fixture
def lose(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``lose(message)``: from now on waiting for the device raises it."""
    synchronize = raising(ILLEGAL)

    def lose(message: str = ILLEGAL) -> None:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", synchronize if message == ILLEGAL else raising(message))

    return lose


@pytest.fixture
def records(with_impl: Any, loaded: Any) -> Callable[..., list[Record]]:
    """``records(case, deed, checks)``: what becomes of a case whose forward does ``deed`` at its end."""

    def records(case: Case, deed: Any, checks: tuple[str, ...] = ("numerics", "lse"), **plan: Any) -> list[Record]:
        def forward(self: Any, *arguments: Any, **keywords: Any) -> Any:
            out = ReferenceImpl.forward(self, *arguments, **keywords)
            deed()
            return out

        backend = loaded(with_impl(forward=forward))
        return list(Examiner(RunPlan((case,), (backend,), checks, **plan)).records(case, backend))

    return records


@pytest.fixture
def crash(records: Callable[..., list[Record]]) -> Callable[..., Crashed]:
    """``crash(...)``: the record of the check that lost the device, of a run as by ``records``."""

    def crash(*arguments: Any, **plan: Any) -> Crashed:
        with pytest.raises(DeviceLostError) as caught:
            records(*arguments, **plan)
        return caught.value.record

    return crash


@pytest.mark.parametrize(
    ("loses", "clone", "cause"), [(True, None, LOST), (True, ILLEGAL, LOST), (False, LEFT, LEFT_BEHIND)]
)
def test_a_check_has_crashed_also_if_a_call_of_the_harness_raises_first(
    make_case: Any, crash: Any, lose: Any, monkeypatch: Any, loses: bool, clone: str | None, cause: str
) -> None:
    def deed() -> None:
        if loses:
            lose()
        if clone is not None:
            monkeypatch.setattr(torch.Tensor, "clone", raising(clone))

    record = crash(make_case(), deed)
    assert (record.check, record.stage, record.cause) == ("numerics", "check numerics", cause)


def test_what_the_backend_raised_names_its_stage(make_case: Any, crash: Any, lose: Any) -> None:
    def deed() -> None:
        lose()
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    record = crash(make_case(), deed)
    assert (record.stage, record.cause) == ("check numerics, in forward", LOST)
    assert "test_lost_device.py" in record.output
    assert " in deed" in record.output


def test_the_step_that_lost_the_device_is_named_not_a_later_one(make_case: Any, crash: Any, lose: Any) -> None:
    number = 0

    def deed() -> None:
        nonlocal number
        number += 1
        if number >= 7:
            lose()
            raising(ILLEGAL)()

    record = crash(make_case(), deed, checks=("invariance",))
    assert record.stage.startswith("check invariance, in forward of the step with strides.query: ")
    assert number == 7


def test_out_of_memory_is_no_lost_device(make_case: Any, records: Any, lose: Any) -> None:
    found = records(make_case(), lambda: lose("CUDA error: out of memory"))
    assert [record.outcome for record in found] == ["passed", "passed"]


@pytest.mark.parametrize("step", ["shortage", "build_problem"])
def test_a_device_lost_by_a_declaration_shows_as_the_case_is_prepared(
    make_case: Any, crash: Any, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setattr(evaluate, step, raising(ILLEGAL))
    assert crash(make_case(), lambda: None).stage == "check numerics"


def test_a_fault_of_ours_stays_one(make_case: Any, records: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "shortage", lambda *_: {}["ours"])
    with pytest.raises(KeyError, match="ours"):
        records(make_case(), lambda: None)


def test_tensors_that_a_lost_device_holds_are_not_dumped(
    make_case: Any, crash: Any, lose: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrong = evaluate.Broken("wrong", {})
    monkeypatch.setattr("attncheck.harness.run.evaluate.finding_of", lambda examination, check: wrong)
    monkeypatch.setattr("attncheck.harness.checks.case_checks.dump_case", raising(ILLEGAL))
    lose()
    assert crash(make_case(), lambda: None, dump=tmp_path).cause == LOST
