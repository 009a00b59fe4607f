"""Functions beside attention, examined: every wrong one is caught by its check, and a right one by none."""

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from attncheck.backends.registry import load
from attncheck.cases.loader import load_suite
from attncheck.harness.run.evaluation import Examiner, RunPlan

pytestmark = pytest.mark.xdist_group("functions.py")  # they share records

FILE = Path(__file__).resolve().parent / "functions.py"

CASES = {
    "merge": ("mixed.bfloat16-64", "mixed.float32-64", "decode.float16", "prefill.float32", "contiguous.bfloat16"),
    "causal_conv1d": (
        "mixed.bfloat16-silu",
        "mixed.float32-null",
        "width.1",
        "short.float16",
        "short-without-state",
        "alternating.bfloat16",
        "padded-decode.float16",
        "padded-prefill.4-0",
    ),
    "smoke": ("decode.bfloat16", "padded-mixed", "window-prefill.7"),
}

# Miniature: the suite that examines it, the check that must catch it, and those that may also fail.
CAUGHT_BY = {
    "AveragesOutputs": ("merge", "numerics", {"containment"}),
    "WeighsInBaseTwo": ("merge", "numerics", {"lse"}),
    "CountsEmptyStates": ("merge", "numerics", {"lse", "containment"}),
    "SubtractsInfinities": ("merge", "numerics", {"lse"}),
    "SubtractsNoMaximum": ("merge", "numerics", {"lse", "containment"}),
    "SwapsWeights": ("merge", "numerics", {"containment"}),
    "FavoursTheFirst": ("merge", "numerics", {"containment"}),
    "MultipliesByZero": ("merge", "containment", set()),
    "MergesLseToBaseTwo": ("merge", "lse", set()),
    "MergesInPlace": ("merge", "numerics", set()),
    "ReturnsOnlyTheOutput": ("merge", "numerics", {"lse", "containment"}),
    "RefusesToMerge": ("merge", "refusals", {"numerics", "lse", "containment"}),
    "ReversesTaps": ("causal_conv1d", "numerics", set()),
    "KeepsOnlyNewRows": ("causal_conv1d", "cache_write", set()),
    "KeepsShortStates": ("causal_conv1d", "cache_write", {"containment"}),
    "RemembersPadding": ("causal_conv1d", "cache_write", set()),
    "ForgetsInChunks": ("causal_conv1d", "numerics", {"cache_write"}),
    "RemembersWhatNeverWas": ("causal_conv1d", "numerics", {"cache_write", "containment"}),
    "LooksAtNeighbours": ("causal_conv1d", "numerics", {"cache_write"}),
    "UpdatesPaddedLines": ("causal_conv1d", "cache_write", {"containment"}),
    "ReadsSpareColumns": ("causal_conv1d", "numerics", {"cache_write", "containment"}),
    "WritesSpareColumns": ("causal_conv1d", "cache_write", set()),
    "StatesInBfloat16": ("causal_conv1d", "cache_write", set()),
    "KeepsFirstLines": ("causal_conv1d", "numerics", {"cache_write", "containment"}),
    "SwapsBothWays": ("smoke", "cache_write", set()),
    "CopiesToTheNextPage": ("smoke", "cache_write", set()),
    "CopiesKeysOnly": ("smoke", "cache_write", set()),
    "CopiesEachSourceOnce": ("smoke", "cache_write", set()),
    "WritesPaddingRows": ("smoke", "cache_write", set()),
    "ScalesWhatItWrites": ("smoke", "cache_write", set()),
}


@cache
def records(suite):
    """Records of the suite's miniatures and of the right one, by name."""
    names = ("Miniature", *(name for name, expected in CAUGHT_BY.items() if expected[0] == suite))
    cases = tuple(case for case in load_suite(suite).cases if case.id in CASES[suite])
    assert len(cases) == len(CASES[suite])
    examiner = Examiner(RunPlan(cases=cases, backends=tuple(load(f"{FILE}:{name}") for name in names)))
    found = defaultdict(list)
    for record in examiner.run():
        found[record.backend].append(record)
    return found


@pytest.mark.parametrize("name", CAUGHT_BY)
def test_a_fault_is_caught_by_its_check(name):
    suite, check, may_complain = CAUGHT_BY[name]
    short = {r.check for r in records(suite)[name] if r.outcome in ("failed", "errored")}
    assert check in short
    assert short <= {check} | may_complain


@pytest.mark.parametrize("suite", CASES)
def test_a_right_one_passes_everything(suite):
    outcomes = {(r.outcome, getattr(r, "summary", "")) for r in records(suite)["Miniature"]}
    assert ("passed", "") in outcomes
    assert outcomes <= {("passed", ""), ("unsupported", "")}


def test_every_miniature_is_expected_somewhere():
    classes = {node.name for node in ast.parse(FILE.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)}
    assert classes - {"Miniature"} == set(CAUGHT_BY)


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("AveragesOutputs", "the average of the two outputs, without weights"),
        ("SwapsWeights", "the weights of the two states are swapped"),
        ("WeighsInBaseTwo", "the log-sum-exps were taken to base 2"),
        ("SubtractsInfinities", "-inf - -inf is NaN"),
        ("FavoursTheFirst", "only rows with an empty state are wrong"),
        ("MultipliesByZero", "a weight of 0 is multiplied by the value there"),
        ("MergesLseToBaseTwo", "the logarithm is to base 2"),
        ("ReversesTaps", "the taps are in reverse order"),
        ("RemembersWhatNeverWas", "states are used where has_initial_state is False"),
        ("KeepsFirstLines", "something is kept from an earlier call"),
        ("KeepsOnlyNewRows", "what it remembers must move up"),
        ("KeepsShortStates", "the state is not stored where a sequence is shorter than it"),
        ("RemembersPadding", "rows of padding behind the last sequence enter its state"),
        ("ForgetsInChunks", "the state is not used where a sequence has several rows"),
        ("UpdatesPaddedLines", "-1, was taken for the last line"),
        ("WritesSpareColumns", "columns that no state uses were written"),
        ("CopiesToTheNextPage", "no pair names as a destination"),
    ],
)
def test_a_usual_fault_is_named(name, meaning):
    suite, check, _ = CAUGHT_BY[name]
    found = [r.meaning for r in records(suite)[name] if r.check == check and r.outcome == "failed"]
    assert any(meaning in (each or "") for each in found), found


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("KeepsOnlyNewRows", "what it remembers must move up"),
        ("KeepsShortStates", "the state is not stored where a sequence is shorter than it"),
        ("RemembersPadding", "rows of padding behind the last sequence enter its state"),
    ],
)
def test_a_fault_of_states_has_one_name(name, meaning):
    found = [r.meaning for r in records("causal_conv1d")[name] if r.check == "cache_write" and r.outcome == "failed"]
    assert all(meaning in (each or "") for each in found), found
