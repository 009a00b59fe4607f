"""The least work of a case, against counts made key by key and by hand; what the device can do, in virtual time."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attncheck.backends.declarations import OTHER_PATHS
from attncheck.cases.consistency import check_meaning
from attncheck.cases.loader import load_suite, suite_names
from attncheck.cases.model import Case
from attncheck.errors import SpecError
from attncheck.harness.checks.timing import roofline
from attncheck.harness.checks.timing.clock import HostClock
from attncheck.harness.checks.timing.roofline import CPU, measure_ceilings, work_of
from attncheck.reference import layer_params, visible
from attncheck.reference.spec import AttentionType, LayerSpec, MLASpec, OutputQuantSpec
from attncheck.reference.step_spec import BatchSpec, CacheSpec, FastPrefillOptions, PathSpec, RequestSpec, TreeOptions

SIZES = {"num_heads": 6, "num_kv_heads": 2, "head_size": 8}
PARENTS = (-1, 0, 0, 1)


def case_of(*requests, layer=None, cache=None, path=None):
    specs = tuple(r if isinstance(r, RequestSpec) else RequestSpec(query_len=r[0], seq_len=r[1]) for r in requests)
    return Case(
        suite="made",
        id="case",
        layer=LayerSpec(**(SIZES | {"dtype": "bfloat16"} | (layer or {}))),
        cache=CacheSpec(**(cache or {})),
        batch=BatchSpec(requests=specs, path=path or PathSpec()),
    )


def counted(case):
    """Bytes and flops, every key of every row looked at: what is read is a set, what is multiplied a count."""
    layer, options = case.layer, case.batch.path.options
    cross = layer.attn_type == AttentionType.ENCODER_DECODER
    encoder = layer.attn_type == AttentionType.ENCODER_ONLY
    given_size = {"float16": 2, "bfloat16": 2, "float32": 4}[layer.dtype]
    held = 1 if case.cache.kv_cache_dtype == "fp8" else given_size
    one_key = layer.num_kv_heads * (layer.head_size + layer.value_head_size)
    read_of_cache, moved, pairs = set(), 0, 0
    for index, request in enumerate(case.batch):
        keys = request.encoder_len if cross else request.total_len
        rows = request.query_len
        if isinstance(options, FastPrefillOptions):
            rows = min(rows, options.rows)
        brings = range(max(0, request.context_len), keys)
        if cross:
            brings = range(0 if request.context_len else keys)
        if layer.kv_sharing or isinstance(options, FastPrefillOptions):
            brings = range(0)
        mask = visible(layer_params(layer), torch.arange(keys - rows, keys)[:, None], torch.arange(keys)[None])
        for row, key in product(range(rows), range(keys)):
            if isinstance(options, TreeOptions) and key >= request.context_len:
                line = [row]
                while PARENTS[line[-1]] >= 0:
                    line.append(PARENTS[line[-1]])
                if key - request.context_len not in line:
                    continue
            if mask[row, key]:
                pairs += 1
                if key not in brings:
                    read_of_cache.add(("shared" if key < request.shared_prefix else index, key))
        moved += rows * layer.num_heads * layer.head_size * (1 if layer.query_quant else given_size)
        moved += rows * layer.num_heads * layer.value_head_size * (1 if layer.output_quant else given_size)
        moved += len(brings) * one_key * (given_size + (0 if encoder else held))
    flops = sum(2 * layer.num_heads * pairs * size for size in (layer.head_size, layer.value_head_size))
    return moved + len(read_of_cache) * one_key * held, flops


lengths = st.tuples(st.integers(1, 9), st.integers(0, 20))
layers = st.fixed_dictionaries(
    {"dtype": st.sampled_from(["bfloat16", "float32"])},
    optional={
        "causal": st.booleans(),
        "sliding_window": st.integers(1, 12),
        "attn_chunk_size": st.integers(1, 9),
        "head_size_v": st.integers(1, 9),
        "kv_sharing": st.booleans(),
        "output_quant": st.just(OutputQuantSpec(scale=0.5)),
    },
)


def counts(case):
    work = work_of(case)
    return (work.moved_bytes, work.flops), counted(case)


def agrees(case):
    check_meaning(case.layer, case.cache, case.batch)
    work, expected = counts(case)
    assert work == expected


@given(layers, st.lists(lengths, min_size=1, max_size=4), st.sampled_from(["auto", "fp8"]))
def test_a_decoders_work(layer, pairs, kv_cache_dtype):
    """Rows before the first key, which see nothing, are among them."""
    agrees(case_of(*pairs, layer=layer, cache={"kv_cache_dtype": kv_cache_dtype}))


@given(layers, st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3), st.integers(0, 9)), min_size=2, max_size=4))
def test_shared_pages_are_read_once(layer, requests):
    specs = [
        RequestSpec(query_len=rows, seq_len=4 * pages + rest + rows, shared_prefix=4 * pages, count=1 + rest % 2)
        for rows, pages, rest in requests
    ]
    work, expected = counts(case_of(*specs, layer=layer, cache={"block_size": 4}))
    assert work == expected


@given(st.lists(st.integers(1, 12), min_size=1, max_size=3), st.none() | st.integers(1, 9))
def test_an_encoders_work(rows, window):
    layer = {"attn_type": AttentionType.ENCODER_ONLY, "sliding_window": window}
    agrees(case_of(*((n, n) for n in rows), layer=layer, path=PathSpec(name="encoder_only")))


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4), st.integers(0, 12)), min_size=1, max_size=3))
def test_cross_attention_writes_the_encoders_rows_in_the_first_step_only(requests):
    specs = [RequestSpec(query_len=q, seq_len=q + context, encoder_len=n) for q, context, n in requests]
    layer = {"attn_type": AttentionType.ENCODER_DECODER}
    agrees(case_of(*specs, layer=layer, path=PathSpec(name="cross")))


@given(st.lists(st.integers(0, 12), min_size=1, max_size=3), st.none() | st.integers(1, 6))
def test_a_trees_rows_see_their_ancestors(contexts, window):
    path = PathSpec(name="tree", options=TreeOptions(parents=PARENTS))
    agrees(case_of(*((4, 4 + n) for n in contexts), layer={"sliding_window": window}, path=path))


@given(st.lists(st.tuples(st.integers(3, 9), st.integers(0, 9)), min_size=1, max_size=3), st.integers(1, 2))
def test_fast_prefill_computes_the_last_rows_and_writes_nothing(pairs, rows):
    path = PathSpec(name="fast_prefill", options=FastPrefillOptions(rows=rows))
    agrees(case_of(*((q, q + context) for q, context in pairs), path=path))


LATENT = MLASpec(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
DEEPSEEK = {"num_heads": 128, "num_kv_heads": 1, "head_size": 576, "mla": LATENT}
WEIGHTS = 128 * 512 * (128 + 128)


def test_a_latent_decode_is_counted_in_its_absorbed_form():
    case = case_of(RequestSpec(query_len=1, seq_len=1000, count=4), layer=DEEPSEEK, path=PathSpec(name="mla"))
    work = work_of(case)
    assert work.flops == 4 * 2 * (WEIGHTS + 128 * 1000 * (576 + 512))
    rows = 4 * 128 * (192 + 128)
    assert work.moved_bytes == 2 * (WEIGHTS + 4 * 576 * (999 + 2) + rows)


def test_a_latent_prefill_is_counted_in_its_naive_form():
    case = case_of((1000, 1000), layer=DEEPSEEK, path=PathSpec(name="mla"))
    assert work_of(case).flops == 2 * (1000 * WEIGHTS + 128 * 500_500 * (192 + 128))


@pytest.mark.parametrize("path", OTHER_PATHS)
def test_paths_beside_attention_are_refused(path):
    with pytest.raises(SpecError, match=path):
        work_of(case_of((1, 1), path=PathSpec(name=path)))


def test_every_built_in_case_of_attention_has_work():
    cases = [case for name in suite_names() for case in load_suite(name)]
    attention_cases = [case for case in cases if case.batch.path.name not in OTHER_PATHS]
    assert len(attention_cases) > 200
    for case in attention_cases:
        work = work_of(case)
        rows = case.batch.num_tokens * case.layer.num_heads
        assert work.moved_bytes > rows, case.key
        assert work.flops > 0 or case.batch.max_query_len > 1, case.key


class Watch:
    """Says of calls in turn that they took so long; the host's clock follows."""

    name = "host"

    def __init__(self, times):
        self.times, self.host, self.calls = times, 0, []

    def time(self, call, **around):
        result = call()
        taken = self.times(len(self.calls), result)
        self.calls.append((result.shape, taken))
        self.host += taken
        return taken

    def wait(self):
        pass


@pytest.fixture
def measured(monkeypatch):
    def measure(times, dtype="float32"):
        watch = Watch(times)
        monkeypatch.setattr(roofline, "host_ns", lambda: watch.host)
        return measure_ceilings("cpu", dtype, watch), watch

    return measure


def test_rates_are_of_the_shortest_call_and_copies_count_twice(measured):
    """The first of each is no measure: it may allocate. The others of a copy take 4, 3, 2, 2 ... ms."""

    def times(number, result):
        if result.ndim == 1:
            return 100 if number == 0 else (4_000_000, 3_000_000, 2_000_000)[min(number - 1, 2)]
        return round(2 * len(result) ** 3 / 500)  # 500 flops a nanosecond

    found, watch = measured(times)
    assert found.copy_bytes_per_s == pytest.approx(2 * CPU.copied / 2e-3)
    assert found.matmul_flops_per_s == pytest.approx(500e9, rel=1e-3)
    assert max(len(shape) for shape, _ in watch.calls) == 2
    assert (1024, 1024) in [tuple(shape) for shape, _ in watch.calls]
    assert found.dtype == "float32"


def test_what_is_slow_is_measured_at_smaller_sizes(measured):
    """A product of float16 without instructions for it: 0.1 flops a nanosecond."""

    def times(number, result):
        return 1_000_000 if result.ndim == 1 else round(2 * len(result) ** 3 / 0.1)

    found, watch = measured(times, "float16")
    assert found.matmul_flops_per_s == pytest.approx(1e8, rel=1e-3)
    assert {tuple(shape) for shape, _ in watch.calls if len(shape) == 2} == {(128, 128)}
    assert watch.host < 0.3e9


def test_no_copy_pays_for_what_the_one_before_left_in_the_cache(monkeypatch):
    """A copy takes 2 ms, and 1 ms more where dirty lines have to be written back meanwhile."""
    dirty = [False]

    class Cached(Watch):
        def time(self, call, *, before=lambda: None):
            before()
            late, dirty[0] = dirty[0], True
            self.times = lambda _number, _result: 3_000_000 if late else 2_000_000
            return super().time(call)

    monkeypatch.setattr(roofline, "host_ns", lambda: watch.host)
    watch = Cached(None)
    found = measure_ceilings("cpu", "float32", watch, lambda: dirty.__setitem__(0, False))
    assert found.copy_bytes_per_s == pytest.approx(2 * CPU.copied / 2e-3)


def test_this_machine_can_do_something():
    state = torch.get_rng_state()
    found = measure_ceilings("cpu", "bfloat16", HostClock())
    assert found.copy_bytes_per_s > 1e7
    assert found.matmul_flops_per_s > 1e6
    assert torch.equal(torch.get_rng_state(), state)
