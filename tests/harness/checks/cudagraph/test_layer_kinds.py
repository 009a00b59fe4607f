"""Faults of graphs that one kind of layer, or two traits of it, alone show are found, by their causes."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from attncheck.backends.mutants import graphs_layers
from attncheck.cases.model import Case
from attncheck.harness.checks.cudagraph.check import GraphLevelCheck
from attncheck.harness.checks.findings import Broken, Holds
from attncheck.reference.spec import BatchSpec, CacheSpec, LayerSpec, MLASpec, RequestSpec

CATALOGUE = yaml.safe_load(Path(graphs_layers.__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
ENTRIES = [entry for entry in CATALOGUE if "case" not in entry]
LAYER = LayerSpec(num_heads=2, num_kv_heads=1, head_size=16, dtype="float32")
MLA = MLASpec(kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
LATENT = LayerSpec(num_heads=2, num_kv_heads=1, head_size=24, dtype="float32", mla=MLA)
CACHE = CacheSpec(block_size=4)


def layer_case(name, layer=LAYER, **cache):
    batch = BatchSpec(requests=(RequestSpec(query_len=3, seq_len=9),))
    return Case(suite="s", id=name, layer=layer, cache=replace(CACHE, **cache), batch=batch)


CASES = (
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


def examined(name, *layers):
    check, cases = GraphLevelCheck(0, torch.device("cpu")), [case for case in CASES if case.id in layers]
    return [check.examine(getattr(graphs_layers, name), case, lambda: cases) for case in cases]


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("GraphPaged", ("plain", "window in half", "cap in HND", "alibi", "codes", "shared cache")),
        ("GraphLatent", ("latent", "latent in half")),
    ],
)
def test_the_right_ones_have_their_level_on_every_layer(name, layers):
    findings = examined(name, *layers)
    assert all(isinstance(finding, Holds) for finding in findings), findings
    assert {finding.graph.measured for finding in findings} == {"UNIFORM_BATCH"}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["class"])  # each has its layers in FAILING
def test_a_fault_is_found_on_the_layer_that_has_its_traits_and_reported_with_its_cause(entry):
    *others, broken = examined(entry["class"], *FAILING[entry["class"]])
    assert all(isinstance(finding, Holds) for finding in others), others
    assert isinstance(broken, Broken), broken
    assert re.search(entry["cause"], f"{broken.summary}; {broken.meaning}"), broken
