"""Correct backends of unusual designs pass every check. Each takes one case; at night, the kernels take all of smoke."""

from pathlib import Path

import pytest

from attncheck.backends.registry import LoadedBackend, load
from attncheck.cases.loader import load_suite, select
from attncheck.harness.run.evaluate import Examiner, RunPlan
from attncheck.reference.spec import DEFAULT_CHECKS

FOLDER = Path(__file__).resolve().parent

KERNELS = {
    "InPlace": "sinks",
    "Reordering": "mixed.HND",
    "DecodesFirst": "mixed.NHD",
    "DrawnOrder": "extend",
    "RoundedWeights": "decode.bfloat16",
    "BaseTwo": "prefill",
    "BatchVariant": "verify",
    "FixedSplits": "window-extend",
    "PaddedRows": "padded-mixed",
    "WholeTable": "null-pages",
}
CONSTRUCTIONS = {
    "LazyTables": "alibi",
    "PlanInBuilder": "padded-mixed",
    "OneMetadata": "extend",
    "NumpyMirrors": "mixed.HND",
    "HeadsFirst": "sinks",
    "SplitDecode": "decode.float16",
}


def design(file: str, name: str) -> LoadedBackend:
    return load(f"{FOLDER / file}.py:{name}")


@pytest.mark.parametrize(
    ("file", "name", "key"),
    [
        *(("designs_kernels", name, key) for name, key in KERNELS.items()),
        *(("designs_constructions", name, key) for name, key in CONSTRUCTIONS.items()),
    ],
)
def test_a_correct_design_passes(file, name, key):
    cases = select(load_suite("smoke").cases, [key])
    records = list(Examiner(RunPlan(cases=cases, backends=(design(file, name),))).run())
    assert {record.check: record.outcome for record in records if record.outcome not in ("passed", "unsupported")} == {}
    assert {record.check for record in records if record.outcome == "passed"} >= {"numerics", "invariance"}


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(KERNELS)), ids=KERNELS)
def test_correct_kernels_pass_all_of_smoke(number):
    cases = load_suite("smoke").cases[number :: len(KERNELS)]
    backend = design("designs_kernels", list(KERNELS)[number])
    outcomes = [record.outcome for record in Examiner(RunPlan(cases=cases, backends=(backend,))).run()]
    assert set(outcomes) == {"passed", "unsupported"}
    assert outcomes.count("passed") > outcomes.count("unsupported")


@pytest.mark.parametrize(
    ("name", "key", "check"),
    [
        ("MovedByDevice", "smoke/decode.float16", "cudagraph"),
        ("MovedByDeviceType", "smoke/decode.float16", "cudagraph"),
        ("MovedByDeviceIndex", "smoke/decode.float16", "cudagraph"),
        ("MovedOnce", "smoke/decode.float16", "cudagraph"),
        ("MovedForEachDevice", "smoke/decode.float16", "cudagraph"),
        ("LseHeadsFirst", "strides/output.transposed", "lse"),
        ("LseByStrides", "strides/output.transposed", "lse"),
        ("LseContiguous", "strides/output.offset", "lse"),
        ("DeclaresMultiples", "smoke/decode.float16", "refusals"),
        ("RefusesScalesOfHeads", "smoke/fp8-cache", "refusals"),
        ("RefusesScalesOfHeads", "smoke/fp8-cache-per-head", "refusals"),
    ],
)
def test_what_looks_wrong_passes(name, key, check):
    suite, _, case = key.partition("/")
    plan = RunPlan(select(load_suite(suite).cases, [case]), (design("designs_allowed", name),), (check,))
    (record,) = Examiner(plan).run()
    assert record.outcome in ("passed", "unsupported"), record


PROMISES = {
    "CannotTakeZero": (("split_kv", "extend"), ("dcp", "padding")),
    "FromTheFirstRow": (("micro_batch", "alibi"),),
    "Merged": (("cascade", "extend"), ("local", "prefill"), ("dcp", "extend")),
}


@pytest.mark.parametrize(
    ("name", "suite", "pattern"), [(name, *case) for name, cases in PROMISES.items() for case in cases]
)
def test_what_the_contract_promises_may_be_believed(name, suite, pattern):
    case = next(case for case in load_suite(suite).cases if case.id.startswith(pattern))
    examiner = Examiner(RunPlan(cases=(case,), backends=(design("designs_allowed", name),)))
    outcomes = {record.check: record.outcome for record in examiner.run()}
    assert not examiner.blind
    assert outcomes["numerics"] == "passed"
    assert set(outcomes.values()) <= {"passed", "unsupported"}


def test_latent_candidates_pass():
    """The latent cases of smoke, and one with a cache of codes."""
    cases = tuple(case for case in load_suite("smoke").cases if case.layer.mla is not None)
    cases += select(load_suite("mla").cases, ["codes.fp8_e4m3"])
    examiner = Examiner(RunPlan(cases=cases, backends=(load("reference_mla"), load("torch_mla"))))
    found = {(record.backend, record.check, record.outcome) for record in examiner.run()}
    assert not examiner.blind
    assert found == {(name, check, "passed") for name in ("reference_mla", "torch_mla") for check in DEFAULT_CHECKS}
