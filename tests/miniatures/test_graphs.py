"""Examining the check ``cudagraph``: it measures honest backends exactly, and catches every way to lie, by its cause.

What CUDA would refuse is refused here by the emulation; on a GPU the same miniatures meet real graphs.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

from attncheck.backends.registry import load
from attncheck.cases.loader import load_suite
from attncheck.harness.checks.cudagraph.measurement import OVER_NUMBERS
from attncheck.harness.run.evaluation import Examiner, RunPlan
from attncheck.reference.spec import DEFAULT_CHECKS

HERE = Path(__file__).resolve().parent
MUTANTS = HERE.parents[1] / "backends" / "mutants"
NEVER, SINGLE, UNIFORM, ALWAYS = "NEVER", "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "ALWAYS"

HONEST = {
    "graphs.py": {"RowByRow": ALWAYS, "EqualRows": UNIFORM, "RowPerRequest": SINGLE, "HostLengths": NEVER},
    "graphs_honest.py": {
        "RefillsBuffers": ALWAYS,
        "PlansOnTheHost": ALWAYS,
        "SplitsAtAThreshold": UNIFORM,
        "SyncsInPrefill": UNIFORM,
        "LazyConstants": ALWAYS,
        "LazyOnMetadata": ALWAYS,
        "WorkspaceFromTheStart": ALWAYS,
        "GrowsToTheBound": ALWAYS,
        "BoundsFromTheConfig": ALWAYS,
        "BoundsFromMaxSeqLen": ALWAYS,
        "WritesApart": ALWAYS,
        "MergesSplits": ALWAYS,
        "NeedsOneKey": ALWAYS,
        "LeavesPaddingAlone": ALWAYS,
        "DeclaresByTheConfig": ALWAYS,
    },
    "graphs_styles.py": {
        "SyncsInBuild": ALWAYS,
        "BuffersInPairs": ALWAYS,
        "OneMetadataObject": ALWAYS,
        "RepeatsInterleaved": ALWAYS,
        "ClearsByMask": ALWAYS,
        "ScalarOnTheHost": ALWAYS,
        "WritesIntoOut": ALWAYS,
        "ConstantsOfTheModule": ALWAYS,
        "MovesNothing": ALWAYS,
        "DraftsInTheSamePages": ALWAYS,
    },
    "graphs_kernels.py": {"WrappedKernel": ALWAYS},
}
"""Miniature: the level it declares, which must be the one measured."""

FROZEN, KEPT = "numbers are frozen at capture", "something is kept from earlier steps"
CANNOT, PADDING = "cannot be captured", "right without padding"

LIARS = {
    "graphs.py": {
        "ClaimsSingleDecode": (NEVER, "'decode'", FROZEN),
        "ClaimsUniformBatch": (SINGLE, "'verify 2'", FROZEN),
        "ClaimsAlways": (UNIFORM, "'mixed'", FROZEN, "max_query_len"),
        "ClaimsByTheConfig": (SINGLE, "declared ALWAYS", "'verify 2'"),
    },
    "graphs_forward.py": {
        "ItemForManyRequests": (
            NEVER,
            CANNOT,
            "8 requests",
            "host read: .item() at",
            "graphs_forward.py",
            "in longest",
        ),
        "TolistForPrefill": (SINGLE, CANNOT, "host read: .tolist() at", "in locate"),
        "BranchesOnTheData": (NEVER, CANNOT, "host read: bool() at"),
        "CopiesToTheHost": (NEVER, CANNOT, "host read: .cpu() at"),
        "CopiesFromTheHost": (NEVER, CANNOT, "host copy: torch.tensor() at"),
        "CopiesTheTwins": (NEVER, CANNOT, "host copy: .to() at"),
        "ShapesByTheData": (NEVER, CANNOT, "data-dependent shape: .nonzero() at"),
        "SelectsSlots": (NEVER, CANNOT, "data-dependent shape: .masked_select() at", "in write"),
        "WritesByMask": (NEVER, CANNOT, "data-dependent shape: x[...] = y"),
        "ReadsLengthsAsInts": (NEVER, FROZEN, "seq_lens[0] was 1 at capture and is 15 now"),
        "TrustsTheHostMaximum": (NEVER, FROZEN),
        "FreezesTheSplits": (NEVER, FROZEN),
        "ScalesByTheWholeQuery": (NEVER, "'padded decode'", "NaN or infinite", PADDING),
        "DummiesIntoTheNullPage": (NEVER, "capture changed the cache", "slot 0 ", "NaN", "null page"),
        "NegativeSlotsWrap": (NEVER, "capture changed the cache", "offset 3; owned by no request"),
        "WorkspaceMoves": (NEVER, "'buckets'", "let go since capture", "in attend_rows"),
    },
    "graphs_builders.py": {
        "AllocatesEachBuild": (NEVER, "'decode'", "let go since capture"),
        "StaleSlots": (NEVER, "'decode'", "let go since capture", "in write_rows"),
        "AlternatesBuffers": (NEVER, "build puts metadata.common.seq_lens into new memory"),
        "BuffersOfTheCapture": (NEVER, "build puts metadata.common.seq_lens into new memory"),
        "NarrowsTheTable": (NEVER, "metadata.common.block_table_tensor"),
        "ChangesTheCommonLengths": (NEVER, "inputs were changed: metadata.seq_lens"),
        "DraftsWithOldLengths": (NEVER, "'drafting'"),
    },
    "graphs_plans.py": {
        "PlansByShape": (NEVER, "'decode'", KEPT),
        "KeepsTheLastTable": (NEVER, "'decode'", KEPT),
        "OnePlanForAllBuckets": (NEVER, "'buckets'", "4 of 8 rows were never written", KEPT),
        "PacksDraftsByEight": (SINGLE, "'verify 5'", KEPT),
        "CapturesAShortMaximum": (NEVER, FROZEN, "max_seq_len was 1 at capture"),
        "GridOfTheDummies": (UNIFORM, "'mixed'", "position 6", FROZEN),
        "SkipsFreshPrompts": (SINGLE, "'verify 2'", "request 1, position 0", "right without a graph"),
        "EmptySplitsAreNaN": (NEVER, "'decode'", "NaN or infinite", "right without a graph"),
        "LeavesTheLseOut": (NEVER, "LSE: 8 of 8 rows were never written", "right without a graph"),
    },
    "graphs_adversary.py": {
        "MovesForMoreRequests": (NEVER, "'buckets'", "build puts metadata.common.seq_lens into new memory"),
        "PlansManyOnTheHost": (NEVER, "'many requests'", FROZEN),
        "VerifiesManyOnTheHost": (SINGLE, "'verify, many requests'", FROZEN),
        "PairsRequests": (NEVER, "'buckets'", "request 5, position 16", PADDING),
        "KernelForShortContexts": (NEVER, "'long decode'", "position 522", FROZEN),
        "CountsTilesOfDummies": (UNIFORM, "'tiles'", "metadata.plan was 4 at capture and is 5 now"),
        "KeepsTheTableWhileItGrows": (NEVER, "'decode'", "right without a graph"),
        "PlansByBatchSize": (SINGLE, "'verify and draft'", KEPT),
        "DraftsByTheRowsBefore": (SINGLE, "'verify and draft'", KEPT),
        "GrowsForUniformSteps": (NEVER, "'buckets'", "memory that has been let go"),
    },
    "graphs_kernels.py": {
        "ItemInsideAnOperator": (NEVER, CANNOT, "host read: .item() at", "in clean_table"),
        "TwinInsideAnOperator": (NEVER, FROZEN),
        "ContextInsideAnOperator": (NEVER, FROZEN),
        "WritesThroughNumpy": (NEVER, CANNOT, "host read: .numpy() at"),
        "ReadsThroughPointers": (NEVER, FROZEN),
    },
}
"""Miniature: the level measured, which is below the one it declares, and words that must name the cause."""

SPOILING = ("DividesByTheLength", "ReadsTheNullPage", "WritesNaNIntoPadding")
"""Of ``graphs_forward.py``: those whose padding rows become NaN, and whose real rows are right at every level."""

LEAKING = {"LeaksTheTail": ALWAYS, "LeaksAndCutsAlike": UNIFORM, "LeaksAndClaims": UNIFORM}
"""Of ``graphs_leaking.py``: the level measured; all but the last declare just that."""

HIDDEN = ("WritesThroughPointers", "WritesTheCacheThroughPointers", "ScratchThroughPointers")
"""Of ``graphs_kernels.py``: what the emulation cannot see it must not judge."""

OTHERS = {"graphs_forward.py": SPOILING, "graphs_kernels.py": HIDDEN}

BASES = {
    "graphs.py": {"Base", "RowsImpl", "Planned", "PlannedImpl"},
    "graphs_honest.py": {"BufferedBuilder"},
    "graphs_forward.py": {"GathersTheLongest"},
    "graphs_builders.py": {"ChangesCommon"},
    "graphs_plans.py": {"KnowsCaptures"},
    "graphs_adversary.py": {"OwnLengths"},
    "graphs_kernels.py": {"RunsOnTheCPU"},
    "graphs_leaking.py": {"PageImpl", *LEAKING},
}


def only(table):
    for file, expected in table.items():
        for name in expected:
            yield pytest.param(file, name, id=name, marks=pytest.mark.xdist_group(file))


def path_of(file):
    """The file of this folder, or among the mutants."""
    return HERE / file if (HERE / file).exists() else MUTANTS / file


@cache
def level_records(file, names):
    """The record of each miniature's level, by name; together, because they share problems and truths."""
    case = load_suite(str(HERE / "graphs.yaml")).cases[0]
    backends = tuple(load(f"{path_of(file)}:{name}") for name in names)
    examiner = Examiner(RunPlan(cases=(case,), backends=backends, checks=("cudagraph",)))
    records = {record.backend: record for record in examiner.run()}
    assert not examiner.blind
    return records


def record_of(file, name):
    return level_records(file, (*HONEST.get(file, ()), *LIARS.get(file, ()), *OTHERS.get(file, ())))[name]


def padding_of(name, level):
    """The state of padding rows: as declared, and unknown if no graph was replayed."""
    if level == NEVER:
        return "not examined"
    return "untouched" if name == "LeavesPaddingAlone" else "finite"


@pytest.mark.parametrize(("file", "name"), list(only(HONEST)))
def test_an_honest_backend_measures_exactly_what_it_declares(file, name):
    record = record_of(file, name)
    assert record.outcome == "passed", record
    assert (record.graph.declared, record.graph.measured) == (HONEST[file][name],) * 2
    assert record.graph.padding_rows == padding_of(name, record.graph.measured)
    assert record.notes == ()


@pytest.mark.parametrize(("file", "name"), list(only(LIARS)))
def test_a_false_claim_is_measured_below_the_declaration_and_explained(file, name):
    measured, *words = LIARS[file][name]
    record = record_of(file, name)
    assert record.outcome == "failed", record
    assert (record.graph.measured, record.graph.notes) == (measured, ())
    text = f"{record.summary}; {record.meaning}"
    assert [word for word in words if word not in text] == [], text


@pytest.mark.xdist_group("graphs_forward.py")
@pytest.mark.parametrize("name", SPOILING)
def test_nan_in_padding_rows_is_recorded_beside_the_level_of_the_real_rows(name):
    record = record_of("graphs_forward.py", name)
    assert (record.outcome, record.graph.measured, record.graph.padding_rows) == ("passed", ALWAYS, "NaN or Inf")


@pytest.mark.xdist_group("graphs_leaking.py")
@pytest.mark.parametrize("name", LEAKING)
def test_nan_in_foreign_slots_fails_containment_and_no_graph_level(name):
    record = level_records("graphs_leaking.py", tuple(LEAKING))[name]
    assert record.graph.measured == LEAKING[name], record
    assert record.graph.notes == (OVER_NUMBERS,)
    if name == "LeaksAndClaims":
        assert record.outcome == "failed"
        assert FROZEN in record.meaning
        assert "max_query_len" in record.meaning
    else:
        assert record.outcome == "passed"
        assert record.notes == (OVER_NUMBERS,)


@pytest.mark.xdist_group("graphs_leaking.py")
def test_a_backend_that_lets_nan_through_fails_containment_and_nothing_else():
    cases = load_suite(str(HERE / "graphs.yaml")).cases
    backends = tuple(load(f"{HERE / 'graphs_leaking.py'}:{name}") for name in LEAKING)
    checks = ("numerics", "lse", "cache_write", "containment", "refusals")
    records = list(Examiner(RunPlan(cases=cases, backends=backends, checks=checks)).run())
    assert [record.outcome for record in records if record.check == "containment"] == ["failed"] * len(LEAKING)
    assert {record.outcome for record in records if record.check != "containment"} == {"passed"}
    assert all("only NaN and Inf leak" in record.meaning for record in records if record.check == "containment")


@pytest.mark.xdist_group("graphs_kernels.py")
@pytest.mark.parametrize("name", HIDDEN)
def test_work_that_no_operator_shows_is_not_judged(name):
    record = record_of("graphs_kernels.py", name)
    assert record.outcome == "unsupported"
    assert record.graph.measured is None
    assert "cannot be examined here" in record.reasons[0]


@pytest.mark.parametrize("file", HONEST)
def test_honest_backends_pass_every_check_on_a_small_case(file):
    cases = load_suite(str(HERE / "graphs.yaml")).cases
    backends = tuple(load(f"{path_of(file)}:{name}") for name in HONEST[file])
    checks = tuple(check for check in DEFAULT_CHECKS if check != "cudagraph")
    records = list(Examiner(RunPlan(cases=cases, backends=backends, checks=checks)).run())
    assert len(records) == len(cases) * len(backends) * len(checks)
    assert {record.outcome for record in records} == {"passed"}, [r for r in records if r.outcome != "passed"]


@pytest.mark.parametrize("file", sorted({*HONEST, *LIARS, *BASES}))
def test_every_miniature_is_expected_somewhere(file):
    tree = ast.parse(path_of(file).read_text(encoding="utf-8"))
    found = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    assert found == {each for table in (HONEST, LIARS, OTHERS, BASES) for each in table.get(file, ())}
