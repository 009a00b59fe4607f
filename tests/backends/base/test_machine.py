"""What a library's kernels need of a machine, in words; the answers of torch are pretended."""

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.backends.base import machine
from attncheck.backends.candidates.triton_mla.backend import TritonMLABackend
from attncheck.backends.candidates.triton_unified.backend import UnifiedBackend
from attncheck.backends.contract import AttentionBackend
from attncheck.reference.spec import BatchSpec, CacheSpec, LayerSpec, RequestSpec


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))


@pytest.mark.usefixtures("gpu")
def test_a_gpu_is_held_against_the_capability_that_kernels_need() -> None:
    assert machine.gpu_reasons("cuda:1", (8, 6)) == []
    assert machine.gpu_reasons("cuda:1", (9, 0)) == snapshot(
        [
            "device cuda:1: compute capability 8.6, and the kernels need 9.0",
        ]
    )


@pytest.mark.usefixtures("gpu")
def test_a_gpu_of_amd_s_is_none_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    (reason,) = machine.gpu_reasons("cuda", (8, 0))
    assert "AMD" in reason


def test_a_machine_without_a_gpu_is_a_reason_on_cuda_and_none_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine.gpu_reasons("cuda", (8, 0)) == snapshot(["device cuda: torch finds no GPU"])
    assert machine.gpu_reasons("cpu", (8, 0)) == []


def test_versions_are_those_of_distributions() -> None:
    assert machine.installed_version("pytest") == pytest.__version__
    assert machine.installed_version("no-such-distribution") is None
    assert (machine.public("2.8.3+cu128"), machine.public("2.8.3")) == ("2.8.3", "2.8.3")


def test_a_module_that_does_not_import_is_a_reason() -> None:
    assert machine.import_reasons("pytest") == []
    assert machine.import_reasons("no_such_module") == snapshot(
        ["no_such_module cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"]
    )


@pytest.mark.parametrize("backend", [UnifiedBackend, TritonMLABackend])
@pytest.mark.parametrize(("capability", "is_unavailable"), [((7, 5), True), ((8, 0), False)])
def test_kernels_of_bfloat16_are_compiled_for_no_gpu_before_ampere(
    backend: type[AttentionBackend], capability: tuple[int, int], is_unavailable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    batch = BatchSpec(requests=(RequestSpec(query_len=1),))
    expected = ["bfloat16 on compute capability 7.5: Triton needs 8.0"] if is_unavailable else []
    reasons_of = {("bfloat16", "auto"): expected, ("float16", "bfloat16"): expected, ("float16", "auto"): []}
    for (dtype, stored), reasons in reasons_of.items():
        layer = LayerSpec(num_heads=1, num_kv_heads=1, head_size=16, dtype=dtype)
        cache = CacheSpec(kv_cache_dtype=stored)
        assert backend.unavailable_case_reasons("cuda:0", layer, cache, batch) == reasons
