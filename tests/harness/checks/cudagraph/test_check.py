"""A measured level held against the declared one: below is a failure, above is head-room, unknown is neither."""

from dataclasses import replace

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.backends.registry import load
from attncheck.harness.checks.cudagraph import check
from attncheck.harness.checks.cudagraph.check import LevelMeasurement, ProbeOutcome, judge_level
from attncheck.harness.checks.cudagraph.probes import Bucket, Probe, ProbeStep
from attncheck.harness.checks.findings import Broken, Holds, NotExamined
from attncheck.harness.checks.interface import CheckedCase, SharedByChecks
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.run.selection import select_cases
from attncheck.harness.truth.truth import TruthCache, truth_of
from attncheck.reference.spec import AttentionCGSupport
from attncheck.reports.run_file.graph_levels import GRAPH_LEVELS, GraphLevels

CPU = torch.device("cpu")
NEVER, SINGLE, UNIFORM, ALWAYS = (AttentionCGSupport[name] for name in GRAPH_LEVELS)


def measurement(declared, reached, reason=None):
    """``reason``: why the first probe above ``reached`` broke."""
    broke = None
    if reason is not None:
        level = AttentionCGSupport(reached.value + 1)
        broke = (Probe("lengths", level, "replays follow", (Bucket(1, 1, 1),), (ProbeStep(((1, 1),)),)), reason)
    measured = None if reason is not None and reason.outcome == "not examined" else reached.name
    levels = GraphLevels(declared=declared.name, measured=measured, recorder="emulated")
    return LevelMeasurement(declared, reached, levels, broke)


@pytest.mark.parametrize("level", [NEVER, SINGLE, UNIFORM, ALWAYS])
def test_a_level_that_is_measured_as_declared_holds(level):
    broke = None if level is ALWAYS else ProbeOutcome("failed", "wrong")
    finding = judge_level(measurement(level, level, broke))
    assert isinstance(finding, Holds)
    assert finding.notes == ()
    assert finding.figures["declared_level"] == finding.figures["measured_level"] == level.value


def test_truths_of_probes_come_from_the_cache_of_the_run(monkeypatch):
    given = []

    class Cache(TruthCache):
        def truth_of(self, problem, *, refuse_blindness=True):
            given.append((problem.case.suite, refuse_blindness))
            return super().truth_of(problem, refuse_blindness=refuse_blindness)

    def measure(backend, questions, device):
        probe = questions.probes[0]
        for _ in range(2):
            questions.truth(questions.case(probe, probe.steps[0]))
        return measurement(NEVER, NEVER, ProbeOutcome("failed", "wrong"))

    monkeypatch.setattr(check, "measure_level", measure)
    (case,) = select_cases(["smoke"], ["decode.float32"]).cases
    problem = build_problem(case, 0)
    shared = SharedByChecks()
    shared.get(TruthCache, lambda: Cache(CPU))
    checked = CheckedCase(load("reference"), problem, truth_of(problem, CPU), CPU, (), shared)
    assert isinstance(check.CHECKS["cudagraph"].run(checked), Holds)
    assert given == [("cudagraph", False)]


@pytest.mark.parametrize(("declared", "reached"), [(SINGLE, NEVER), (ALWAYS, UNIFORM), (UNIFORM, NEVER)])
def test_a_level_above_the_measured_one_is_a_failure_that_names_probe_and_cause(declared, reached):
    finding = judge_level(measurement(declared, reached, ProbeOutcome("failed", "3 of 8 rows", "metadata.lens moved")))
    assert isinstance(finding, Broken)
    assert finding.summary == f"declared {declared.name}, measured {reached.name}: probe 'lengths' broke: 3 of 8 rows"
    assert finding.meaning == "metadata.lens moved"
    assert finding.graph.declared == declared.name


@pytest.mark.parametrize(("declared", "reached"), [(SINGLE, NEVER), (ALWAYS, SINGLE), (NEVER, NEVER)])
def test_what_cannot_be_seen_is_never_a_pass(declared, reached):
    finding = judge_level(
        measurement(declared, reached, ProbeOutcome("not examined", "a kernel the dispatcher does not see"))
    )
    assert isinstance(finding, NotExamined)
    assert finding.by == "attncheck"
    assert "a kernel the dispatcher does not see" in finding.reasons[0]


def test_a_level_that_holds_has_a_note_on_its_measurement():
    measured = measurement(SINGLE, UNIFORM)
    noted = replace(measured, levels=measured.levels.model_copy(update={"notes": ("over numbers",)}))
    assert judge_level(noted).notes == (
        "over numbers",
        snapshot("head-room: UNIFORM_SINGLE_TOKEN_DECODE is declared, UNIFORM_BATCH measured"),
    )


def test_a_confirmed_level_holds_although_nothing_is_known_above_it():
    finding = judge_level(measurement(NEVER, SINGLE, ProbeOutcome("not examined", "hidden")))
    assert isinstance(finding, Holds)
    assert finding.notes == snapshot(
        (
            "head-room: NEVER is declared, UNIFORM_SINGLE_TOKEN_DECODE measured",
            "above UNIFORM_SINGLE_TOKEN_DECODE nothing is known: probe 'lengths' cannot be examined here: hidden",
        )
    )
