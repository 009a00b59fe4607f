"""Examining the check ``cudagraph``: honest backends pass every check, and have the level that they declare.

What CUDA would refuse is refused here by the emulation; on a GPU the same miniatures meet real graphs. Backends that
claim too much are mutants of the catalogue.
"""

import ast
from pathlib import Path

import pytest

from attncheck.backends.mutants import graphs
from attncheck.backends.registry import load
from attncheck.cases.loader import load_suite
from attncheck.harness.checks.cudagraph.check import OVER_NUMBERS
from attncheck.harness.run.evaluate import Examiner, RunPlan
from attncheck.reference.spec import DEFAULT_CHECKS

HERE = Path(__file__).resolve().parent
NEVER, SINGLE, UNIFORM, ALWAYS = "NEVER", "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "ALWAYS"

LEVELS = {
    graphs.__file__: {"RowByRow": ALWAYS, "EqualRows": UNIFORM, "RowPerRequest": SINGLE, "HostLengths": NEVER},
    "graphs_honest.py": {
        "RefillsBuffers": ALWAYS,
        "PlansOnTheHost": ALWAYS,
        "SplitsAtAThreshold": UNIFORM,
        "LazyOnMetadata": ALWAYS,
        "MovesOnFirstUse": ALWAYS,
        "BoundsFromTheConfig": ALWAYS,
        "DeclaresOtherwise": ALWAYS,
        "NeedsOneKey": ALWAYS,
        "MergesSplits": ALWAYS,
        "DraftsInTheSamePages": ALWAYS,
    },
    "graphs_kernels.py": {"WrappedKernel": ALWAYS},
}
"""Honest backend: the level it declares, which must be the one measured."""

HIDDEN = ("WritesThroughPointers", "WritesTheCacheThroughPointers", "ScratchThroughPointers")
"""Of ``graphs_kernels.py``: what the emulation cannot see it must not judge."""


def records(file, *names):
    """The records of every check, by backend and check; together, because they share problems and truths."""
    cases = load_suite(str(HERE / "graphs.yaml")).cases
    backends = tuple(load(f"{HERE / file}:{name}") for name in names)
    examiner = Examiner(RunPlan(cases=cases, backends=backends, checks=DEFAULT_CHECKS))
    found = {(record.backend, record.check): record for record in examiner.run()}
    assert not examiner.blind
    return found


@pytest.mark.parametrize("file", LEVELS, ids=lambda file: Path(file).stem)
def test_honest_backends_pass_and_measure_exactly_what_they_declare(file):
    found = records(file, *LEVELS[file])
    assert {key: record.outcome for key, record in found.items() if record.outcome != "passed"} == {}
    assert len(found) == len(LEVELS[file]) * len(DEFAULT_CHECKS)
    for name, level in LEVELS[file].items():
        record = found[name, "cudagraph"]
        assert (record.graph.declared, record.graph.measured, record.notes) == (level, level, ()), name
        replayed = "untouched" if name == "DeclaresOtherwise" else "finite"
        assert record.graph.padding_rows == ("not examined" if level == NEVER else replayed), name


def test_nan_in_padding_rows_is_recorded_beside_the_level_of_the_real_rows():
    case = load_suite(str(HERE / "graphs.yaml")).cases[0]
    (record,) = Examiner(RunPlan((case,))).records(
        case, load("mutants:graph-writes-nan-into-padding"), checks=("cudagraph",)
    )
    assert (record.outcome, record.graph.measured, record.graph.padding_rows) == ("passed", ALWAYS, "NaN or Inf")


@pytest.mark.parametrize(("name", "measured"), [("LeaksTheTail", ALWAYS), ("LeaksAndClaims", UNIFORM)])
def test_nan_in_foreign_slots_fails_containment_and_no_graph_level(name, measured):
    found = {check: record for (_, check), record in records("graphs_leaking.py", name).items()}
    failed = {check for check, record in found.items() if record.outcome != "passed"}
    assert failed == {"containment", *(["cudagraph"] if name == "LeaksAndClaims" else [])}
    assert "only NaN and Inf leak" in found["containment"].meaning
    level = found["cudagraph"].graph
    assert (level.measured, level.notes) == (measured, (OVER_NUMBERS,))
    if name == "LeaksTheTail":
        assert found["cudagraph"].notes == (OVER_NUMBERS,)
    else:
        assert "numbers are frozen at capture" in found["cudagraph"].meaning


def test_work_that_no_operator_shows_is_not_judged():
    case = load_suite(str(HERE / "graphs.yaml")).cases[0]
    for name in HIDDEN:
        backend = load(f"{HERE / 'graphs_kernels.py'}:{name}")
        (record,) = Examiner(RunPlan((case,))).records(case, backend, checks=("cudagraph",))
        assert (record.outcome, record.graph.measured) == ("unsupported", None), name
        assert "cannot be examined here" in record.reasons[0]


def test_every_miniature_is_examined():
    for file in ("graphs_honest.py", "graphs_kernels.py"):
        tree = ast.parse((HERE / file).read_text(encoding="utf-8"))
        found = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
        assert found - {"BufferedBuilder", "RunsOnTheCPU", *HIDDEN} == set(LEVELS[file])
