"""Levels by kinds of layers: probes that layers share, and faults that one kind or two traits alone show."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from made_cases import make_case

from attncheck.backends.candidates.torch_sdpa import SDPABackend, SDPABuilder
from attncheck.backends.mutants import graphs_layers
from attncheck.harness.checks.cudagraph import check as check_module
from attncheck.harness.checks.cudagraph.check import GraphLevelCheck
from attncheck.harness.checks.cudagraph.probes import ALIKE, probes_of
from attncheck.harness.checks.cudagraph.replay import ProbeOutcome
from attncheck.harness.checks.findings import Broken, Holds, NotExamined
from attncheck.harness.driver.foreign_code import StageError
from attncheck.harness.driver.observation import Raised
from attncheck.reference.spec import AttentionCGSupport, LayerSpec, MLASpec

SINGLE, UNIFORM, ALWAYS = (AttentionCGSupport(value) for value in (1, 2, 3))
LAYER = LayerSpec(num_heads=2, num_kv_heads=1, head_size=16, dtype="float32")
CASE = make_case((3, 9), name="plain", layer=LAYER, cache={"block_size": 4})
WIDE = replace(CASE, id="wide", layer=replace(LAYER, head_size=32))
WINDOW = replace(CASE, id="window", layer=replace(LAYER, sliding_window=3))
HALF = replace(CASE, id="half", layer=replace(LAYER, dtype="float16"))
CASES = (WINDOW, CASE, WIDE, HALF)
WRONG = ProbeOutcome("failed", "wrong")
UNSEEN = ProbeOutcome("not examined", "hidden")
RAISED = StageError(Raised("forward", ValueError("no"), "no", ""))
ALL = len(probes_of(LAYER, CASE.cache))


class Always(SDPABackend):
    """Declares ``ALWAYS`` of every layer. No probe is really run here."""

    level_of = staticmethod(lambda spec: ALWAYS)

    @classmethod
    def get_builder_cls(cls):
        declared = classmethod(lambda _builder, _config, spec: cls.level_of(spec))
        return type("Builder", (SDPABuilder,), {"get_cudagraph_support": declared})


class Uniform(Always):
    level_of = staticmethod(lambda spec: UNIFORM)


class ByWindow(Always):
    level_of = staticmethod(lambda spec: SINGLE if spec.sliding_window else ALWAYS)


def declining(reason_of):
    """A backend for which ``reason_of(layer, batch)`` tells whether it declines a batch."""

    def unsupported_reasons(cls, layer, cache, batch):
        return ["declined"] if reason_of(layer, batch) else []

    return type("Declining", (Always,), {"unsupported_reasons": classmethod(unsupported_reasons)})


@pytest.fixture
def run_as(monkeypatch):
    """``run_as(outcome)``: probes come out as ``outcome(case, probe)``; returns the list of all that are run."""

    def replaced(outcome):
        made = []

        def run_probe(probed, probe, **keywords):
            case = probed.problems.case(probe, probe.steps[0])
            made.append((case.layer, probe.name, len(probe.steps)))
            found = outcome(case, probe)
            if isinstance(found, Exception):
                raise found
            return found or ProbeOutcome("passed")

        monkeypatch.setattr(check_module, "run_probe", run_probe)
        return made

    return replaced


def examined(backend, *examined_cases, cases=CASES):
    check = GraphLevelCheck(0, torch.device("cpu"))

    def finding(case):
        try:
            return check.examine(backend, case, lambda: cases)
        except StageError as failure:
            return failure.raised

    return {case.id: finding(case) for case in examined_cases}


def passes(case, probe):
    return None


def mixed_is_wrong(case, probe):
    return WRONG if probe.level is ALWAYS else None


FULL = ("ALWAYS", ALL, "")
SHARE = ALL - sum(len(each) - 1 for each in ALIKE)
USUAL = {"plain": FULL, "window": ("ALWAYS", SHARE, "made/plain"), "half": ("ALWAYS", SHARE, "made/plain")}
USUAL |= {"wide": ("ALWAYS", 1, "made/plain")}


@pytest.mark.parametrize(
    ("backend", "outcome", "expected", "broken"),
    [
        pytest.param(Always, passes, USUAL, set(), id="every trait meets every probe"),
        pytest.param(
            Always,
            lambda case, probe: WRONG if case.layer.sliding_window and probe.name == "drafting" else None,
            USUAL | {"window": ("NEVER", ALL, "")},
            {"window"},
            id="a fault of one trait is found on its layer, where every probe then runs",
        ),
        pytest.param(
            Always,
            lambda case, probe: WRONG if probe.level is ALWAYS and case.layer != WIDE.layer else None,
            {"wide": FULL},
            {"plain", "window", "half"},
            id="a layer that can do more than the plainest runs every probe",
        ),
        pytest.param(
            Uniform,
            lambda case, probe: WRONG if probe.level is ALWAYS or case.layer == WIDE.layer else None,
            {"wide": ("NEVER", ALL, "")},
            {"wide"},
            id="a layer that breaks below what broke on the plainest runs every probe",
        ),
        pytest.param(
            ByWindow,
            passes,
            {"plain": FULL, "window": FULL, "half": ("ALWAYS", SHARE, "made/plain")},
            set(),
            id="layers of another declared level share among themselves",
        ),
        pytest.param(
            declining(lambda layer, batch: layer.head_size == 32 and batch.path.name == "spec_decode"),
            passes,
            USUAL | {"wide": FULL},
            set(),
            id="declined batches are found without a run",
        ),
        pytest.param(
            Always,
            lambda case, probe: RAISED if case.layer == LAYER else None,
            {"window": FULL, "half": FULL, "wide": FULL},
            set(),
            id="if the plainest layer breaks without a graph, every probe runs on each",
        ),
    ],
)
def test_layers_share_probes(run_as, backend, outcome, expected, broken):
    run_as(outcome)
    found = examined(backend, *CASES)
    levels = {name: finding.graph for name, finding in found.items() if not isinstance(finding, Raised)}
    measured = {name: (graph.measured, len(graph.probes), graph.played_in_full) for name, graph in levels.items()}
    assert {name: measured[name] for name in expected} == expected
    assert {name for name, finding in found.items() if isinstance(finding, Broken)} == broken
    for case in CASES:  # whichever comes first
        assert examined(backend, case) == {case.id: found[case.id]}


@pytest.mark.parametrize(
    ("backend", "outcome", "num_steps"),
    [
        (Always, mixed_is_wrong, {(16, 4), (16, 1), (32, 1)}),
        (Uniform, mixed_is_wrong, {(16, 4)}),  # above the declared level it runs on the plainest layer alone
        (
            Always,
            lambda case, probe: WRONG if probe.name == "mixed" and len(probe.steps) > 1 else None,
            {(16, 4), (16, 1), (32, 1), (32, 4)},
        ),
    ],
)
def test_what_broke_runs_on_every_layer_on_its_smallest_batch(run_as, backend, outcome, num_steps):
    made = run_as(outcome)
    found = examined(backend, *CASES)
    assert {finding.graph.measured for finding in found.values()} == {"UNIFORM_BATCH"}
    assert {(layer.head_size, steps) for layer, name, steps in made if name == "mixed"} == num_steps
    if backend is Always:
        assert all(found[name].graph.probes[-1].name == "mixed" for name in ("window", "half", "wide"))


def test_never_takes_one_probe_a_layer_and_what_cannot_be_seen_is_looked_at_on_each(run_as):
    made = run_as(lambda case, probe: WRONG)
    assert {finding.graph.measured for finding in examined(Always, *CASES).values()} == {"NEVER"}
    assert len(made) == len(CASES)
    run_as(lambda case, probe: UNSEEN if probe.name == "decode" else None)
    assert all(isinstance(finding, NotExamined) for finding in examined(Always, *CASES).values())


def test_cases_that_the_backend_does_not_serve_take_no_part(run_as):
    run_as(passes)
    assert len(examined(Always, WIDE, cases=(WIDE,))["wide"].graph.probes) == ALL  # a case alone
    declines_plain = declining(lambda layer, batch: layer == LAYER)
    assert examined(declines_plain, HALF)["half"].graph.played_in_full == "made/wide"


def test_claims_are_examined_on_the_layer_on_which_every_probe_runs(run_as):
    class Claims(Always):
        @classmethod
        def get_builder_cls(cls):
            return type("Builder", (super().get_builder_cls(),), {"supports_update_block_table": True})

    run_as(lambda case, probe: WRONG if probe.claim else None)
    found = examined(Claims, *CASES)
    assert {name for name, finding in found.items() if finding.graph.claims} == {"plain"}
    assert {name for name, finding in found.items() if isinstance(finding, Broken)} == {"plain"}


CATALOGUE = yaml.safe_load(Path(graphs_layers.__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
ENTRIES = [entry for entry in CATALOGUE if "case" not in entry]
MLA = MLASpec(kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
LATENT = LayerSpec(num_heads=2, num_kv_heads=1, head_size=24, dtype="float32", mla=MLA)


def layer_case(name, layer=LAYER, **cache):
    return make_case((3, 9), name=name, layer=layer, cache={"block_size": 4} | cache)


KINDS = (
    layer_case("plain"),
    layer_case("half", replace(LAYER, dtype="float16")),
    layer_case("window in half", replace(LAYER, sliding_window=40, dtype="float16")),
    layer_case("alibi", replace(LAYER, alibi=True)),
    layer_case("sinks", replace(LAYER, sinks=True)),
    layer_case("sinks in half", replace(LAYER, sinks=True, dtype="float16")),
    layer_case("cap", replace(LAYER, logits_soft_cap=5.0)),
    layer_case("cap in HND", replace(LAYER, logits_soft_cap=5.0), layout="HND"),
    layer_case("codes", kv_cache_dtype="fp8", k_scale=0.5, v_scale=0.25),
    layer_case("shared cache", replace(LAYER, kv_sharing=True)),
    layer_case("latent", LATENT),
    layer_case("latent in half", replace(LATENT, dtype="float16")),
)

FAILING = {
    "SinksInHalf": ("plain", "half", "sinks", "sinks in half"),
    "LongUnderACapInHND": ("plain", "cap", "cap in HND"),
    "CodesInOneSplit": ("plain", "codes"),
    "SharedCacheOfTheCapture": ("plain", "shared cache"),
    "LatentSplits": ("latent",),
}
"""Layers by mutant; only the last one fails. ``test_caught.py`` has the mutants with a case of a suite."""


def examined_layer(name, *layers):
    check, cases = GraphLevelCheck(0, torch.device("cpu")), [case for case in KINDS if case.id in layers]
    return [check.examine(getattr(graphs_layers, name), case, lambda: cases) for case in cases]


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("GraphPaged", ("plain", "window in half", "cap in HND", "alibi", "codes", "shared cache")),
        ("GraphLatent", ("latent", "latent in half")),
    ],
)
def test_the_right_ones_have_their_level_on_every_layer(name, layers):
    findings = examined_layer(name, *layers)
    assert all(isinstance(finding, Holds) for finding in findings), findings
    assert {finding.graph.measured for finding in findings} == {"UNIFORM_BATCH"}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["class"])  # each has its layers in FAILING
def test_a_fault_is_found_on_the_layer_that_has_its_traits_and_reported_with_its_cause(entry):
    *others, broken = examined_layer(entry["class"], *FAILING[entry["class"]])
    assert all(isinstance(finding, Holds) for finding in others), others
    assert isinstance(broken, Broken), broken
    assert re.search(entry["cause"], f"{broken.summary}; {broken.meaning}"), broken
