"""Candidate ``xformers``: where it is unavailable, which kernel gets which rows, and what it refuses.

``suite xformers`` and ``interpreted`` examine its results.
"""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from attncheck.backends.base import machine
from attncheck.backends.candidates.xformers.backend import XFormersBackend, library_reasons
from attncheck.backends.contract import AttentionCGSupport
from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import BatchSpec, CacheSpec, RequestSpec

if reasons := library_reasons("cpu"):
    pytest.skip("; ".join(reasons), allow_module_level=True)

from attncheck.backends.candidates.xformers import impl as impl_module
from attncheck.backends.candidates.xformers.impl import operator_for, paged_decode, single_token_bias

PLAIN = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype="float32", scale=0.3)


@pytest.fixture
def attended(monkeypatch):
    """How many rows each of the two kernels was given, call by call."""
    calls = []

    def operator(query, *rest):
        calls.append(("operator", len(query)))

    def kernel(query, *rest, query_start_loc, **options):
        calls.append(("kernel", query_start_loc.tolist()))

    monkeypatch.setattr(impl_module, "paged_decode", operator)
    monkeypatch.setattr(impl_module, "unified_attention", kernel)
    return calls


@pytest.mark.parametrize(
    ("modifiers", "requests", "padding", "expected"),
    [
        ({}, [(1, 5), (1, 9)], (0, 0), [("operator", 2)]),
        ({}, [(1, 5), (1, 9)], (2, 2), [("operator", 2)]),
        ({}, [(1, 5), (4, 9)], (1, 2), [("operator", 1), ("kernel", [0, 4, 4])]),
        ({}, [(4, 9), (1, 5)], (0, 0), [("kernel", [0, 4, 5])]),
        ({"sliding_window": 3}, [(1, 5), (1, 9)], (0, 0), [("kernel", [0, 1, 2])]),
        ({"logits_soft_cap": 3.0}, [(1, 5), (4, 9)], (0, 0), [("kernel", [0, 1, 5])]),
    ],
)
def test_the_operator_attends_to_plain_decodes_in_front(modifiers, requests, padding, expected, make_step, attended):
    step = make_step(XFormersBackend, replace(PLAIN, **modifiers), requests, padding=padding)
    impl = step.impl()
    step.impl = lambda: impl
    step.run()
    assert attended == expected
    names = {"operator": "paged_triton_splitK_n16", "kernel": "attncheck's unified_attention"}
    assert impl.chosen_kernels == {names[called] for called, _ in expected}


@pytest.mark.parametrize(("max_query_len", "expected"), [(1, ("operator", 3)), (3, ("kernel", [0, 1, 2, 3]))])
def test_the_longest_query_to_come_decides_what_a_graph_holds(max_query_len, expected, make_step, attended):
    """Dummies of a mixed graph have one row each, where it has as many tokens as requests."""
    step = make_step(XFormersBackend, PLAIN, [(1, 1), (1, 1), (1, 1)])
    common = replace(step.common, max_query_len=max_query_len)
    step.run(attn_metadata=step.builder().build_for_cudagraph_capture(common))
    assert attended == [expected]
    assert XFormersBackend.get_builder_cls().cudagraph_support is AttentionCGSupport.ALWAYS


def test_a_length_beyond_the_table_is_refused(make_step):
    step = make_step(XFormersBackend, PLAIN, [(1, 5), (1, 20)])
    longer = torch.tensor([5, 65], dtype=torch.int32)
    common = replace(step.common, seq_lens=longer, seq_lens_cpu=longer)
    with pytest.raises(ValueError, match="XFORMERS: seq_len 65 exceeds the 64 slots of a table row"):
        step.builder().build(0, common)


@pytest.mark.parametrize(("modifiers", "is_available"), [({}, False), ({"sliding_window": 3}, True)])
def test_bfloat16_is_available_where_the_interpreter_can_multiply_it(modifiers, is_available, monkeypatch):
    layer, batch = replace(PLAIN, dtype="bfloat16", **modifiers), BatchSpec(requests=(RequestSpec(query_len=1),))
    arguments = ("cpu", layer, CacheSpec(), batch)
    assert XFormersBackend.unsupported_reasons(*arguments[1:]) == []
    assert (XFormersBackend.unavailable_case_reasons(*arguments) == []) == is_available
    monkeypatch.delenv("TRITON_INTERPRET")
    assert XFormersBackend.unavailable_case_reasons(*arguments) == []


def test_the_largest_tile_that_divides_a_page_is_taken():
    for page_size, tile in ((16, 16), (32, 32), (48, 16), (64, 64), (80, 16), (96, 32), (112, 16), (128, 64)):
        found = operator_for(page_size)
        assert (tile, f"paged_triton_splitK_n{tile}") == (found.BLOCK_N, found.NAME)
        with pytest.raises(ValueError, match=f"page size {page_size + 8} is no multiple of 16"):
            operator_for(page_size + 8)


def test_a_call_is_one_operator_of_torch():
    """So a recorder of calls sees it, and what it writes; fake tensors pass. Without an LSE the output is the same."""
    query, caches = torch.randn(1, 2, 16), torch.randn(2, 2, 16, 1, 16)
    table, lens = torch.tensor([[1]], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    out, lse, alone = torch.empty_like(query), torch.empty(1, 2), torch.empty_like(query)
    arguments = (query, *caches, table, lens, 0.3)
    torch.library.opcheck(paged_decode, (*arguments, out, lse), test_utils=("test_schema", "test_faketensor"))
    paged_decode(*arguments, out, lse)
    paged_decode(*arguments, alone, None)
    assert torch.equal(out, alone)


@pytest.fixture
def installed(monkeypatch):
    """Sets the version of xformers that is found; None for none."""
    return lambda version: monkeypatch.setattr(machine, "installed_version", lambda name: version)


def test_no_version_but_the_pinned_one_is_used(installed, monkeypatch):
    monkeypatch.setattr("attncheck.backends.interpreter.unavailable_reasons", lambda device: [])
    for version, reasons in (
        (None, ["xformers is not installed"]),
        ("0.0.34", ["xformers 0.0.34 is installed, and private names of 0.0.35 are relied on"]),
        ("0.0.35+8c1f2e", []),
    ):
        installed(version)
        assert XFormersBackend.unavailable_reasons("cpu") == reasons
        assert XFormersBackend.version()


def test_a_gpu_needs_capability_8_and_a_missing_extension_is_reported(installed, monkeypatch):
    installed("0.0.35")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    old = "device cuda:0: compute capability 7.5, and the kernels need 8.0"
    for capability, is_loaded, reasons in (((7, 5), True, [old]), ((9, 0), False, [])):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        monkeypatch.setattr("xformers._cpp_lib._built_with_cuda", is_loaded)
        assert XFormersBackend.unavailable_reasons("cuda:0") == reasons
        assert ("its compiled extension not loaded" in XFormersBackend.version()) == (not is_loaded)


def test_the_operator_named_here_needs_no_extension(monkeypatch):
    """The library's own check, on tensors of a GPU that is pretended."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from xformers.ops.fmha import triton_splitk
    from xformers.ops.fmha.common import Inputs

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr("xformers.ops.fmha.common._built_with_cuda", False)
    with FakeTensorMode():
        keys = torch.empty(1, 160, 2, 1, 64, device="cuda", dtype=torch.float16).expand(1, 160, 2, 4, 64)
        query = torch.empty(1, 4, 2, 4, 64, device="cuda", dtype=torch.float16)
        table, lens = (torch.empty(size, dtype=torch.int32, device="cuda") for size in ((4, 3), (4,)))
        given = Inputs(query, keys, keys, attn_bias=single_token_bias(lens, table, 16))
        assert operator_for(16).not_supported_reasons(given) == []
        assert impl_module.NO_EXTENSION in triton_splitk.FwOp.not_supported_reasons(given)


def test_the_launch_on_a_gpu_is_the_library_s_own(monkeypatch):
    arguments = {"is_paged": True, "B": 1, "Kkv": 128, "Kq": 128, "Mq": 1, "split_k": 1}
    arguments |= {"M": 40, "attn_bias": None, "k_fp8_scale_shift": None}
    assert operator_for(48).get_extra_args(**arguments)["BLOCK_M"] == 16
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    on_hopper = operator_for(48).get_extra_args(**arguments)
    assert (on_hopper["BLOCK_M"], on_hopper["BLOCK_N"]) == (64, 16)


SCRIPT = """
import logging, sys, torch
from attncheck.backends.base import machine
from attncheck.backends.candidates.xformers.backend import XFormersBackend
from attncheck.backends.candidates.xformers_vllm.backend import XFormersAttentionBackend
XFormersBackend.unavailable_reasons("cpu")
print(sorted({"xformers", "triton"} & set(sys.modules)))
from attncheck.backends.candidates.xformers.impl import PagedSplitK
print(logging.getLogger("xformers").level)
print(sorted(PagedSplitK.SUPPORTED_DEVICES), torch.float32 in PagedSplitK.SUPPORTED_DTYPES)
"""


@pytest.mark.slow
def test_the_library_is_loaded_late_quietly_and_on_a_cpu_only_if_interpreted(monkeypatch, preloaded):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "0", "['cuda'] False"]
    assert done.stderr == ""
