"""Few kernels are compiled for a suite: numbers that differ from layer to layer and step to step are arguments.

On a GPU each takes seconds of one thread. The whole suite is counted by the tests marked ``kernels``.
"""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton", reason="kernels are compiled by Triton")

WHOLE = {"triton_unified": 120, "triton_mla": 12}


def count(printed_by: Callable[..., Any], backend: str, *cases: str) -> int:
    selected = [argument for case in cases for argument in ("--case", case)]
    return sum(printed_by("census.py", 90, backend, "smoke", *selected)["kernels"].values())


@pytest.mark.slow
def test_windows_groups_and_pages_share_kernels(printed_by: Callable[..., Any]) -> None:
    assert count(printed_by, "triton_unified", "window-prefill*", "groups*", "block-size*") <= 12


@pytest.mark.slow
def test_sizes_of_latent_layers_are_all_that_kernels_are_compiled_for(printed_by: Callable[..., Any]) -> None:
    assert count(printed_by, "triton_mla", "latent*") <= WHOLE["triton_mla"]


@pytest.mark.kernels
@pytest.mark.parametrize("backend", WHOLE)
def test_the_whole_suite_compiles_few_kernels(backend: str, printed_by: Callable[..., Any]) -> None:
    assert count(printed_by, backend) <= WHOLE[backend]
