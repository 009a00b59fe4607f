"""Triton's kernels on the pretend device, interpreted."""

import os

import pytest
import torch
from pretend_cuda import present

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are compiled here", allow_module_level=True)

import triton.language as tl  # noqa: E402


@triton.jit
def double(source, target, SIZE: tl.constexpr):
    offsets = tl.arange(0, SIZE)
    tl.store(target + offsets, 2 * tl.load(source + offsets))


def test_a_kernel_takes_no_memory_of_the_host():
    with present(), pytest.raises(ValueError, match="Pointer argument target cannot be accessed from Triton"):
        double[(1,)](torch.ones(4, device="cuda"), torch.zeros(4), SIZE=4)


@torch.library.custom_op("pretend::doubled", mutates_args=())
def doubled(source: torch.Tensor) -> torch.Tensor:
    target = torch.empty(source.shape, device=source.device)
    double[(1,)](source, target, SIZE=4)
    return target + torch.zeros(4, device=source.device)


def test_the_code_of_a_custom_operator_is_judged_as_any_other():
    with present() as device:
        source = torch.ones(4, device="cuda")
        device.launches.clear()
        result = doubled(source)
        assert result.is_cuda
        assert result.tolist() == [2, 2, 2, 2]
        assert device.launches == {"double": 1, "zeros": 1, "aten::add": 1}
