"""How vLLM's Triton kernels come to run on a CPU; with stand-ins for vLLM and Triton. tests/vllm has the real ones."""

import subprocess
import sys
import textwrap
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from attncheck.backends.candidates.vllm.interpreted import gaps, launches, launches_triton
from attncheck.reference.spec import CacheSpec, LayerSpec, OutputQuantSpec


def module(monkeypatch, name, source, **held):
    """A module of this source, which imports find."""
    fake = ModuleType(name)
    vars(fake).update(held)
    exec(textwrap.dedent(source), vars(fake))
    monkeypatch.setitem(sys.modules, name, fake)
    return fake


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("class Impl:\n    def forward(self): attend()", True),
        ("class Builder:\n    def build(self): attend()", True),
        ("class Impl:\n    @staticmethod\n    def forward(): attend()", True),
        ("class Impl:\n    def forward(self): return [attend() for _ in range(2)]", True),
        ("class Base:\n    def forward(self): attend()\nclass Impl(Base):\n    def other(self): pass", True),
        ("class Impl:\n    def forward(self): triton.cdiv", True),
        ("class Impl:\n    def forward(self): plain()", False),  # of a module without Triton
        ("class Impl:\n    def forward(self): pass\ndef unused(): attend()", False),
        ("class Base:\n    def forward(self): attend()\nclass Impl(Base):\n    def forward(self): pass", False),
        ("class Impl:\n    def forward(self): self.attend()", False),
    ],
)
def test_methods_that_name_triton_or_a_function_beside_it_are_reported(source, expected, monkeypatch):
    """vLLM puts modules of its own in Triton's place."""
    held = {"triton": ModuleType("triton"), "tl": ModuleType("triton.language")}
    ops = module(monkeypatch, "their_ops", "def attend(): kernel\ndef kernel(): pass", **held)
    plain = module(monkeypatch, "plain_ops", "def attend(): pass")
    names = {"attend": ops.attend, "triton": ops.triton, "plain": plain.attend}
    fake = module(monkeypatch, "their_backend", source, **names)
    empty = type("Empty", (), {})
    backend = SimpleNamespace(
        get_impl_cls=lambda: getattr(fake, "Impl", empty), get_builder_cls=lambda: getattr(fake, "Builder", empty)
    )
    assert launches_triton(backend) is expected


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


STAND_INS = {
    "triton/__init__.py": "",
    "triton/backends/__init__.py": """
        from collections import namedtuple
        Backend = namedtuple("Backend", "compiler driver")
        backends = {"nvidia": "theirs"}
        """,
    "triton/backends/compiler.py": "class BaseBackend: pass",
    "triton/backends/driver.py": "class DriverBase: pass",
    "vllm/__init__.py": "",
    "vllm/triton_utils.py": """
        from triton.backends import backends
        HAS_TRITON = "cpu" in backends
        """,
}


@pytest.mark.parametrize(("value", "has_triton"), [("1", True), ("0", False)])
def test_vllm_finds_a_backend_for_the_cpu_while_it_looks_and_no_longer(tmp_path, value, has_triton, preloaded):
    for path, source in STAND_INS.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(textwrap.dedent(source))
    program = f"""
        import os, sys
        sys.path.insert(0, {str(tmp_path)!r})
        os.environ["TRITON_INTERPRET"] = {value!r}
        from attncheck.backends.candidates.vllm.interpreted import import_triton_utils, missing_triton
        import_triton_utils()
        import vllm.triton_utils, triton.backends
        print(vllm.triton_utils.HAS_TRITON, missing_triton() == [], list(triton.backends.backends))
        """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == f"{has_triton} {has_triton} ['nvidia']"
