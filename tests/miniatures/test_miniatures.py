"""Examining the examiner: every wrong backend is caught by the check its fault calls for, and an honest one by none."""

import ast
import subprocess
import sys
from collections import defaultdict
from contextlib import contextmanager
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

from attncheck.backends.registry import load
from attncheck.cases.loader import load_suite, suite_names
from attncheck.harness.checks import lse, numerics
from attncheck.harness.run.evaluation import Examiner, RunPlan
from attncheck.reference.spec import DEFAULT_CHECKS

HERE = Path(__file__).resolve().parent
BASES = {"CodingImpl", "Miniature", "MaskedImpl", "ChangesLse", "ChangesMetadata"}

ANSWERS = {"numerics", "lse"}
EVERY = set(DEFAULT_CHECKS)

# Miniature: the check that must catch it, and those that may also complain, since the fault shows there too.
CAUGHT_BY = {
    "wrong.py": {
        "WindowOffByOne": ("numerics", ANSWERS),
        "ReadsPastTheEnd": ("containment", {"containment"}),
        "IgnoresSoftCap": ("numerics", ANSWERS),
        "WritesPadSlot": ("cache_write", EVERY - {"refusals"}),  # the last slot may be one that somebody owns
    },
    "constants.py": {
        "Zeros": ("numerics", {"numerics"}),
        "Constant": ("numerics", {"numerics"}),
        "MeanOfV": ("numerics", ANSWERS),
    },
    "stale.py": {
        "KeepsFirstTable": ("numerics", {"numerics"}),
        "CountsItsCalls": ("numerics", {"numerics", "containment"}),
        "KeepsFirstLengths": ("numerics", {"numerics"}),
        "TrustsMaxSeqLen": ("numerics", {"numerics"}),
        "TrustsMaxQueryLen": ("numerics", {"numerics"}),
    },
    "answers.py": {
        "TopLeftCausal": ("numerics", ANSWERS | {"containment"}),
        "ExcludesItself": ("numerics", ANSWERS),
        "DropsLastPartialPage": ("numerics", ANSWERS),
        "WindowTooShort": ("numerics", ANSWERS),
        "WindowDroppedInDecode": ("numerics", ANSWERS | {"containment"}),
        "AlwaysCausal": ("numerics", ANSWERS),
        "IdentityBlockTable": ("numerics", ANSWERS | {"containment"}),
        "RepeatsHeadsWrong": ("numerics", ANSWERS),
        "MissesTheNewKeys": ("numerics", ANSWERS),
        "LeavesRowsUnwritten": ("numerics", {"numerics"}),
        "ReturnsAnotherTensor": ("numerics", {"numerics", "refusals"}),
        "ScaleIgnored": ("numerics", ANSWERS),
        "CapBeforeScale": ("numerics", ANSWERS),
        "AlibiDropped": ("numerics", ANSWERS),
        "SlopesReversed": ("numerics", ANSWERS),
        "SinksIgnored": ("numerics", ANSWERS),
        "SinksScaled": ("numerics", ANSWERS),
        "LseBaseTwo": ("lse", {"lse"}),
        "LseOfTheMaxOnly": ("lse", {"lse"}),
        "LseWithoutSink": ("lse", {"lse"}),
        "LseOfTheFirstHead": ("lse", {"lse"}),
    },
    "writers.py": {
        "WritesNeighbourSlot": ("cache_write", {"cache_write"} | ANSWERS),
        "SwapsKAndV": ("cache_write", {"cache_write"} | ANSWERS),
        "RoundsKeys": ("cache_write", {"cache_write"} | ANSWERS),
        "RoundsToBfloat16": ("cache_write", {"cache_write"} | ANSWERS),
        "ClampsLikeFp8": ("cache_write", {"cache_write"}),
        "ScalesAnyCache": ("cache_write", {"cache_write"} | ANSWERS),
        "MutatesQuery": ("cache_write", {"cache_write"}),
        "MutatesMetadata": ("cache_write", {"cache_write"}),
    },
    "quantised.py": {
        "MultipliesByTheScale": ("cache_write", {"cache_write"} | ANSWERS),
        "DoesNotSaturate": ("cache_write", {"cache_write"}),
        "TruncatesCodes": ("cache_write", {"cache_write"} | ANSWERS),
        "SwapsScales": ("cache_write", {"cache_write"} | ANSWERS),
        "TakesFirstHeadsScale": ("numerics", ANSWERS),
        "ForgetsValueScale": ("numerics", {"numerics"}),
        "ScalesFloatCache": ("numerics", ANSWERS),
        "ScalesQuery": ("numerics", ANSWERS),
        "MultipliesTheOutput": ("numerics", {"numerics"}),
        "IgnoresOutputScale": ("numerics", {"numerics"}),
        "OutputDoesNotSaturate": ("numerics", {"numerics"}),
    },
    "outside.py": {
        "FollowsTheTableToItsEnd": ("containment", {"containment"}),
        "MaskedValuesLeak": ("containment", {"containment"}),
        "WritesPaddedRowsNaN": ("containment", {"containment"}),
        "WritesBehindTheOutput": ("containment", {"containment"}),
        "LetsPaddingIn": ("containment", {"containment", "numerics"}),
    },
    "declarations.py": {
        "RefusesItsOwnClaim": ("refusals", EVERY),
        "AcceptsUndeclaredSoftCap": ("refusals", {"refusals"}),
        "BreaksOnUndeclaredSinks": ("refusals", {"refusals"}),
        "RefusesTooLate": ("refusals", {"refusals"}),
        "CannotProfile": ("refusals", {"refusals"}),
        "RaisesInForward": ("numerics", EVERY),
        "RaisesInDeclaration": ("refusals", EVERY),
    },
}

RIGHT_BY_NATURE = {
    "MeanOfV": {
        "smoke/window-prefill.1",
        "interpreted/window-prefill.1",
        "encoder/encoder-only-window.1",
        "sliding_window/decode-width.1",
        "sliding_window/prefill.1",
    }
}
"""Cases whose right answer is what the miniature always says: with a window of one key the mean is that key's value."""


FEW = (
    "decode.float16",
    "mixed.HND",
    "window-decode",
    "alibi",
    "sinks",
    "scale",
    "combined-sinks",
    "non-causal",
    "ignored-scales",
    "padded-mixed",
    "cross",
    "fp8-cache",
    "fp8-cache-per-head",
    "output-quant",
)
"""Cases of smoke that show every fault: about one of each feature."""


def concerns(file, case):
    """Whether the faults of a file can show in a case at all; faults of paths have a test of their own."""
    if file == "mla.py":
        return case.layer.mla is not None
    if file == "quantised.py":
        has_scales = case.cache.k_scale != 1 or case.cache.q_scale != 1
        return has_scales or case.layer.output_quant is not None
    is_plain = case.layer.mla is None and case.layer.output_quant is None and case.cache.kv_cache_dtype == "auto"
    return is_plain and case.batch.path.name in ("paged", "encoder_only", "cross")


@contextmanager
def no_explanations():
    """Checks judge alone: to explain a failure takes five times as long, and ``harness/truth/test_explain.py`` does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numerics, "explain", lambda *_: None)
        patch.setattr(lse, "explain_lse", lambda *_: None)
        yield


@cache
def smoke_records(file, names, ids=None):
    """Records of some miniatures over the cases ``ids`` of smoke, by name; None: over all.

    Together, because problem and truth are made once a case.
    """
    backends = tuple(load(f"{HERE / file}:{name}") for name in names)
    cases = tuple(case for case in load_suite("smoke").cases if concerns(file, case) and (not ids or case.id in ids))
    examiner = Examiner(RunPlan(cases=cases, backends=backends, checks=tuple(EVERY - {"cudagraph"})))
    # Of one layer only: these faults are none of a graph, and to look for one takes longer than all other checks.
    of_graphs = Examiner(RunPlan(cases=cases[:1], backends=backends, checks=("cudagraph",)))
    found = defaultdict(list)
    with no_explanations():
        for record in chain(examiner.run(), of_graphs.run()):
            found[record.backend].append(record)
    assert not examiner.blind
    assert not of_graphs.blind
    return found


def miniatures():
    """(file, name, the miniatures examined together with it): one worker of xdist examines such a group."""
    for file, expected in CAUGHT_BY.items():
        names = list(expected)
        groups = [tuple(names[first : first + 10]) for first in range(0, len(names), 10)]
        for group in groups:
            mark = pytest.mark.xdist_group(f"{file}-{group[0]}")
            for name in group:
                yield pytest.param(file, name, group, id=name, marks=mark)


@pytest.mark.parametrize("ids", [FEW, pytest.param(None, marks=pytest.mark.slow)], ids=["few", "all"])
@pytest.mark.parametrize(("file", "name", "group"), list(miniatures()))
def test_a_fault_is_caught_by_its_check_on_smoke_alone(file, name, group, ids):
    check, may_complain = CAUGHT_BY[file][name]
    short = {r.check for r in smoke_records(file, group, ids)[name] if r.outcome in ("failed", "errored")}
    assert check in short
    assert short <= may_complain


@pytest.mark.parametrize("file", CAUGHT_BY)
def test_the_honest_base_passes_everything(file):
    """On some cases: the base is a candidate under another name, and that is examined on all of them."""
    base = load(f"{HERE / file}:Miniature")
    cases = tuple(case for case in load_suite("smoke").cases if concerns(file, case))
    few = cases[:: 1 + len(cases) // 5]
    records = list(Examiner(RunPlan(cases=few, backends=(base,))).run())
    assert {r.outcome for r in records} <= {"passed", "unsupported"}
    assert {r.check for r in records if r.outcome == "passed"} == EVERY


def test_every_check_has_a_miniature_it_must_catch():
    """Those of ``cudagraph`` are in ``test_graphs.py``."""
    assert {check for expected in CAUGHT_BY.values() for check, _ in expected.values()} == EVERY - {"cudagraph"}


@pytest.mark.parametrize("file", CAUGHT_BY)
def test_every_miniature_is_expected_somewhere(file):
    tree = ast.parse((HERE / file).read_text(encoding="utf-8"))
    assert {node.name for node in tree.body if isinstance(node, ast.ClassDef)} - BASES == set(CAUGHT_BY[file])


def suites():
    """Those of the default run, and in the slow tests every other one."""
    for suite in suite_names():
        yield pytest.param(suite, marks=() if suite in ("smoke", "interpreted", "mla") else pytest.mark.slow)


@pytest.mark.parametrize("suite", list(suites()))
def test_answers_that_ignore_the_scores_fail_every_case(suite):
    blind = [f"constants.py:{name}" for name in CAUGHT_BY["constants.py"]]
    if suite == "mla":
        blind = ["mla.py:LatentZeros", "mla.py:LatentConstant", "mla.py:LatentMean"]
    backends = tuple(load(f"{HERE / name}") for name in blind)
    plan = RunPlan(cases=load_suite(suite).cases, backends=backends, checks=("numerics",))
    with no_explanations():
        examined = [r for r in Examiner(plan).run() if r.outcome != "unsupported"]
    assert examined
    passed = {(r.backend, f"{r.suite}/{r.case_id}") for r in examined if r.outcome != "failed"}
    right = {(name, case) for name, cases in RIGHT_BY_NATURE.items() for case in cases}
    assert passed == {(name, case) for name, case in right if case.startswith(f"{suite}/")}


def test_the_command_line_says_so(tmp_path, preloaded):
    (tmp_path / "wrong.py").write_bytes((HERE / "wrong.py").read_bytes())
    command = [sys.executable, "-m", "attncheck", "run", "--case", "combined-sinks", "--case", "padded-mixed"]
    command += [word for name in CAUGHT_BY["wrong.py"] for word in ("--backend", f"./wrong.py:{name}")]
    command += [word for check, _ in CAUGHT_BY["wrong.py"].values() for word in ("--check", check)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    findings = [part for part in done.stdout.split("\n\n") if part.startswith("finding ")]
    for name, (check, _) in CAUGHT_BY["wrong.py"].items():
        told = [part for part in findings if f", {name}: " in " ".join(part.split()) and f"check {check}" in part]
        assert told, done.stdout
