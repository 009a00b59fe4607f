"""vLLM's Triton kernels on a CPU: which classes launch them, the capability they see, and what is not judged.

tests/vllm has the rest.
"""

import sys
import textwrap
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from attncheck.backends.candidates.vllm.interpreted import gaps, launches, launches_triton
from attncheck.reference.spec import LayerSpec, OutputQuantSpec
from attncheck.reference.step_spec import CacheSpec


def module(monkeypatch, name, source, **held):
    """A module of this source, which imports find."""
    fake = ModuleType(name)
    vars(fake).update(held)
    exec(textwrap.dedent(source), vars(fake))
    monkeypatch.setitem(sys.modules, name, fake)
    return fake


@pytest.fixture
def ops(monkeypatch):
    """A function around a kernel, in a module that holds what vLLM puts in Triton's place."""
    return module(monkeypatch, "their_ops", "def attend(): pass", triton=ModuleType("triton"))


def backend(monkeypatch, source, **held):
    """A backend whose module has this source."""
    fake = module(monkeypatch, "their_backend", source, **held)
    empty = type("Empty", (), {})
    return SimpleNamespace(
        get_impl_cls=lambda: getattr(fake, "Impl", empty), get_builder_cls=lambda: getattr(fake, "Builder", empty)
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("class Impl:\n    def forward(self): attend()", True),
        ("class Builder:\n    def build(self): attend()", True),
        ("class Impl:\n    def forward(self): triton.cdiv", True),
        ("class Impl:\n    def forward(self): return (lambda: attend())", True),
        ("class Base:\n    def forward(self): attend()\nclass Impl(Base): pass", True),
        ("class Base:\n    def forward(self): attend()\nclass Impl(Base):\n    def forward(self): pass", False),
        ("class Impl:\n    def forward(self): plain()", False),
    ],
    ids=["impl", "builder", "triton", "nested", "inherited", "overridden", "plain module"],
)
def test_a_class_launches_triton_if_a_method_names_it_or_a_function_beside_it(monkeypatch, ops, source, expected):
    plain = module(monkeypatch, "plain_ops", "def plain(): pass").plain
    theirs = backend(monkeypatch, source, attend=ops.attend, triton=ops.triton, plain=plain)
    assert launches_triton(theirs) is expected


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
