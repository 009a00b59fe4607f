"""A bare function as a backend, and what interpreted kernels need."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from attncheck.backends import interpreter
from attncheck.backends.contract import AttentionCGSupport, Conventions, MultipleOf
from attncheck.backends.kernel import kernel_backend
from attncheck.backends.registry import load
from attncheck.backends.verification import contract_problems
from attncheck.reference import AttentionParams, CommonAttentionMetadata, paged_attention, reshape_and_cache
from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import BatchSpec, CacheSpec, RequestSpec

PLAIN = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype="float32", scale=0.4)
STEP = [(1, 5), (3, 20), (6, 6)]


def attended(query, key_cache, value_cache, metadata, params):
    """Output and log-sum-exp of the rows that requests have."""
    rows = int(metadata.query_start_loc[-1])
    batch = (metadata.block_table_tensor, metadata.seq_lens, metadata.query_start_loc)
    return paged_attention(query[:rows], key_cache, value_cache, *batch, AttentionParams(**vars(params)))


def right(query, key_cache, value_cache, metadata, params, out):
    """A correct kernel."""
    found, _ = attended(query, key_cache, value_cache, metadata, params)
    out[: len(found)] = found


def with_lse(query, key_cache, value_cache, metadata, params, out, output_lse):
    found, lse = attended(query, key_cache, value_cache, metadata, params)
    out[: len(found)], output_lse[: len(found)] = found, lse


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_right_kernel_is_right_and_leaves_the_cache_alone(layout, make_step):
    backend = kernel_backend(right, name="loops", supported_layouts=("NHD", "HND"))
    assert contract_problems(backend) == []
    assert backend.get_impl_cls().brings_writer is False
    step = make_step(backend, PLAIN, STEP, cache=CacheSpec(block_size=4, layout=layout), padding=(2, 5))
    slots = step.common.slot_mapping
    live = slots >= 0
    codec = backend.kv_cache_codec(PLAIN, step.cache)
    codec.write(step.kv_cache, slots[live], step.key[: len(slots)][live], step.value[: len(slots)][live])
    before = step.kv_cache.clone()
    step.run()
    assert torch.allclose(step.output[: step.num_rows].double(), step.truth, atol=1e-5)
    assert torch.equal(step.kv_cache.view(torch.int32), before.view(torch.int32))


def test_a_function_with_a_writer_that_writes_its_lse(make_step):
    backend = kernel_backend(with_lse, name="with_lse", features=("lse",), writer=reshape_and_cache)
    assert backend.get_impl_cls().brings_writer is True
    step = make_step(backend, PLAIN, STEP)
    step.run()
    assert torch.allclose(step.output.double(), step.truth, atol=1e-5)
    assert torch.allclose(step.output_lse.double(), step.truth_lse, atol=1e-5)
    step.run(output_lse=None)


def test_functions_besides_attention_are_offered_as_they_are():
    functions = {"reshape_and_cache": reshape_and_cache}
    backend = kernel_backend(right, name="loops", functions=functions)
    functions.clear()
    assert backend.functions() == {"reshape_and_cache": reshape_and_cache}
    assert kernel_backend(right, name="loops").functions() == {}


def test_what_the_function_is_given(make_step):
    seen = {}

    def spy(query, key_cache, value_cache, metadata, params, out):
        seen.update(locals())

    features = ("sliding_window", "non_causal", "sinks", "alibi", "alibi_non_causal", "head_size_v")
    backend = kernel_backend(spy, name="spy", features=features)
    layer = replace(PLAIN, sliding_window=5, sinks=True, sinks_dtype="bfloat16", alibi=True, head_size_v=8)
    step = make_step(backend, layer, STEP, cache=CacheSpec(block_size=8), padding=(1, 2))
    impl = step.impl()
    step.impl = lambda: impl
    step.run()
    assert seen["query"] is step.query
    assert seen["out"] is step.output
    assert isinstance(seen["metadata"], CommonAttentionMetadata)
    assert seen["metadata"].seq_lens is step.common.seq_lens
    # A model runner refills the host tensors after `build`, and a function has no builder that could copy them.
    for name in ("query_start_loc_cpu", "seq_lens_cpu", "num_computed_tokens_cpu"):
        own, given = getattr(seen["metadata"], name), getattr(step.common, name)
        assert torch.equal(own, given)
        assert own.data_ptr() != given.data_ptr()
    assert seen["key_cache"].shape == (40, 8, 2, 16)
    assert seen["value_cache"].shape == (40, 8, 2, 8)
    assert seen["key_cache"].data_ptr() == step.kv_cache.data_ptr()
    params = seen["params"]
    assert (params.num_heads, params.num_kv_heads, params.head_size, params.head_size_v) == (4, 2, 16, 8)
    assert (params.softmax_scale, params.causal, params.window) == (0.4, True, (4, 0))
    assert torch.equal(params.alibi_slopes, torch.tensor(layer.alibi_slopes))
    assert params.sinks.dtype == torch.bfloat16
    assert params.sinks.tolist() == list(layer.sink_logits)
    step.common.causal = False
    step.run()
    assert (seen["params"].causal, seen["params"].window) == (False, (4, 4))
    # A captured graph reads the tensors again, so a layer has them once.
    assert seen["params"].alibi_slopes is params.alibi_slopes
    assert seen["params"].sinks is params.sinks


def test_scales_and_fp8_views_are_passed_where_declared(make_step):
    seen = {}

    def spy(query, key_cache, value_cache, metadata, params, out, *, k_scale, v_scale):
        seen.update(k_scale=k_scale, v_scale=v_scale, dtype=key_cache.dtype)

    def writer(key, value, key_cache, value_cache, slot_mapping, *, k_scale):
        seen.update(writer_scale=k_scale, writer_dtype=value_cache.dtype)

    backend = kernel_backend(
        spy,
        name="spy",
        writer=writer,
        features=("fp8_kv", "fp8_per_head"),
        supported_kv_cache_dtypes=("fp8",),
    )
    cache = CacheSpec(kv_cache_dtype="fp8", k_scale=(0.5, 2.0), v_scale=3.0)
    make_step(backend, PLAIN, STEP, cache=cache).run()
    assert seen["k_scale"].tolist() == [0.5, 2.0] == seen["writer_scale"].tolist()
    assert seen["v_scale"].tolist() == [3.0]
    assert seen["dtype"] == seen["writer_dtype"] == torch.float8_e4m3fn


def test_declarations_reach_the_backend_and_no_other():
    conventions = Conventions(lse_base="2", padded_rows="untouched")
    backend = kernel_backend(
        right,
        name="loops",
        features=["sliding_window", "fp8_kv"],
        supported_dtypes=[torch.float32],
        supported_head_sizes=[16, 32],
        supported_block_sizes=[MultipleOf(8)],
        supported_layouts=["HND"],
        supported_kv_cache_dtypes=["auto", "fp8"],
        supported_devices=["cuda"],
        conventions=conventions,
        version="7.1",
        cudagraph_support=AttentionCGSupport.UNIFORM_BATCH,
    )
    assert (backend.__name__, backend.get_name(), backend.version()) == ("loops", "LOOPS", "7.1")
    assert backend.features == {"sliding_window", "fp8_kv"}
    assert backend.get_supported_dtypes() == [torch.float32]
    assert backend.get_supported_head_sizes() == [16, 32]
    assert backend.get_supported_kernel_block_sizes() == [MultipleOf(8)]
    assert backend.supported_layouts == ("HND",)
    assert backend.supported_kv_cache_dtypes == ("auto", "fp8")
    assert backend.conventions is conventions
    assert backend.unavailable_reasons("cpu") == ["device cpu: the backend runs on cuda"]
    assert backend.__doc__ == "A correct kernel."
    assert backend.get_builder_cls().get_cudagraph_support(None, None) is AttentionCGSupport.UNIFORM_BATCH
    second = kernel_backend(right, name="second")
    assert second.features == frozenset()
    assert backend.get_impl_cls() is not second.get_impl_cls()
    assert backend.get_metadata_cls() is not second.get_metadata_cls()
    assert second.get_builder_cls().get_cudagraph_support(None, None) is AttentionCGSupport.NEVER


def test_contradictions_are_refused(refusals):
    codes = "the feature 'fp8_kv' needs an FP8 dtype in supported_kv_cache_dtypes, and the dtype needs the feature"
    lse = "the feature 'lse' needs a parameter output_lse, and the parameter needs the feature"
    refused = [
        (right, {"features": ("slidingwindow",)}, "unknown feature 'slidingwindow'; did you mean 'sliding_window'?"),
        (right, {"features": ("lse",)}, lse),
        (with_lse, {}, lse),
        (right, {"features": ("fp8_kv",)}, codes),
        (right, {"supported_kv_cache_dtypes": ("fp8",)}, codes),
        (right, {"features": ("tree",)}, "a function does not get the tree ('tree'): derive a backend"),
        (right, {"features": ("rswa",)}, "a function does not get the metadata of 'rswa': derive a backend"),
        (right, {"features": ("mla",)}, "a function over keys and values cannot serve a latent cache ('mla')"),
        (right, {"supported_attn_types": ("encoder_only",)}, "attn_type encoder_only has no paged cache"),
        (lambda query, out: None, {}, "<lambda>(query, out) cannot be called with (query, key_cache, value_cache"),
        (right, {"writer": lambda key: None}, "<lambda>(key) cannot be called with (key, value, key_cache"),
    ]
    found = refusals(lambda given: kernel_backend(given[0], name="wrong", **given[1]), refused)
    for message, (*_, reason) in zip(found, refused, strict=True):
        assert message.removeprefix("kernel_backend 'wrong': ").startswith(reason)
    for level in ("ALWAYS", 3, None):
        with pytest.raises(TypeError, match=f"cudagraph_support is {level!r}; give an AttentionCGSupport: .*NEVER"):
            kernel_backend(right, name="wrong", cudagraph_support=level)


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("TRUE", True), ("on", True), ("0", False), ("", False)])
def test_the_variable_is_read_as_triton_reads_it_and_marks_a_version(value, expected, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert interpreter.is_interpreted() is expected
    assert interpreter.marked("1.2") == ("1.2, interpreted" if expected else "1.2")
    assert interpreter.marked("") == ("interpreted" if expected else "")
    # A GPU compiles them unless the variable is set.
    assert interpreter.required_environment("cpu") == {"TRITON_INTERPRET": "1"}
    assert interpreter.required_environment("cuda:1") == {}
    assert interpreter.default_suite("cpu") == "interpreted"
    assert interpreter.default_suite("cuda") == ("interpreted" if expected else "smoke")


@pytest.mark.parametrize("is_interpreted", [True, False])
def test_the_reason_why_they_cannot_run_is_stated(is_interpreted, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", str(int(is_interpreted)))
    versions = {"numpy": "2.3.5", "triton": "3.6.0"}
    monkeypatch.setattr("importlib.metadata.version", versions.__getitem__)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert interpreter.unavailable_reasons("cuda") == []
    on_cpu = ["on a CPU Triton kernels are interpreted: set TRITON_INTERPRET=1 before Python starts"]
    assert interpreter.unavailable_reasons("cpu") == ([] if is_interpreted else on_cpu)
    versions["numpy"] = "2.4.1"
    too_new = ["numpy 2.4.1: the interpreter of triton 3.6.0 needs numpy below 2.4"]
    assert interpreter.unavailable_reasons("cpu") == (too_new if is_interpreted else on_cpu)
    versions["triton"] = "3.7.0"
    assert interpreter.unavailable_reasons("cpu") == ([] if is_interpreted else on_cpu)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert interpreter.unavailable_reasons("cpu") == ["Triton is not installed"]


LATE = """
import os, sys
os.environ.pop("TRITON_INTERPRET", None)
import triton
os.environ["TRITON_INTERPRET"] = "1"
from attncheck.backends.interpreter import untimely_reasons
print(untimely_reasons())
"""


def test_a_variable_set_too_late_is_reported(preloaded):
    pytest.importorskip("triton")
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=True)
    late = "Triton was imported before TRITON_INTERPRET=1 was set: set it before Python starts"
    assert done.stdout.strip() == str([late])


@pytest.mark.parametrize("name", ["triton_unified", "triton_mla", "xformers", "xformers_vllm"])
def test_every_candidate_of_triton_kernels_declares_the_interpreter(name, monkeypatch):
    pytest.importorskip("xformers")
    backend = load(name).backend
    assert backend.required_environment("cpu") == {"TRITON_INTERPRET": "1"}
    assert backend.default_suite("cpu") == "interpreted"
    layer = LayerSpec(num_heads=2, num_kv_heads=1, head_size=32, dtype="float16")
    cache, batch = CacheSpec(block_size=16), BatchSpec(requests=(RequestSpec(query_len=1, seq_len=9),))
    assert backend.unavailable_case_reasons("cpu", layer, cache, batch) == []
    monkeypatch.setattr(interpreter, "untimely_reasons", lambda: ["too late"])
    assert backend.unavailable_case_reasons("cpu", layer, cache, batch) == ["too late"]
