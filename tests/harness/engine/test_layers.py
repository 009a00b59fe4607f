"""Layers of many kinds are judged with what they compute: latent, FP8 and shared caches, modifiers, chunks."""

from dataclasses import replace

import pytest
import torch

from attncheck.backends.caches.codecs import Coding
from attncheck.harness.engine.events import KVGroup, LayerFacts, LayerRows, ScheduledRequest, StepPlan
from attncheck.harness.engine.findings import grouped
from attncheck.harness.engine.observer import EngineObserver
from attncheck.harness.problem.storage import UpProjections
from attncheck.reference import AttentionParams, Precision, varlen_attention

BLOCK, ROWS = 4, 11
DTYPE = torch.bfloat16
PLAIN = AttentionParams(4, 2, 16)
KERNEL = Precision.kernel(DTYPE)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DTYPE)


def attend(query, key, value, params):
    ends = torch.tensor([0, len(query)])
    return varlen_attention(query, key, value, ends, ends, params, precision=KERNEL)[0].to(DTYPE)


def observed(layers, *calls):
    """Return the result of one step of one request of 11 tokens; ``calls``: those of ``LayerRows``."""
    observer = EngineObserver()
    observer.engine_starts([KVGroup(BLOCK, tuple(layers))], layers)
    observer.request_added("r", list(range(ROWS)))
    observer.step_begins(StepPlan((ScheduledRequest("r", ((1, 2, 3),), 0, starts=True),), {"r": ROWS}))
    observer.inputs(["r"], torch.arange(ROWS), torch.arange(ROWS))
    for call in calls:
        observer.layer_rows(LayerRows(*call))
    observer.step_ends({"r": (5,)})
    result = observer.result()
    assert result.failure is None
    return result


MODIFIED = {
    "soft cap": AttentionParams(4, 2, 16, logits_soft_cap=3.0),
    "ALiBi": AttentionParams(4, 2, 16, alibi_slopes=(0.5, 0.25, 0.125, 0.0625)),
    "sinks": AttentionParams(4, 2, 16, sinks=(0.5, 2.0, -1.0, 3.0)),
    "other sinks": AttentionParams(4, 2, 16, sinks=(-0.5, 1.0, 1.0, 0.0)),
    "window": AttentionParams(4, 2, 16, window=(4, 0)),
    "chunks": AttentionParams(4, 2, 16, attn_chunk_size=4),
    "scale": AttentionParams(4, 2, 16, scale=0.7),
    "values of another size": AttentionParams(4, 2, 16, head_size_v=8),
}


def test_layers_with_modifiers_are_right_together_and_each_is_found_without_its_own():
    layers = {name: LayerFacts(params) for name, params in MODIFIED.items()}
    calls = {}
    for seed, (name, params) in enumerate(MODIFIED.items()):
        query, key = 2 * drawn(ROWS, 4, 16, seed=seed), drawn(ROWS, 2, 16, seed=seed + 20)
        value = drawn(ROWS, 2, params.value_head_size, seed=seed + 40)
        calls[name] = (name, query, key, value, attend(query, key, value, params))
    result = observed(layers, *calls.values())
    assert result.findings == ()
    assert result.checks["output"] == len(MODIFIED) * ROWS
    for name in set(MODIFIED) - {"values of another size"}:
        _, query, key, value, _ = calls[name]
        wrong = (name, query, key, value, attend(query, key, value, PLAIN))
        result = observed(layers, *(wrong if call[0] == name else call for call in calls.values()))
        assert {(finding.kind, finding.layer) for finding in result.findings} == {("output", name)}


def test_chunks_are_counted_from_the_first_key_of_the_request_though_a_window_hides_it():
    params = AttentionParams(4, 2, 16, window=(2, 0), attn_chunk_size=4)
    query, key, value = 2 * drawn(ROWS, 4, 16), drawn(ROWS, 2, 16, seed=1), drawn(ROWS, 2, 16, seed=2)
    output = attend(query, key, value, params)
    observer = EngineObserver()
    observer.engine_starts([KVGroup(BLOCK, ("own",))], {"own": LayerFacts(params)})
    observer.request_added("r", list(range(ROWS)))
    plans = [
        StepPlan((ScheduledRequest("r", ((1, 2, 3),), 0, starts=True),), {"r": 7}),
        StepPlan((ScheduledRequest("r", ((),), 7),), {"r": ROWS - 7}),  # the first row sees key 5 at the earliest
    ]
    for rows, plan in zip((slice(0, 7), slice(7, ROWS)), plans, strict=True):
        observer.step_begins(plan)
        observer.inputs(["r"], torch.arange(ROWS)[rows], torch.arange(ROWS)[rows])
        observer.layer_rows(LayerRows("own", query[rows], key[rows], value[rows], output[rows]))
        observer.step_ends({})
    result = observer.result()
    assert (result.findings, result.checks["output"]) == ((), ROWS)


def latent_layer(num_heads=4, rank=32, nope=16, rope=8, size=16):
    weights = UpProjections(drawn(rank, num_heads, nope, seed=1) / 4, drawn(rank, num_heads, size, seed=2) / 4)
    params = AttentionParams(num_heads, num_heads, nope + rope, size, scale=0.2)
    query = drawn(ROWS, num_heads, nope + rope, seed=3)
    kv_c, k_pe = drawn(ROWS, rank, seed=4), drawn(ROWS, 1, rope, seed=5)
    key = weights.keys(kv_c[:, None].double(), k_pe.double()).to(DTYPE)
    value = weights.values(kv_c[:, None].double()).to(DTYPE)
    return LayerFacts(params, up_projections=weights), query, kv_c, k_pe, key, value


@pytest.mark.parametrize("is_absorbed", [False, True])
def test_a_latent_layer_is_judged_in_both_forms(is_absorbed):
    facts, query, kv_c, k_pe, key, value = latent_layer()
    weights, params = facts.up_projections, facts.params
    if is_absorbed:
        nope = torch.einsum("thp,lhp->thl", query[..., :16], weights.w_uk)
        latent = torch.cat([kv_c, k_pe[:, 0]], dim=-1)[:, None]
        absorbed = AttentionParams(4, 1, 40, 32, scale=0.2)
        made = attend(torch.cat([nope, query[..., 16:]], dim=-1), latent, kv_c[:, None], absorbed)
        output = torch.einsum("thl,lhv->thv", made, weights.w_uv)
    else:
        output = attend(query, key, value, params)
    result = observed({"mla": facts}, ("mla", query, kv_c, k_pe, output.flatten(1)))
    assert result.findings == ()
    assert result.checks["output"] == ROWS


def test_a_wrong_reading_of_a_latent_cache_is_explained():
    facts, query, kv_c, k_pe, key, value = latent_layer()
    output = attend(query, key, value, facts.params)
    output[9] = attend(query[1:10], key[:9], value[:9], facts.params)[8]
    [finding] = observed({"mla": facts}, ("mla", query, kv_c, k_pe, output)).findings
    assert (finding.kind, finding.position, finding.num_rows) == ("output", 9, 1)
    assert finding.cause == "the row sees 1 key too few"


def test_no_cause_is_named_that_holds_for_one_of_two_wrong_rows():
    query, key, value = drawn(ROWS, 4, 16), drawn(ROWS, 2, 16, seed=1), drawn(ROWS, 2, 16, seed=2)
    output = attend(query, key, value, PLAIN)
    output[10] = attend(query[1:], key[:10], value[:10], PLAIN)[9]  # sees one key less than it must
    [finding] = observed({"own": LayerFacts(PLAIN)}, ("own", query, key, value, output)).findings
    assert (finding.num_rows, finding.cause) == (1, "the row sees 1 key too few")
    output[9] = attend(query[2:10], key[:8], value[:8], PLAIN)[7]  # sees two less
    [finding] = observed({"own": LayerFacts(PLAIN)}, ("own", query, key, value, output)).findings
    assert (finding.num_rows, finding.cause) == (2, None)


def test_a_missing_causal_mask_is_named_though_each_row_sees_other_keys_too_many():
    query, key, value = drawn(ROWS, 4, 16), drawn(ROWS, 2, 16, seed=1), drawn(ROWS, 2, 16, seed=2)
    output = attend(query, key, value, replace(PLAIN, causal=False))
    [finding] = observed({"own": LayerFacts(PLAIN)}, ("own", query, key, value, output)).findings
    assert finding.num_rows > 1
    assert finding.cause == "the row sees all keys of the step, as without a causal mask"


@pytest.mark.parametrize(("spoilt", "words"), [(torch.nan, "NaN"), (-torch.inf, "infinite")])
def test_an_output_that_is_not_finite_is_named(spoilt, words):
    query, key, value = drawn(ROWS, 4, 16), drawn(ROWS, 2, 16, seed=1), drawn(ROWS, 2, 16, seed=2)
    output = attend(query, key, value, PLAIN)
    output[7, 1, 3] = spoilt
    [finding] = observed({"own": LayerFacts(PLAIN)}, ("own", query, key, value, output)).findings
    assert (finding.position, finding.cause, finding.note) == (7, None, f"the output is {words}")
    [group] = grouped([finding])
    assert "the largest error is NaN or infinite" in group.lines(shown=None)[0]


def test_fp8_keys_are_judged_by_the_values_of_their_codes():
    coding = Coding(torch.float32, torch.float8_e4m3fn, 0.5, 0.25)
    query, key, value = 2 * drawn(ROWS, 4, 16), drawn(ROWS, 2, 16, seed=1), drawn(ROWS, 2, 16, seed=2)
    read = [each.to(DTYPE) for each in coding.decode(*coding.encode(key, value))]
    call = ("fp8", query, key, value, attend(query, *read, PLAIN))
    coded = LayerFacts(PLAIN, code=lambda k, v: coding.decode(*coding.encode(k, v)))
    assert observed({"fp8": coded}, call).findings == ()
    assert len(observed({"fp8": LayerFacts(PLAIN)}, call).findings) == 1


def test_a_layer_that_shares_keys_is_judged_by_those_of_its_target():
    query, key, value = drawn(ROWS, 4, 16), drawn(ROWS, 2, 16, seed=1), drawn(ROWS, 2, 16, seed=2)
    layers = {"own": LayerFacts(PLAIN), "shared": LayerFacts(PLAIN, kv_sharing_target="own")}
    other = drawn(ROWS, 4, 16, seed=3)
    calls = [
        ("own", query, key, value, attend(query, key, value, PLAIN)),
        ("shared", other, None, None, attend(other, key, value, PLAIN)),
    ]
    result = observed(layers, *calls)
    assert result.findings == ()
    assert result.checks["output"] == 2 * ROWS
    calls[1] = ("shared", other, None, None, attend(other, value, key, PLAIN))
    assert {finding.layer for finding in observed(layers, *calls).findings} == {"shared"}


def test_a_layer_that_shares_keys_is_judged_after_a_step_of_which_it_computed_a_part():
    query, key, value = drawn(ROWS, 4, 16), drawn(ROWS, 2, 16, seed=1), drawn(ROWS, 2, 16, seed=2)
    output = attend(query, key, value, PLAIN)
    observer = EngineObserver()
    layers = {"own": LayerFacts(PLAIN), "shared": LayerFacts(PLAIN, kv_sharing_target="own")}
    observer.engine_starts([KVGroup(BLOCK, tuple(layers))], layers)
    observer.request_added("r", list(range(ROWS)))
    for rows, starts in ((slice(0, 7), True), (slice(7, ROWS), False)):
        table = ((1, 2, 3),) if starts else ((),)
        plan = StepPlan((ScheduledRequest("r", table, rows.start, starts),), {"r": rows.stop - rows.start})
        observer.step_begins(plan)
        observer.inputs(["r"], torch.arange(ROWS)[rows], torch.arange(ROWS)[rows])
        observer.layer_rows(LayerRows("own", query[rows], key[rows], value[rows], output[rows]))
        part = slice(6, 7) if starts else rows
        observer.layer_rows(LayerRows("shared", query[part], None, None, output[part]))
        observer.step_ends({})
    result = observer.result()
    assert (result.findings, result.checks["output"]) == ((), ROWS + ROWS - 7)
    assert result.not_compared["output", "layers that compute a part of the rows"] == 7


def test_what_cannot_be_judged_is_counted_with_its_reason():
    query, key, value = drawn(ROWS, 4, 16), drawn(ROWS, 2, 16, seed=1), drawn(ROWS, 2, 16, seed=2)
    wrong = torch.zeros_like(query)
    result = observed(
        {
            "encoder": LayerFacts(PLAIN, not_judged="layers of the type encoder"),
            "short": LayerFacts(PLAIN),
            "infinite": LayerFacts(PLAIN),
        },
        ("encoder", query, key, value, wrong),
        ("short", query[:5], key[:5], value[:5], wrong[:5]),
        ("infinite", query, key.index_fill(0, torch.tensor([0]), float("inf")), value, wrong),
        ("drafter", query, key, value, wrong),
    )
    assert result.findings == ()
    assert result.checks.get("output", 0) == 0
    assert result.not_compared == {
        ("output", "layers of the type encoder"): ROWS,
        ("output", "layers that compute a part of the rows"): ROWS,
        ("output", "rows for which a good kernel overflows"): ROWS,
        ("output", "layers without a followed KV-cache group"): ROWS,
        ("write", "pages that cannot be compared"): 1,
    }


def test_a_layer_that_is_called_twice_in_a_step_is_not_judged():
    query, key, value = drawn(ROWS, 4, 16), drawn(ROWS, 2, 16, seed=1), drawn(ROWS, 2, 16, seed=2)
    right = ("twice", query, key, value, attend(query, key, value, PLAIN))
    again = ("twice", key.repeat(1, 2, 1), query[:, :2], value, attend(query, key, value, PLAIN))
    result = observed({"twice": LayerFacts(PLAIN)}, right, again)
    assert result.findings == ()
    assert result.not_compared == {("output", "layers that are called more than once in a step"): 2 * ROWS}


@pytest.mark.parametrize(("page_size", "is_compared"), [(4, True), (2, True), (8, False)])
def test_a_layer_does_not_write_behind_scratch_pages(page_size, is_compared):
    """The cache has pages of 4 keys; pages of 8 would need twice the memory, and a kernel writes without a check."""
    written = []

    def write(key, value, cache, slots):
        written.append(int(slots.max()) < 4 * len(cache))
        cache.view(-1, 2, 32)[slots] = torch.cat([key, value], dim=-1)

    query, key, value = drawn(ROWS, 4, 16), drawn(ROWS, 2, 16, seed=1), drawn(ROWS, 2, 16, seed=2)
    cache = torch.zeros(4, BLOCK, 2, 32, dtype=DTYPE)
    write(key, value, cache, torch.arange(BLOCK, BLOCK + ROWS))
    pages = cache.view(8, 2, 2, 32) if page_size == 2 else cache
    facts = LayerFacts(PLAIN, page_size=page_size, write=write)
    result = observed({"layer": facts}, ("layer", query, key, value, attend(query, key, value, PLAIN), pages))
    assert result.findings == ()
    assert bool(result.checks.get("write")) is is_compared
    assert result.not_compared == ({} if is_compared else {("write", "pages that are smaller than 8 keys"): 1})
    assert len(written) == 1 + is_compared
    assert all(written)
