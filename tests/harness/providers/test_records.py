"""From what came of a subject to a record: stale departures, faults of our own, names that clash."""

from types import ModuleType

import pytest
import torch

from attncheck.errors import SelectionError
from attncheck.harness.providers.examine import Function, header_with_providers, record_subject
from attncheck.harness.providers.provider import Departure, Departures, Provider, Subject, SubjectSetting, subject_call
from attncheck.harness.run.outcomes import Circumstances
from attncheck.reports.analysis.utilities import function_rows
from attncheck.reports.run_file.header import BackendInfo, SuiteInfo

PAD = Subject("PAD_SLOT_ID", lambda _: [subject_call("its value")], lambda target: target, is_function=False)
KNOWN = Departure("PAD_SLOT_ID", "judgement", "is 0", lambda _: 0)
GONE = Departures("2.0", gone=(("PAD_*", "padding went"),))


def record(value=None, departures=None, subject=PAD, version="2.0"):
    module = ModuleType("fake")
    if value is not None:
        module.PAD_SLOT_ID = value
    fake = Provider("fake", "fake.py", version, [module], departures=departures or Departures())
    return record_subject(fake, subject, SubjectSetting((), torch.device("cpu")), Circumstances(0, "0" * 12, "0.1.0"))


@pytest.mark.parametrize(
    ("value", "known", "outcome", "word"),
    [
        (-1, (), "passed", "equal"),
        (0, (), "failed", "differs"),
        (0, (KNOWN,), "passed", "judged"),
        (-1, (KNOWN,), "xpassed", "stale"),
        (None, (), "unsupported", "missing"),
    ],
)
def test_outcomes_and_the_words_of_reports(value, known, outcome, word):
    made = record(value, Departures("2.0", known))
    assert made.outcome == outcome
    (row,) = function_rows([made], "fake")
    assert (row.name, row.word) == ("PAD_SLOT_ID", word)


def test_a_departure_is_recorded_with_how_often_it_showed():
    made = record(0, Departures("2.0", (KNOWN,)))
    assert made.notes == ("judgement: is 0 (1 of 1 question)",)
    assert made.figures["judged"] == made.figures["judgements"] == 1


def test_what_no_longer_shows_fails_the_run_in_the_version_it_was_found_in_only():
    assert record(-1, Departures("2.0", (KNOWN,))).reason == "known in 2.0, and no longer there: is 0"
    later = record(-1, Departures("2.0", (KNOWN,)), version="2.1")
    assert later.outcome == "passed"
    assert later.notes == ("stale: known in 2.0, and no longer there: is 0",)


def test_a_removed_name_is_recorded_with_the_reason():
    assert record(None, GONE).reasons == ("offers nothing of that name: padding went",)


def test_a_question_that_does_not_fit_is_attnchecks_own_fault():
    unfit = Subject("PAD_SLOT_ID", lambda _: [subject_call("its value", refused=True)], lambda target: target)
    made = record(-1, subject=unfit)
    assert (made.outcome, made.stage) == ("errored", "attncheck itself")


@pytest.fixture
def header(header):
    return header.model_copy(update={"suites": header.suites[:1], "checks": ("numerics",), "backends": ()})


FAKE = BackendInfo(name="fake", ref="fake.py", version="2.0")
FUNCTIONS = (Function("PAD_SLOT_ID"),)


def test_the_header_announces_providers_and_their_check(header):
    alone = header_with_providers(header, [FAKE], FUNCTIONS, ["a note"])
    assert alone.checks == ("utilities",)
    assert [(suite.name, suite.cases) for suite in alone.suites] == [("smoke", 2), ("utilities", 1)]
    assert alone.notes == ("a note",)
    beside = header.model_copy(update={"backends": (BackendInfo(name="b", ref="b"),)})
    both = header_with_providers(beside, [FAKE], FUNCTIONS, [])
    assert both.checks == ("numerics", "utilities")
    assert [info.name for info in both.backends] == ["b", "fake"]


def test_names_that_clash_are_refused(header):
    backend = header.model_copy(update={"backends": (BackendInfo(name="fake", ref="b"),)})
    suite = header.model_copy(update={"suites": (SuiteInfo(name="utilities", ref="u.yaml", cases=1),)})
    for clashing in (backend, suite):
        with pytest.raises(SelectionError, match="called"):
            header_with_providers(clashing, [FAKE], FUNCTIONS, [])
