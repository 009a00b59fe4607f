"""What interpreted kernels need, and how they are marked; nothing here launches one."""

import subprocess
import sys

import pytest

from attncheck.backends import interpreter
from attncheck.backends.registry import load
from attncheck.reference.spec import BatchSpec, CacheSpec, LayerSpec, RequestSpec


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("TRUE", True), ("on", True), ("0", False), ("", False)])
def test_the_variable_is_read_as_triton_reads_it_and_marks_a_version(value, expected, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert interpreter.is_interpreted() is expected
    assert interpreter.marked("1.2") == ("1.2, interpreted" if expected else "1.2")
    assert interpreter.marked("") == ("interpreted" if expected else "")
    # A GPU compiles them unless the variable is set.
    assert interpreter.required_environment("cpu") == {"TRITON_INTERPRET": "1"}
    assert interpreter.required_environment("cuda:1") == {}
    assert interpreter.default_suite("cpu") == "interpreted"
    assert interpreter.default_suite("cuda") == ("interpreted" if expected else "smoke")


@pytest.mark.parametrize("is_interpreted", [True, False])
def test_the_reason_why_they_cannot_run_is_stated(is_interpreted, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", str(int(is_interpreted)))
    versions = {"numpy": "2.3.5", "triton": "3.6.0"}
    monkeypatch.setattr("importlib.metadata.version", versions.__getitem__)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert interpreter.unavailable_reasons("cuda") == []
    on_cpu = ["on a CPU Triton kernels are interpreted: set TRITON_INTERPRET=1 before Python starts"]
    assert interpreter.unavailable_reasons("cpu") == ([] if is_interpreted else on_cpu)
    versions["numpy"] = "2.4.1"
    too_new = ["numpy 2.4.1: the interpreter of triton 3.6.0 needs numpy below 2.4"]
    assert interpreter.unavailable_reasons("cpu") == (too_new if is_interpreted else on_cpu)
    versions["triton"] = "3.7.0"
    assert interpreter.unavailable_reasons("cpu") == ([] if is_interpreted else on_cpu)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert interpreter.unavailable_reasons("cpu") == ["Triton is not installed"]


LATE = """
import os, sys
os.environ.pop("TRITON_INTERPRET", None)
import triton
os.environ["TRITON_INTERPRET"] = "1"
from attncheck.backends.interpreter import untimely_reasons
print(untimely_reasons())
"""


def test_a_variable_set_too_late_is_reported(preloaded):
    pytest.importorskip("triton")
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=True)
    late = "Triton was imported before TRITON_INTERPRET=1 was set: set it before Python starts"
    assert done.stdout.strip() == str([late])


@pytest.mark.parametrize("name", ["triton_unified", "triton_mla", "xformers", "xformers_vllm"])
def test_every_candidate_of_triton_kernels_declares_the_interpreter(name, monkeypatch):
    pytest.importorskip("xformers")
    backend = load(name).backend
    assert backend.required_environment("cpu") == {"TRITON_INTERPRET": "1"}
    assert backend.default_suite("cpu") == "interpreted"
    layer = LayerSpec(num_heads=2, num_kv_heads=1, head_size=32, dtype="float16")
    cache, batch = CacheSpec(block_size=16), BatchSpec(requests=(RequestSpec(query_len=1, seq_len=9),))
    assert backend.unavailable_case_reasons("cpu", layer, cache, batch) == []
    monkeypatch.setattr(interpreter, "untimely_reasons", lambda: ["too late"])
    assert backend.unavailable_case_reasons("cpu", layer, cache, batch) == ["too late"]
