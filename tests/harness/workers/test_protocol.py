"""Messages come back as they were sent, and nothing else is taken for one."""

import math

import pytest
from pydantic import ValidationError

from attncheck.harness.run.outcomes import BackendDescription, not_loaded
from attncheck.harness.workers.protocol import (
    Answer,
    Begun,
    Described,
    Done,
    Examine,
    HarnessFailure,
    Refused,
    format_message,
    parse_answer,
    parse_request,
)
from attncheck.reports.run_file.header import BackendInfo
from attncheck.reports.run_file.records import Errored, Passed

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


@pytest.mark.parametrize(
    "answer",
    [
        Described(description=BackendDescription(info=INFO, is_mla=True)),
        Described(description=not_loaded("b", ("no library",))),
        Refused(reason="unknown backend 'b'"),
        Begun(stage="check lse"),
        Passed.model_validate(WHO | {"figures": {"budget_share": math.inf}}),
        Errored.model_validate(WHO | {"stage": "s", "error_type": "E", "message": "two\nlines \x00", "traceback": "é"}),
        Done(),
        Done(blind="case s/case: blind"),
        HarnessFailure(error="ValueError: x", traceback="Traceback ..."),
    ],
    ids=lambda answer: type(answer).__name__,
)
def test_an_answer_is_one_line_and_comes_back(answer: Answer) -> None:
    line = format_message(answer)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert parse_answer(line) == answer


def test_a_request_comes_back() -> None:
    request = Examine(case="smoke/decode", checks=("timing",), round=3)
    assert parse_request(format_message(request)) == request


@pytest.mark.parametrize("line", [b"", b"hello", b"{}", b'{"kind":"examine","index":1}', b'{"kind":"done","more":1}'])
def test_what_is_no_answer_is_refused(line: bytes) -> None:
    with pytest.raises(ValidationError):
        parse_answer(line)
