"""The calls of the candidate flex_attention compile for a GPU that is not here, in few compilations.

That a compiled kernel is right, only a GPU shows.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton", reason="kernels are compiled by Triton")
if sys.platform != "linux":
    pytest.skip("the pretended device is put into the library of torch for Linux", allow_module_level=True)


@pytest.mark.slow
def test_the_kernel_is_the_main_one_whatever_torch_would_choose(printed_by: Callable[..., Any]) -> None:
    # Torch would choose flex_decoding, which is several kernels.
    few_rows = {"num_kv_heads": 1, "rows": 6, "has_all_rows": False}
    small_heads = {"head_size": 8, "dtype": "float16", "cap": 5.0, "has_slopes": True}
    found = printed_by("flex_calls.py", json.dumps([few_rows, small_heads]))
    assert [(call["graphs"], call["error"]) for call in found] == [(1, None)] * 2
    for call in found:
        assert [kernel for kernel in call["kernels"] if "flex" in kernel] == ["triton_tem_fused_flex_attention_0"]


@pytest.mark.slow
def test_heads_scales_and_lengths_share_a_compilation(printed_by: Callable[..., Any]) -> None:
    calls = [
        {"num_heads": 16, "rows": 26, "keys": 127},  # as heads of their own: NoValidChoicesError
        {"num_heads": 21, "num_kv_heads": 3, "scale": 0.2, "rows": 131, "keys": 100},
        {"head_size": 80, "head_size_v": 96, "rows": 4, "keys": 300},
        {"head_size": 128, "num_heads": 16, "rows": 70, "keys": 70},
    ]
    found = printed_by("flex_calls.py", json.dumps(calls))
    assert [(call["call"]["head_size"], call["graphs"], call["error"]) for call in found] == [
        (64, 1, None),
        (80, 1, None),
    ]


@pytest.mark.kernels
def test_smoke_compiles_in_few_compilations(printed_by: Callable[..., Any]) -> None:
    found = printed_by("flex_calls.py", json.dumps(printed_by("flex_calls.py", "smoke")))
    assert [call for call in found if call["error"]] == []
    assert 1 <= sum(call["graphs"] for call in found) <= 15
