"""Layers that share probes: what each plays, and when one plays them all."""

from dataclasses import replace

import pytest
import torch

from attncheck.backends.candidates.torch_sdpa import SDPABackend, SDPABuilder
from attncheck.cases.model import Case
from attncheck.harness.checks.cudagraph import check as check_module
from attncheck.harness.checks.cudagraph.check import GraphLevelCheck
from attncheck.harness.checks.cudagraph.probes import ALIKE, probes_of
from attncheck.harness.checks.cudagraph.replay import ProbeOutcome
from attncheck.harness.checks.findings import Broken, Holds, NotExamined
from attncheck.harness.driver.foreign_code import StageError
from attncheck.harness.driver.observation import Raised
from attncheck.reference.spec import AttentionCGSupport, BatchSpec, CacheSpec, LayerSpec, RequestSpec

SINGLE, UNIFORM, ALWAYS = (AttentionCGSupport(value) for value in (1, 2, 3))
LAYER = LayerSpec(num_heads=2, num_kv_heads=1, head_size=16, dtype="float32")
CASE = Case(
    suite="s",
    id="plain",
    layer=LAYER,
    cache=CacheSpec(block_size=4),
    batch=BatchSpec(requests=(RequestSpec(query_len=3, seq_len=9),)),
)
WIDE = replace(CASE, id="wide", layer=replace(LAYER, head_size=32))
WINDOW = replace(CASE, id="window", layer=replace(LAYER, sliding_window=3))
HALF = replace(CASE, id="half", layer=replace(LAYER, dtype="float16"))
CASES = (WINDOW, CASE, WIDE, HALF)
WRONG = ProbeOutcome("failed", "wrong")
UNSEEN = ProbeOutcome("not examined", "hidden")
ALL = len(probes_of(LAYER, CASE.cache))


class Always(SDPABackend):
    """Declares ``ALWAYS`` of every layer; never run here."""

    level = ALWAYS

    @classmethod
    def get_builder_cls(cls):
        level_of = cls.level_of

        class Builder(SDPABuilder):
            @classmethod
            def get_cudagraph_support(cls, vllm_config, kv_cache_spec):
                return level_of(kv_cache_spec)

        return Builder

    @classmethod
    def level_of(cls, spec):
        return cls.level


@pytest.fixture
def plays(monkeypatch):
    """``plays(outcome)``: replaces a play by ``outcome(case, probe)``, and returns the list of all plays."""

    def replaced(outcome=lambda case, probe: None):
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


def names(finding):
    return [probe.name for probe in finding.graph.probes]


def test_the_plainest_layer_plays_every_probe_and_the_others_a_share(plays):
    made = plays()
    found = examined(Always, *CASES)
    assert len(names(found["plain"])) == ALL
    shared = ALL - sum(len(each) - 1 for each in ALIKE)
    assert len(names(found["window"])) == len(names(found["half"])) == shared
    assert len(names(found["wide"])) == 1
    assert {found[name].graph.played_in_full for name in ("window", "wide", "half")} == {"s/plain"}
    assert found["plain"].graph.played_in_full == ""
    assert {finding.graph.measured for finding in found.values()} == {"ALWAYS"}
    assert len(made) == ALL + 2 * shared + 1


def test_claims_are_examined_on_the_layer_that_plays_every_probe(plays):
    class Claims(Always):
        @classmethod
        def get_builder_cls(cls):
            return type("Builder", (super().get_builder_cls(),), {"supports_update_block_table": True})

    plays(lambda case, probe: WRONG if probe.claim else None)
    found = examined(Claims, *CASES)
    assert {name for name, finding in found.items() if finding.graph.claims} == {"plain"}
    assert {name for name, finding in found.items() if isinstance(finding, Broken)} == {"plain"}


def test_a_case_alone_plays_every_probe(plays):
    plays()
    found = examined(Always, WIDE, cases=(WIDE,))
    assert len(names(found["wide"])) == ALL


def test_the_share_does_not_depend_on_which_case_comes_first(plays):
    plays()
    for case in CASES:
        alone = examined(Always, case)[case.id]
        assert alone == examined(Always, *CASES)[case.id] == examined(Always, *reversed(CASES))[case.id]


def test_a_fault_of_one_trait_is_found_on_its_layer_alone(plays):
    plays(lambda case, probe: WRONG if case.layer.sliding_window and probe.name == "drafting" else None)
    found = examined(Always, *CASES)
    assert isinstance(found["window"], Broken)
    assert found["window"].graph.measured == "NEVER"
    assert len(names(found["window"])) == ALL
    assert found["window"].graph.played_in_full == ""
    assert all(isinstance(found[name], Holds) for name in ("plain", "wide", "half"))


def test_what_broke_is_played_on_every_layer_on_its_smallest_batch(plays):
    made = plays(lambda case, probe: WRONG if probe.level is ALWAYS else None)
    found = examined(Always, *CASES)
    assert {finding.graph.measured for finding in found.values()} == {"UNIFORM_BATCH"}
    assert all(names(finding)[-1] == "mixed" for name, finding in found.items() if name != "plain")
    assert sorted((layer.head_size, steps) for layer, name, steps in made if name == "mixed") == [
        (16, 1),
        (16, 1),
        (16, 4),
        (32, 1),
    ]


def test_what_broke_above_the_declared_level_is_played_on_the_plainest_layer_alone(plays):
    class Uniform(Always):
        level = UNIFORM

    made = plays(lambda case, probe: WRONG if probe.level is ALWAYS else None)
    found = examined(Uniform, *CASES)
    assert {finding.graph.measured for finding in found.values()} == {"UNIFORM_BATCH"}
    assert all(isinstance(finding, Holds) for finding in found.values())
    assert len(names(found["wide"])) == 1
    assert [layer for layer, name, _ in made if name == "mixed"] == [CASE.layer]


def test_a_layer_that_breaks_below_what_broke_on_the_plainest_plays_every_probe(plays):
    class Uniform(Always):
        level = UNIFORM

    def outcome(case, probe):
        return WRONG if probe.level is ALWAYS or case.layer == WIDE.layer else None

    plays(outcome)
    found = examined(Uniform, *CASES)
    assert isinstance(found["wide"], Broken)
    assert found["wide"].graph.measured == "NEVER"
    assert found["wide"].graph.played_in_full == ""


def test_never_takes_one_probe_a_layer(plays):
    made = plays(lambda case, probe: WRONG)
    found = examined(Always, *CASES)
    assert {finding.graph.measured for finding in found.values()} == {"NEVER"}
    assert len(made) == len(CASES)


def test_a_layer_that_can_do_more_than_the_plainest_plays_every_probe(plays):
    plays(lambda case, probe: WRONG if probe.level is ALWAYS and case.layer != WIDE.layer else None)
    found = examined(Always, *CASES)
    assert found["wide"].graph.measured == "ALWAYS"
    assert len(names(found["wide"])) == ALL


def test_what_breaks_on_larger_batches_alone_is_played_as_a_whole(plays):
    plays(lambda case, probe: WRONG if probe.name == "mixed" and len(probe.steps) > 1 else None)
    found = examined(Always, *CASES)
    assert {finding.graph.measured for finding in found.values()} == {"UNIFORM_BATCH"}
    assert names(found["wide"])[-1] == "mixed"


def test_layers_of_another_declared_level_share_among_themselves(plays):
    class ByWindow(Always):
        @classmethod
        def level_of(cls, spec):
            return SINGLE if spec.sliding_window else ALWAYS

    plays()
    found = examined(ByWindow, *CASES)
    assert len(names(found["window"])) == ALL
    assert found["window"].graph.declared == "UNIFORM_SINGLE_TOKEN_DECODE"
    assert found["half"].graph.played_in_full == "s/plain"


def test_refused_batches_are_found_unplayed(plays):
    class NoWideDrafts(Always):
        @classmethod
        def unsupported_reasons(cls, layer, cache, batch):
            is_draft = batch.path.name == "spec_decode"
            return ["no drafts of wide heads"] if layer.head_size == 32 and is_draft else []

    plays()
    found = examined(NoWideDrafts, *CASES)
    assert len(names(found["wide"])) == ALL
    assert found["wide"].graph.played_in_full == ""
    assert found["half"].graph.played_in_full == "s/plain"


def test_cases_that_the_backend_does_not_serve_play_no_part(plays):
    class NoPlain(Always):
        @classmethod
        def unsupported_reasons(cls, layer, cache, batch):
            return ["plain"] if layer == LAYER else []

    plays()
    assert examined(NoPlain, HALF)["half"].graph.played_in_full == "s/wide"


def test_where_the_plainest_layer_breaks_without_a_graph_each_plays_every_probe(plays):
    raised = StageError(Raised("forward", ValueError("no"), "no", ""))
    plays(lambda case, probe: raised if case.layer == LAYER else None)
    found = examined(Always, *CASES)
    assert isinstance(found["plain"], Raised)
    assert {len(names(finding)) for name, finding in found.items() if name != "plain"} == {ALL}


def test_what_cannot_be_seen_on_the_plainest_layer_is_looked_at_on_each(plays):
    plays(lambda case, probe: UNSEEN if probe.name == "decode" else None)
    assert all(isinstance(finding, NotExamined) for finding in examined(Always, *CASES).values())
