"""Values come back as they were sent, and nothing else is taken for an answer."""

import math

import pytest

from attncheck.harness.run.outcomes import BackendDescription
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
from attncheck.harness.workers.worker import CaseServer, Examined, Stage
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
