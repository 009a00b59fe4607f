"""The probes of a level: their steps, the problems of these, and what a capture gets and leaves."""

import gc
import weakref
from collections.abc import Mapping
from dataclasses import fields, make_dataclass, replace
from itertools import combinations, count, product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_cases import make_case

from attncheck.cases.loader import load_suite
from attncheck.harness.checks.cudagraph.capture import allocate_inputs, dummy_call, parts_of
from attncheck.harness.checks.cudagraph.capture import trace as trace_parts
from attncheck.harness.checks.cudagraph.probes import (
    ALWAYS,
    PAIRED,
    SINGLE,
    UNIFORM,
    Bucket,
    assign_probes,
    probes_of,
    traits_of,
)
from attncheck.harness.checks.cudagraph.replay import ProbeProblems
from attncheck.harness.driver.step import forward_calls_of, make_step
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.truth.truth import truth_of
from attncheck.reference.spec import AttentionCGSupport, LayerSpec, MLASpec, OutputQuantSpec
from attncheck.reference.step_spec import BatchSpec, CacheSpec, RequestSpec

PLAIN = LayerSpec(num_heads=2, num_kv_heads=1, head_size=16)

layers = st.sampled_from(
    [
        PLAIN,
        LayerSpec(num_heads=2, num_kv_heads=1, head_size=16, sliding_window=33),
        LayerSpec(num_heads=2, num_kv_heads=1, head_size=16, attn_chunk_size=48),
    ]
)
caches = st.sampled_from([1, 8, 16, 24, 128]).map(lambda size: CacheSpec(block_size=size))


@given(layers, caches)
def test_probes_are_in_order_and_every_step_fits_its_graph_and_is_of_its_level(layer, cache):
    probes = probes_of(layer, cache)
    values = [probe.level.value for probe in probes]
    assert values == sorted(values)
    assert {probe.level for probe in probes} == set(AttentionCGSupport) - {AttentionCGSupport.NEVER}
    assert len({probe.name for probe in probes}) == len(probes)
    assert {probe.level for probe in probes if probe.name in PAIRED} == {SINGLE, UNIFORM, ALWAYS}
    for probe in probes:
        sizes = [bucket.num_tokens for bucket in probe.buckets]
        assert sizes == sorted(sizes, reverse=True)
        for step in probe.steps:
            assert all(1 <= query_len <= seq_len for query_len, seq_len in step.requests)
            if step.bucket is None:
                continue
            bucket = probe.buckets[step.bucket]
            query_lens = [query_len for query_len, _ in step.requests]
            assert len(query_lens) <= bucket.num_reqs
            assert sum(query_lens) <= bucket.num_tokens
            if probe.level is SINGLE:
                assert set(query_lens) == {1} == {bucket.query_len}
            if probe.level is UNIFORM:
                assert set(query_lens) == {bucket.query_len}
                assert bucket.query_len in {1, 1 + probe.drafts}


def steps(level, layer=PLAIN, block_size=16):
    return [
        (probe, step)
        for probe in probes_of(layer, CacheSpec(block_size=block_size))
        if probe.level is level
        for step in probe.steps
    ]


@pytest.mark.parametrize("level", [SINGLE, UNIFORM, ALWAYS])
def test_every_level_has_every_kind_of_step(level):
    own = steps(level)
    assert any(step.bucket is None for _, step in own)
    assert any(len(probe.buckets) > 1 for probe, _ in own)
    assert any(probe.dummy_lens == "longest" for probe, _ in own)
    replayed = [(probe, step) for probe, step in own if step.bucket is not None]
    padded = [step for probe, step in replayed if len(step.requests) < probe.buckets[step.bucket].num_reqs]
    assert {len(step.requests) % 2 for step in padded} == {0, 1}
    from_short = [step for probe, step in replayed if probe.dummy_lens == "shortest"]
    assert max(seq_len for step in from_short for _, seq_len in step.requests) > 512
    window = replace(PLAIN, sliding_window=100)
    if level is not ALWAYS:  # a graph of many requests replays a batch nearly as large
        assert max(len(step.requests) for probe, step in replayed if probe.buckets[step.bucket].num_reqs > 32) > 32
    lens = [seq_len for _, step in steps(level, window) for _, seq_len in step.requests]
    assert min(lens) <= 100 < max(lens)


LAYER = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16)
CACHE = CacheSpec()


TRAITS = {
    "dtype": "float16",
    "head_size_v": 8,
    "causal": False,
    "sliding_window": 5,
    "logits_soft_cap": 9.0,
    "alibi": True,
    "sinks": True,
    "sinks_dtype": "float32",
    "attn_chunk_size": 8,
    "rswa_window": 5,
    "index_topk": 5,
    "kv_sharing": True,
    "output_quant": OutputQuantSpec(scale=1.0),
    "query_quant": True,
    "block_size": 32,
    "layout": "HND",
    "pool_order": "BL",
    "kv_cache_dtype": "fp8",
    "k_scale": (1.0, 2.0),
    "v_scale": (1.0, 2.0),
    "q_scale": (1.0, 2.0),
}
"""Fields of a layer or a cache that are traits, with a value that is another than the default."""

NO_TRAITS = {"num_heads": 8, "num_kv_heads": 4, "head_size": 32, "scale": 0.5, "num_blocks": 99, "first_block": 3}
NO_TRAITS |= {"manager_block_size": 64}


def traits_with(layer=LAYER, **fields_of_the_cache):
    return traits_of(layer, replace(CACHE, **fields_of_the_cache))


def test_fields_that_decide_which_code_runs_are_traits_and_numbers_are_none():
    of_layers = {field.name for field in fields(LayerSpec)}
    for name, value in (TRAITS | NO_TRAITS).items():
        own = {name: value}
        found = traits_with(replace(LAYER, **own)) if name in of_layers else traits_with(**own)
        assert (found != traits_with()) is (name in TRAITS), name
    known = {*TRAITS, *NO_TRAITS, "mla", "attn_type"}  # graphs are captured for decoder layers alone
    assert known == of_layers | {field.name for field in fields(CacheSpec)}


def test_latent_layers_have_a_trait_and_a_window_of_both_sides_is_another_than_one_of_the_left():
    mla = MLASpec(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16)
    latent = LayerSpec(num_heads=4, num_kv_heads=1, head_size=48, mla=mla)
    assert traits_with(latent) - traits_with(replace(latent, mla=None)) == {("mla", True)}
    left, both = (traits_with(replace(LAYER, sliding_window=5, causal=causal)) for causal in (True, False))
    assert {("sliding_window", "left"), ("sliding_window", "both sides")} <= left ^ both


def traits(*words):
    return [frozenset((letter, True) for letter in word) for word in words]


@pytest.mark.parametrize(
    ("layers", "probes", "paired", "expected"),
    [
        (("p", "pa", "pa", "pa"), "123456", "", ("123456", "14", "25", "36")),  # layers with equal traits share evenly
        (("p", "pa", "pab"), "123", "", ("123", "1", "123")),  # one layer covers what two would
        (("p", "p", "p", "p"), "123", "13", ("123", "1", "3", "1")),  # layers that no probe needs
        (("p", "pa", "pb", "pab"), "12", "", ("12", "1", "2", "12")),
        (("p", "pa", "pb", "pab"), "12", "2", ("12", "2", "2", "12")),  # a pair that no layer has alone
        (("p", "pa"), "", "", ("", "")),
    ],
)
def test_layers_share_probes_as_evenly_as_their_traits_allow(layers, probes, paired, expected):
    assert assign_probes(traits(*layers), list(probes), list(paired)) == tuple(map(frozenset, expected))


@pytest.mark.parametrize(
    "layers", ["p pa pb pab p pc", "pa pb pc", "p", "p p p p p", "p pa pb pab pac", "pa pab pabc pc pbc"]
)
def test_every_trait_meets_every_probe_and_every_pair_the_paired_one(layers):
    layers = traits(*layers.split())
    probes = [f"probe {number}" for number in range(7)]
    assigned = assign_probes(layers, probes, ["probe 1"])
    met = {(trait, probe) for own, names in zip(layers, assigned, strict=True) for trait, probe in product(own, names)}
    assert met == set(product(frozenset().union(*layers), probes))
    assert all(assigned)
    playing = [own for own, names in zip(layers, assigned, strict=True) if "probe 1" in names]
    pairs_of_all, pairs_met = (
        {pair for own in some for pair in combinations(sorted(own), 2)} for some in (layers, playing)
    )
    assert pairs_met == pairs_of_all


CPU = torch.device("cpu")
IDS = {"smoke": ["mixed.HND", "alibi", "window-extend", "fp8-cache-per-head", "shared-cache"], "mla": []}
NUM_STEPS = 6


def probed_layers():
    cases = [case for name, ids in IDS.items() for case in load_suite(name).cases if case.id in ids or not ids]
    mla = [case for case in cases if case.layer.mla is not None][:1]
    one_token = BatchSpec(requests=(RequestSpec(query_len=1),))
    plain = [case for case in cases if case.suite == "smoke"]
    return [*(replace(case, batch=one_token) for case in plain), *mla]


@pytest.fixture(params=probed_layers(), ids=lambda case: case.id, scope="module")
def first_steps(request):
    """The problems of a layer, and the cases of the first first_steps of its probes."""
    questions = ProbeProblems(replace(request.param, cache=replace(request.param.cache, num_blocks=None)), 3, CPU)
    questions.compute_together(questions.probes[:4])
    cases = [questions.case(probe, step) for probe in questions.probes[:4] for step in probe.steps]
    return questions, list(dict.fromkeys(cases))[:NUM_STEPS]


def test_a_step_has_the_truth_of_its_own_rows_and_keys_in_pages_of_its_own(first_steps):
    questions, cases = first_steps
    for case in cases:
        problem = questions.problem(case)
        shared, alone = questions.truth(case), truth_of(problem, CPU, refuse_blindness=False)
        assert torch.allclose(shared.out, alone.out, rtol=1e-12, atol=1e-12)
        assert torch.allclose(shared.lse, alone.lse, rtol=1e-12, atol=1e-12)
        for name in ("norm", "peak", "lse"):
            assert torch.allclose(getattr(shared.budget, name), getattr(alone.budget, name), rtol=1e-6)
        assert shared.rows.num_keys.tolist() == [request.num_keys for request in problem.requests]
        owned = [page for request in problem.requests for page in request.pages]
        assert len(set(owned)) == len(owned) == sum(-(-r.num_keys // case.cache.block_size) for r in problem.requests)
        assert problem.num_blocks == case.cache.num_blocks
        assert len(problem.query) == case.batch.num_tokens
        assert problem.block_table.shape[0] == case.batch.num_requests
    first, second = (questions.problem(case) for case in cases[:2])
    assert not torch.equal(first.query[:1], second.query[:1])


def test_one_step_alone_is_computed_as_it_is():
    questions, alone = (ProbeProblems(probed_layers()[0], 0, CPU) for _ in range(2))
    probe = next(probe for probe in questions.probes if len(probe.steps) == 1)
    questions.compute_together([probe])
    case = questions.case(probe, probe.steps[0])
    assert torch.equal(questions.problem(case).query, alone.problem(case).query)


CAPTURED = LayerSpec(num_heads=2, num_kv_heads=1, head_size=16, dtype="float32")


def problem_of(lengths, padding=(0, 0), layer=CAPTURED):
    case = make_case(*lengths, layer=layer, padding=padding, cache={"block_size": 4, "num_blocks": 40})
    return build_problem(case, 0)


def call_of(problem):
    (call,) = forward_calls_of(make_step(problem, CPU), frozenset())
    return call


def buffers_for(problem, max_model_len=32):
    return allocate_inputs(problem, num_reqs=4, num_tokens=8, max_model_len=max_model_len, device=CPU)


def dummy_of(problem, bucket, *, longest=False):
    return buffers_for(problem).load(dummy_call(problem, bucket, 32, longest=longest))


def test_a_later_step_has_other_values_at_the_same_addresses():
    first, second = problem_of([(1, 9), (1, 4), (1, 5)]), problem_of([(1, 2), (1, 13), (1, 6)])
    inputs = buffers_for(first)
    earlier = inputs.load(call_of(first))
    assert earlier.common.seq_lens.tolist() == [9, 4, 5]
    later = inputs.load(call_of(second))
    assert later.common.seq_lens.tolist() == later.common.seq_lens_cpu.tolist() == [2, 13, 6]
    for name in ("query_start_loc", "seq_lens", "seq_lens_cpu", "block_table_tensor", "slot_mapping"):
        assert getattr(earlier.common, name).data_ptr() == getattr(later.common, name).data_ptr()
    assert (earlier.query.data_ptr(), earlier.key.data_ptr()) == (later.query.data_ptr(), later.key.data_ptr())
    torch.testing.assert_close(later.query, call_of(second).query)
    on_host = {twin.untyped_storage().data_ptr() for twin in inputs.host_twins}
    assert later.common.seq_lens_cpu.untyped_storage().data_ptr() in on_host
    assert later.common.seq_lens.untyped_storage().data_ptr() not in on_host


def test_padding_is_an_engine_s_and_table_entries_behind_a_request_name_pages_it_does_not_own():
    problem = problem_of([(1, 9), (1, 4)], padding=(2, 2))
    call = buffers_for(problem, max_model_len=48).load(call_of(problem))
    common = call.common
    assert common.query_start_loc.tolist() == [0, 1, 2, 2, 2]
    assert common.seq_lens.tolist() == [9, 4, 0, 0]
    assert common.slot_mapping[2:].tolist() == [-1, -1]
    assert all(bool(torch.isnan(rows[2:]).all()) for rows in (call.query, call.key))
    for row, request in zip(common.block_table_tensor.tolist(), problem.requests, strict=False):
        assert tuple(row[: len(request.pages)]) == request.pages
        assert not set(row[len(request.pages) :]) & set(request.pages)
    assert not bool(common.block_table_tensor[2:].any())


@pytest.mark.parametrize(
    ("bucket", "longest", "starts", "lens", "max_query_len"),
    [
        (Bucket(3, 7, None), False, [0, 2, 4, 7], [2, 2, 3], 7),
        (Bucket(3, 7, None), True, [0, 2, 4, 7], [32, 32, 32], 7),
        (Bucket(2, 6, 3), False, [0, 3, 6], [3, 3], 3),  # a uniform graph gets its query length
    ],
)
def test_dummies_are_nan_and_write_nowhere(bucket, longest, starts, lens, max_query_len):
    problem = problem_of([(1, 9), (1, 4), (1, 5)])
    call = dummy_of(problem, bucket, longest=longest)
    common = call.common
    assert common.seq_lens.tolist() == common.seq_lens_cpu.tolist() == lens
    assert common.query_start_loc.tolist() == starts
    assert (common.max_query_len, common.max_seq_len) == (max_query_len, 32)
    assert common.slot_mapping.tolist() == [-1] * starts[-1]
    assert not bool(common.block_table_tensor.any())
    assert all(bool(torch.isnan(rows).all()) for rows in (call.query, call.key, call.value))


def test_a_layer_that_shares_another_s_cache_is_handed_no_keys():
    problem = problem_of([(1, 9)], layer=replace(CAPTURED, kv_sharing=True))
    for call in (buffers_for(problem).load(call_of(problem)), dummy_of(problem, Bucket(1, 1, 1))):
        assert (call.key, call.value) == (None, None)


def trace(metadata):
    return trace_parts(parts_of(metadata))


def test_tensors_in_new_memory_and_of_another_shape_are_distinguished_from_those_refilled_in_place():
    buffer = torch.arange(4)

    def metadata(lens=buffer, **others):
        return SimpleNamespace(lens=lens, parts={"decode": [buffer[:2], buffer.clone()]}, **others)

    held = metadata(plan=torch.zeros(2))  # so that no later tensor has its addresses
    first = trace(held)
    buffer.add_(1)
    assert first.moved(trace(metadata())) == ["metadata.parts['decode'][1]", "metadata.plan"]  # moved, and gone
    assert first.reshaped(trace(metadata())) == first.changed(trace(metadata())) == []
    assert first.reshaped(trace(metadata(buffer[:3]))) == ["metadata.lens"]
    assert first.reshaped(trace(metadata(buffer.clone()))) == []
    memory = buffer.untyped_storage()
    start, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes()
    assert first.path_of(start, end) == "metadata.lens"
    assert trace(SimpleNamespace(lens=torch.arange(4))).path_of(start, end) is None


def test_numbers_of_the_backend_s_own_come_first_and_of_a_sequence_only_one():
    def metadata(longest, plan, bound):
        return SimpleNamespace(common=SimpleNamespace(max_seq_len=bound), plan=plan, longest=longest)

    first = trace(metadata(3, [1, 2, 3], 80))
    assert [text.partition(" was ")[0] for text in first.changed(trace(metadata(8, [1, 5, 6], 9)))] == [
        "metadata.plan[1]",
        "metadata.longest",
        "metadata.common.max_seq_len",
    ]
    assert trace(SimpleNamespace(size=7, kept=3)).changed(trace(SimpleNamespace(kept=8))) == [
        "metadata.size was 7 at capture and is gone now",
        "metadata.kept was 3 at capture and is 8 now",
    ]


def test_a_trace_keeps_no_tensor_alive():
    tensor = torch.zeros(3)
    gone = weakref.ref(tensor)
    kept = trace(SimpleNamespace(plan=tensor))
    del tensor
    gc.collect()
    assert gone() is None
    assert list(kept.places) == ["metadata.plan"]


class Closed:
    """Cannot be looked into."""

    def __getattribute__(self, name):
        raise ValueError(name)


class Endless(Mapping):
    """Numbers without end."""

    def __getitem__(self, key):
        return key

    def __len__(self):
        return 1

    def __iter__(self):
        return count()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_is_odd_is_followed_as_far_as_it_goes_and_a_trace_has_an_end():
    slotted = make_dataclass("Slotted", [("table", torch.Tensor), ("itself", object)], slots=True)
    metadata = slotted(torch.zeros(2), None)
    metadata.itself = metadata
    assert parts_of(metadata) == {"metadata.table": metadata.table}
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    closed = trace(SimpleNamespace(closed=Closed(), nested=nested, number=7))
    assert (closed.numbers, closed.places) == ({"metadata.number": 7}, {})
    found = trace(SimpleNamespace(endless=Endless(), library=torch, number=7))
    assert found.numbers["metadata.number"] == 7
    assert len(found.numbers) < 2_000
    assert found.places == {}
    hundred = range(100)
    assert 1_000 < len(trace([[[number] * 100 for number in hundred] for _ in hundred]).numbers) <= 10_000
