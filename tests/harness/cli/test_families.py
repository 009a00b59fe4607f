"""Runs over every backend of a family, and with ``--within``: what is examined, and what is left for which reason."""

import re

import pytest
from inline_snapshot import snapshot

from attncheck.harness.run import outcomes as outcomes_module
from attncheck.harness.run import selection as selection_module
from attncheck.harness.workers import survey
from attncheck.harness.workers.limits import TimeLimits
from attncheck.reports.run_file.header import SurveyedBackend
from attncheck.reports.run_file.store import read_run

pytestmark = pytest.mark.usefixtures("preloaded", "folder")

WORDS = "run some:* --suite smoke --check numerics --device cpu --jobs 2 --output run.jsonl"
ONE = SurveyedBackend(name="some:ONE", reason="ONE needs a GPU")


@pytest.fixture
def surveyed(monkeypatch):
    return lambda *found: monkeypatch.setattr(survey, "survey", lambda family, device, wishes, limit: found)


def test_those_that_can_run_are_examined_and_the_others_reported(surveyed, typed):
    surveyed(
        SurveyedBackend(name="reference", level="NEVER", declared={"dtype": ("float32",)}),
        ONE,
        SurveyedBackend(name="reference_mla"),
        SurveyedBackend(name="some:TWO", reason="TWO needs a GPU"),
        SurveyedBackend(name="some:THREE", reason="it raised"),
    )
    done = typed(f"{WORDS} --backend torch_mla --case decode.float32")
    assert (done.code, done.err.splitlines()[-1]) == snapshot(
        (
            2,
            "error: no case of backend 'torch_mla' was examined: the layer has no latent cache; select cases and checks that it supports",
        )
    )
    printed = " ".join(done.out.split())
    assert "not examined: ONE, TWO: it needs a GPU" in printed
    assert "not examined: THREE: it raised" in printed
    run = read_run("run.jsonl")
    assert [each.name for each in run.header.backends] == ["reference", "reference_mla", "torch_mla"]
    assert [each.name for each in run.header.surveyed if each.reason] == ["some:ONE", "some:TWO", "some:THREE"]
    outcomes = {record.backend: record.outcome for record in run.records}
    assert outcomes == {"reference": "passed", "reference_mla": "unsupported", "torch_mla": "unsupported"}


def test_a_family_of_which_nothing_can_run_is_a_wrong_question(surveyed, typed):
    surveyed(ONE)
    done = typed(WORDS)
    assert done.code == 2
    assert done.err == snapshot(
        "error: backend 'some:*': none of its 1 backends can run here; not examined: ONE: it needs a GPU\n"
    )


BACKEND = """\
import time

from attncheck.backends.candidates.torch_sdpa import SDPABackend, SDPAImpl


class Impl(SDPAImpl):
    def forward(self, layer, query, *args, **kwargs):
        if query.dtype.itemsize == 4:
            time.sleep(1e6)
        return super().forward(layer, query, *args, **kwargs)


class Mine(SDPABackend):
    get_impl_cls = staticmethod(lambda: Impl)
"""
"""A backend that hangs in float32 cases."""


@pytest.mark.parametrize(("hang_s", "outcome", "code"), [(1.0, "timed_out", 1), (10.0, "unavailable", 0)])
def test_a_backend_that_uses_up_its_time_has_its_measured_part_and_what_it_left(
    hang_s, outcome, code, surveyed, typed, folder, monkeypatch
):
    """A hang in float32 takes the time of the backend: its float16 case, which comes before, is right.

    What the end of the time stops fails the run only if it was at work for long. What did not begin never does.
    """
    monkeypatch.setattr(outcomes_module, "_HANG_S", hang_s)
    first = {("smoke/decode.float16", "numerics"): 0, ("smoke/decode.float32", "numerics"): 1}
    monkeypatch.setattr(selection_module, "telling_ranks", lambda: first)
    shared = TimeLimits.shared  # the time of loading does not count
    monkeypatch.setattr(TimeLimits, "shared", lambda limits, _, backends, jobs: shared(limits, 5.0, backends, jobs))
    (folder / "mine.py").write_text(BACKEND)
    able = [SurveyedBackend(name=name, level="UNIFORM_BATCH") for name in ("./mine.py:Mine", "torch_sdpa")]
    surveyed(*able, ONE)
    done = typed(f"{WORDS} --case decode --within 1000s --report audit=page")
    assert done.code == code
    page = (folder / "page").read_text()
    assert typed("report run.jsonl --format audit").out == page
    run = read_run("run.jsonl")
    assert run.complete
    assert {record.outcome for record in run.records if record.backend == "torch_sdpa"} == {"passed"}
    mine = {record.case_id: record.outcome for record in run.records if record.backend == "Mine"}
    assert mine == {"decode.float16": "passed", "decode.float32": outcome, "decode.bfloat16": "unavailable"}
    assert f"not reached in time: {1 if code else 2} of 3 cases" in done.out
    assert ("Mine: PASSED IN PART: 1 case right" in done.out) == (code == 0)
    assert re.findall(r"^- `(.*)`: (.*)$", page, re.MULTILINE) == [("Mine", "2 of 3 cases")]


def test_a_shard_without_time_for_anything_is_refused_and_so_is_its_resumption(typed, monkeypatch):
    shared = TimeLimits.shared
    monkeypatch.setattr(TimeLimits, "shared", lambda limits, _, backends, jobs: shared(limits, 0.0, backends, jobs))
    words = "run reference --suite smoke --case decode --check numerics --device cpu --within 1s --shard 1/2"
    done = typed(f"{words} --output run.jsonl")
    assert (done.code, "no case of backend 'reference' was examined: the case did not run" in done.err) == (2, True)
    done = typed(f"{words} --resume run.jsonl")
    assert done.code == 2
    assert "--resume run.jsonl: it ended by --within, and its results are final; repeat it with more time" in done.err
