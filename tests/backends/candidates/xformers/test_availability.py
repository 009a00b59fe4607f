"""Where candidate ``xformers`` is unavailable, and what its module does not load."""

import importlib.metadata
import subprocess
import sys

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.backends.candidates.xformers.backend import XFormersBackend, library_reasons


@pytest.fixture
def installed(monkeypatch):
    """Pretends that a version of xformers is installed; None: that none is."""
    known = importlib.metadata.version

    def pretend(version):
        def answer(package):
            if package != "xformers":
                return known(package)
            if version is None:
                raise importlib.metadata.PackageNotFoundError(package)
            return version

        monkeypatch.setattr(importlib.metadata, "version", answer)

    return pretend


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (None, "xformers is not installed"),
        ("0.0.34", "xformers 0.0.34 is installed, and private names of 0.0.35 are relied on"),
        ("0.0.35+8c1f2e", None),
    ],
)
def test_no_version_but_the_pinned_one_is_used(version, reason, installed, monkeypatch):
    monkeypatch.setattr("attncheck.backends.interpreter.unavailable_reasons", lambda device: [])
    installed(version)
    assert XFormersBackend.unavailable_reasons("cpu") == ([] if reason is None else [reason])
    assert XFormersBackend.version()


def test_on_a_cpu_kernels_have_to_be_interpreted(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert any("TRITON_INTERPRET=1" in reason for reason in XFormersBackend.unavailable_reasons("cpu"))
    assert XFormersBackend.required_environment("cpu") == {"TRITON_INTERPRET": "1"}
    assert XFormersBackend.required_environment("cuda") == {}
    assert XFormersBackend.default_suite("cpu") == "interpreted"
    assert torch.float32 not in XFormersBackend.get_supported_dtypes()


@pytest.mark.parametrize("is_loaded", [True, False])
@pytest.mark.parametrize("capability", [(7, 5), (9, 0)])
def test_a_gpu_needs_capability_8_and_a_missing_extension_is_reported(is_loaded, capability, installed, monkeypatch):
    pytest.importorskip("xformers")
    installed("0.0.35")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr("xformers._cpp_lib._built_with_cuda", is_loaded)
    found = XFormersBackend.unavailable_reasons("cuda:0")
    assert any("compute capability 7.5, and the kernels need 8.0" in text for text in found) == (capability < (8, 0))
    assert len(found) == (capability < (8, 0))
    assert ("its compiled extension not loaded" in XFormersBackend.version()) == (not is_loaded)


def test_the_operator_named_here_needs_no_extension(monkeypatch):
    """The library's own check, on tensors of a GPU that is pretended."""
    pytest.importorskip("xformers")
    from torch._subclasses.fake_tensor import FakeTensorMode
    from xformers.ops.fmha import triton_splitk
    from xformers.ops.fmha.common import Inputs

    from attncheck.backends.candidates.xformers.impl import NO_EXTENSION, operator_for, single_token_bias

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr("xformers.ops.fmha.common._built_with_cuda", False)
    with FakeTensorMode():
        keys = torch.empty(1, 160, 2, 1, 64, device="cuda", dtype=torch.float16).expand(1, 160, 2, 4, 64)
        query = torch.empty(1, 4, 2, 4, 64, device="cuda", dtype=torch.float16)
        table, lens = (torch.empty(size, dtype=torch.int32, device="cuda") for size in ((4, 3), (4,)))
        given = Inputs(query, keys, keys, attn_bias=single_token_bias(lens, table, 16))
        assert operator_for(16).not_supported_reasons(given) == []
        assert NO_EXTENSION in triton_splitk.FwOp.not_supported_reasons(given)


def test_without_a_gpu_of_nvidia_s_none_is_served(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert XFormersBackend.unavailable_reasons("cuda") == snapshot(["device cuda: torch finds no GPU"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert any("AMD" in reason for reason in XFormersBackend.unavailable_reasons("cuda"))


def test_the_version_names_both_kernels(installed):
    installed("0.0.35")
    assert XFormersBackend.version().startswith("xformers 0.0.35 (decode: triton split-K), attncheck ")


def test_the_launch_on_a_gpu_is_the_library_s_own(monkeypatch):
    if reasons := library_reasons("cpu"):
        pytest.skip("; ".join(reasons))
    from attncheck.backends.candidates.xformers.impl import operator_for

    arguments = {"is_paged": True, "B": 1, "Kkv": 128, "Kq": 128, "Mq": 1, "split_k": 1}
    arguments |= {"M": 40, "attn_bias": None, "k_fp8_scale_shift": None}
    assert operator_for(48).get_extra_args(**arguments)["BLOCK_M"] == 16
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    on_hopper = operator_for(48).get_extra_args(**arguments)
    assert (on_hopper["BLOCK_M"], on_hopper["BLOCK_N"]) == (64, 16)


SCRIPT = """
import logging, sys, torch
from attncheck.backends.candidates.xformers.backend import XFormersBackend
from attncheck.backends.candidates.xformers_vllm.backend import XFormersAttentionBackend
XFormersBackend.unavailable_reasons("cpu")
print(sorted({"xformers", "triton"} & set(sys.modules)))
from attncheck.backends.candidates.xformers.impl import PagedSplitK
print(logging.getLogger("xformers").level)
print(sorted(PagedSplitK.SUPPORTED_DEVICES), torch.float32 in PagedSplitK.SUPPORTED_DTYPES)
"""


def test_the_library_is_loaded_late_quietly_and_on_a_cpu_only_if_interpreted(monkeypatch, preloaded):
    pytest.importorskip("xformers")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "0", "['cuda'] False"]
    assert done.stderr == ""
