"""What a library's kernels need of a machine, in words; the answers of torch are pretended."""

import pytest
import torch

from attncheck.backends.base import machine
from attncheck.backends.candidates.triton_mla.backend import TritonMLABackend
from attncheck.backends.candidates.triton_unified.backend import UnifiedBackend
from attncheck.reference.spec import BatchSpec, CacheSpec, LayerSpec, RequestSpec


def test_a_gpu_is_held_against_the_capability_that_kernels_need(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine.gpu_reasons("cuda", (8, 0)) == ["device cuda: torch finds no GPU"]
    assert machine.gpu_reasons("cpu", (8, 0)) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert machine.gpu_reasons("cuda:1", (8, 6)) == []
    assert machine.gpu_reasons("cuda:1", (9, 0)) == ["device cuda:1: compute capability 8.6, and the kernels need 9.0"]
    monkeypatch.setattr(torch.version, "hip", "7.0")
    (reason,) = machine.gpu_reasons("cuda", (8, 0))
    assert "AMD" in reason


def test_what_is_installed_and_what_does_not_import():
    assert machine.installed_version("pytest") == pytest.__version__
    assert machine.installed_version("no-such-distribution") is None
    assert (machine.public("2.8.3+cu128"), machine.public("2.8.3")) == ("2.8.3", "2.8.3")
    assert machine.import_reasons("pytest") == []
    assert machine.import_reasons("no_such_module") == [
        "no_such_module cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"
    ]


@pytest.mark.parametrize("backend", [UnifiedBackend, TritonMLABackend])
@pytest.mark.parametrize("capability", [(7, 5), (8, 0)])
def test_kernels_of_bfloat16_are_compiled_for_no_gpu_before_ampere(backend, capability, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    batch = BatchSpec(requests=(RequestSpec(query_len=1),))
    too_old = ["bfloat16 on compute capability 7.5: Triton needs 8.0"]
    for dtype, stored in (("bfloat16", "auto"), ("float16", "bfloat16"), ("float16", "auto")):
        layer = LayerSpec(num_heads=1, num_kv_heads=1, head_size=16, dtype=dtype)
        found = backend.unavailable_case_reasons("cuda:0", layer, CacheSpec(kv_cache_dtype=stored), batch)
        assert found == (too_old if capability == (7, 5) and "bfloat16" in (dtype, stored) else [])
