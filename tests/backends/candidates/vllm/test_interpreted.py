"""vLLM's Triton kernels on a CPU: the capability they see, and what is not judged. tests/vllm has the rest."""

from dataclasses import replace

import pytest
import torch

from attncheck.backends.candidates.vllm.interpreted import gaps, launches
from attncheck.reference.spec import CacheSpec, LayerSpec, OutputQuantSpec


def test_the_capability_is_replaced_on_the_cpu_alone_and_during_launches_alone(monkeypatch):
    def original(device=None):
        return ("original", device)

    monkeypatch.setattr(torch.cuda, "get_device_capability", original)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with launches():
        assert torch.cuda.get_device_capability(torch.device("cpu")) == (9, 0)
        assert torch.cuda.get_device_capability(torch.device("cuda:1")) == ("original", torch.device("cuda:1"))
        assert torch.cuda.get_device_capability() == ("original", None)
    assert torch.cuda.get_device_capability is original
    with pytest.raises(KeyError), launches():
        raise KeyError
    assert torch.cuda.get_device_capability is original
    monkeypatch.delenv("TRITON_INTERPRET")
    with launches():
        assert torch.cuda.get_device_capability is original


def test_what_the_interpreter_gets_wrong_is_named_with_its_value():
    layer, cache = LayerSpec(num_heads=2, num_kv_heads=1, head_size=32, dtype="float16"), CacheSpec(block_size=16)
    assert gaps(layer, cache) == []
    for start, case in (
        ("dtype bfloat16: ", (replace(layer, dtype="bfloat16"), cache)),
        ("kv_cache_dtype fp8_e5m2: ", (layer, replace(cache, kv_cache_dtype="fp8_e5m2"))),
        ("output_quant: ", (replace(layer, output_quant=OutputQuantSpec(scale=0.5)), cache)),
    ):
        (reason,) = gaps(*case)
        assert reason.startswith(start)
