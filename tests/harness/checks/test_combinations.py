"""Layers and paths in combinations that are in no suite: a right backend passes each."""

from dataclasses import replace

import pytest
from inline_snapshot import snapshot

from attncheck.backends.candidates.reference import ReferenceBackend
from attncheck.backends.candidates.reference_mla import ReferenceMLABackend
from attncheck.backends.registry import load
from attncheck.errors import BlindCaseError
from attncheck.harness.problem.sizes import needed_bytes
from attncheck.harness.run.evaluate import Examiner, RunPlan
from attncheck.reference.spec import MLASpec, OutputQuantSpec
from attncheck.reference.step_spec import DCPOptions, RequestSpec, SplitKVOptions

CHECKS = ("numerics", "lse", "cache_write", "refusals")


def outcomes(case, backend="reference", **members):
    """Outcome by check; raises what the case itself is at fault for."""
    loaded = load(backend)
    loaded = replace(loaded, backend=type("Tried", (loaded.backend,), members))
    examiner = Examiner(RunPlan(cases=(case,), backends=(loaded,), checks=CHECKS))
    records = list(examiner.run())
    if examiner.blind:
        raise examiner.blind[0]
    return {record.check: record.outcome for record in records}


@pytest.mark.parametrize(
    ("path", "options"),
    [("split_kv", SplitKVOptions(parts=2)), ("dcp", DCPOptions(size=2, interleave=2)), ("cascade", None)],
)
def test_parts_of_a_cache_that_another_layer_fills(path, options, make_case):
    batch = [RequestSpec(query_len=n, seq_len=n + 40, shared_prefix=16 * (path == "cascade")) for n in (1, 3)]
    case = make_case(*batch, kv_sharing=True, padding=(1, 2), path=path, options=options)
    assert outcomes(case) == dict.fromkeys(CHECKS, "passed")


def test_chunks_that_are_no_whole_pages_are_refused_by_backends_that_take_chunks(make_case):
    case = make_case((3, 40), (1, 33), attn_chunk_size=24, path="local")
    assert outcomes(case)["numerics"] == "passed"
    seen = outcomes(case, "torch_sdpa")
    assert (seen["numerics"], seen["refusals"]) == ("unsupported", "passed")


@pytest.mark.parametrize("modifier", [{"sliding_window": 24}, {"alibi": True}, {"attn_chunk_size": 32}])
def test_a_prefix_has_no_positions_of_queries(modifier, make_case):
    case = make_case(RequestSpec(query_len=9, seq_len=73, shared_prefix=32, count=2), **modifier, path="cascade")
    assert set(outcomes(case).values()) == {"passed"}
    without_lse = ReferenceBackend.features - {"cascade", "lse"}
    assert set(outcomes(case, features=without_lse).values()) == {"unsupported"}


def test_needed_memory_includes_every_rank_part_code_and_projection(make_case):
    far = {"first_block": 1000}
    alone = needed_bytes(make_case((1, 500), cache=far))
    assert needed_bytes(make_case((1, 500), cache=far, path="dcp", options=DCPOptions(size=7))) > 7 * alone
    assert needed_bytes(make_case((1, 500), cache=far | {"kv_cache_dtype": "fp8"})) - alone == 4 * 500 * 2 * 128 * 8
    parts = make_case((500, 900), path="split_kv", options=SplitKVOptions(parts=100))
    assert needed_bytes(parts) > 10 * needed_bytes(make_case((500, 900)))
    mla = MLASpec(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    latent = make_case((1, 2), num_heads=128, num_kv_heads=1, head_size=576, mla=mla, path="mla")
    assert needed_bytes(latent) > 2 * 8 * 512 * 128 * 256


def test_functions_of_a_latent_backend_are_not_examined_on_latent_layers(make_case):
    merge, attention = make_case(path="merge"), make_case()
    assert ReferenceMLABackend.unsupported_reasons(merge.layer, merge.cache, merge.batch) == []
    assert ReferenceMLABackend.unsupported_reasons(attention.layer, attention.cache, attention.batch) != []


def test_a_case_that_cannot_show_an_error_is_no_question(make_case):
    mla = MLASpec(kv_lora_rank=3, qk_nope_head_dim=16, qk_rope_head_dim=1, v_head_dim=24)
    layer = {"num_kv_heads": 1, "head_size": 4, "dtype": "float16", "scale": 0.001, "mla": mla}
    with pytest.raises(BlindCaseError) as refused:
        outcomes(make_case((6, 46), path="mla", **layer), "reference_mla")
    assert str(refused.value) == snapshot(
        "case made/case: blind to any error: what a good kernel keeps in float16 overflows; raise layer.scale, which makes the queries smaller, or change layer.dtype"
    )
    for scale in (1e-9, 1e9):
        with pytest.raises(BlindCaseError) as refused:
            outcomes(make_case(output_quant=OutputQuantSpec(scale=scale)))
        assert str(refused.value) == snapshot(
            "case made/case: blind to output_quant: an answer twice as large has the same codes; give a scale that leaves outputs between the smallest code and the largest"
        )
