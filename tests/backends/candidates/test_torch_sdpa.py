"""Candidate ``torch_sdpa``: which of SDPA's kernels may run, and which one it reports."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from attncheck.backends.candidates import torch_sdpa
from attncheck.backends.candidates.torch_sdpa import SDPABackend
from attncheck.backends.registry import load
from attncheck.errors import BackendLoadError
from attncheck.reference.spec import LayerSpec

PLAIN = LayerSpec(num_heads=6, num_kv_heads=2, head_size=24, dtype="float32", scale=0.3)
NARROW = LayerSpec(num_heads=6, num_kv_heads=2, head_size=24, head_size_v=16, dtype="float32", scale=0.3)
DECODES, MIXED = [(1, 5), (1, 33)], [(1, 5), (7, 19), (20, 20)]


class Operators(TorchDispatchMode):
    """Names of the operators that ran."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("requests", [DECODES, MIXED], ids=["decodes", "mixed"])
@pytest.mark.parametrize(
    ("ref", "layer", "kernel"),
    [
        ("torch_sdpa", PLAIN, "flash"),
        ("torch_sdpa", NARROW, "math"),
        ("torch_sdpa:flash", PLAIN, "flash"),
        ("torch_sdpa:flash", NARROW, "math"),
        ("torch_sdpa:math", PLAIN, "math"),
    ],
)
def test_the_kernel_that_ran_is_named_and_right(ref, layer, kernel, requests, make_step):
    step = make_step(load(ref).backend, layer, requests)
    impl = step.impl()
    step.impl = lambda: impl
    assert impl.chosen_kernels == set()
    with Operators() as ran:
        step.run()
    flash = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert (flash in ran.names, "aten::_softmax" in ran.names or "aten::_safe_softmax" in ran.names) == (
        kernel == "flash",
        kernel == "math",
    )
    assert impl.chosen_kernels == {kernel}
    torch.testing.assert_close(step.output.double(), step.truth, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("ref", ["torch_sdpa", "flex_attention"])
@pytest.mark.parametrize("scale", [0.0, -0.2])
def test_scales_that_no_suite_has(ref, scale, make_step):
    step = make_step(load(ref).backend, replace(PLAIN, scale=scale), MIXED)
    step.run()
    torch.testing.assert_close(step.output.double(), step.truth, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("ref", "allowed"),
    [
        ("torch_sdpa", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"]),
        ("torch_sdpa:flash", ["FLASH_ATTENTION", "MATH"]),
        ("torch_sdpa:efficient", ["EFFICIENT_ATTENTION", "MATH"]),
        ("torch_sdpa:cudnn", ["CUDNN_ATTENTION", "MATH"]),
        ("torch_sdpa:math", ["MATH"]),
    ],
)
def test_torch_may_choose_these_kernels_in_this_order(ref, allowed, make_step, monkeypatch):
    """As torch's own settings state while SDPA is called; none of them is left behind."""
    enabled = {
        "FLASH_ATTENTION": torch.backends.cuda.flash_sdp_enabled,
        "EFFICIENT_ATTENTION": torch.backends.cuda.mem_efficient_sdp_enabled,
        "CUDNN_ATTENTION": torch.backends.cuda.cudnn_sdp_enabled,
        "MATH": torch.backends.cuda.math_sdp_enabled,
    }

    def settings():
        order = [SDPBackend(number).name for number in torch._C._get_sdp_priority_order()]
        return [name for name in order if name in enabled and enabled[name]()]

    seen, real = [], torch_sdpa.scaled_dot_product_attention
    monkeypatch.setattr(
        torch_sdpa,
        "scaled_dot_product_attention",
        lambda *given, **more: seen.append(settings()) or real(*given, **more),
    )
    before = settings()
    make_step(load(ref).backend, PLAIN, DECODES).run()
    assert seen == [allowed]
    assert settings() == before
    assert set(before) == set(enabled)


def test_kernels_that_only_a_gpu_has_and_versions(monkeypatch):
    for kernel, runs_on_cpu in (("flash", True), ("math", True), ("efficient", False), ("cudnn", False)):
        found = load(f"torch_sdpa:{kernel}")
        assert found.name == f"torch_sdpa:{kernel}"
        assert (found.backend.unavailable_reasons("cpu") == []) == runs_on_cpu
        assert found.backend.unavailable_reasons("cuda") == []
    with pytest.raises(BackendLoadError, match="no kernel 'fast'; known: flash, efficient, cudnn, math"):
        load("torch_sdpa:fast")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    assert load("torch_sdpa:cudnn").version == f"torch {torch.__version__}, cuDNN 91002"
    assert SDPABackend.version() == f"torch {torch.__version__}"
