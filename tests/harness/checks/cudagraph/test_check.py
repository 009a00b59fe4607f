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


WRONG, UNSEEN = ProbeOutcome("failed", "3 of 8 rows", "metadata.lens moved"), ProbeOutcome("not examined", "hidden")


@pytest.mark.parametrize(
    ("declared", "reached", "broke", "outcome"),
    [
        (NEVER, NEVER, WRONG, Holds),
        (SINGLE, SINGLE, WRONG, Holds),
        (ALWAYS, ALWAYS, None, Holds),
        (SINGLE, NEVER, WRONG, Broken),
        (ALWAYS, UNIFORM, WRONG, Broken),
        (SINGLE, NEVER, UNSEEN, NotExamined),
        (ALWAYS, SINGLE, UNSEEN, NotExamined),
        (NEVER, NEVER, UNSEEN, NotExamined),  # what cannot be seen is never a pass
    ],
)
def test_a_declared_level_is_held_against_the_measured_one(declared, reached, broke, outcome):
    finding = judge_level(measurement(declared, reached, broke))
    assert isinstance(finding, outcome)
    if outcome is Broken:
        assert finding.summary == (
            f"declared {declared.name}, measured {reached.name}: probe 'lengths' broke: 3 of 8 rows"
        )
        assert finding.meaning == "metadata.lens moved"
        assert finding.graph.declared == declared.name
    elif outcome is NotExamined:
        assert finding.by == "attncheck"
        assert "hidden" in finding.reasons[0]
    else:
        assert finding.notes == ()
        assert finding.figures["declared_level"] == finding.figures["measured_level"] == declared.value


def test_notes_name_the_head_room_and_what_is_unknown_above_it():
    measured = measurement(SINGLE, UNIFORM)
    noted = replace(measured, levels=measured.levels.model_copy(update={"notes": ("over numbers",)}))
    assert judge_level(noted).notes == snapshot(
        ("over numbers", "head-room: UNIFORM_SINGLE_TOKEN_DECODE is declared, UNIFORM_BATCH measured")
    )
    assert judge_level(measurement(NEVER, SINGLE, UNSEEN)).notes == snapshot(
        (
            "head-room: NEVER is declared, UNIFORM_SINGLE_TOKEN_DECODE measured",
            "above UNIFORM_SINGLE_TOKEN_DECODE nothing is known: probe 'lengths' cannot be examined here: hidden",
        )
    )
