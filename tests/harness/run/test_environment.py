"""The environment of a run is stated, and the caches of compiled kernels on this machine."""

import getpass
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import attncheck
from attncheck.harness import device
from attncheck.harness.device import Cuda, GpuModes, accelerator_of, collect_environment
from attncheck.harness.host import CacheContents, KernelCache, first_line, kernel_caches

SRC = Path(attncheck.__file__).parents[1]


def test_the_environment_is_what_runs_and_its_tools_are_queried_once(monkeypatch):
    found = collect_environment("cpu")
    assert (found.torch, found.attncheck) == (torch.__version__, attncheck.__version__)
    assert (found.device, found.driver, accelerator_of("cpu")) == ("cpu", None, None)
    assert found.cores >= 1
    assert found.cpu
    monkeypatch.setattr(subprocess, "run", lambda *_a, **_k: pytest.fail("queried again"))
    assert collect_environment("cpu") == found
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: not found.deterministic)
    assert collect_environment("cpu").deterministic != found.deterministic


@pytest.mark.parametrize("tool", ["no-such-tool-at-all", "false"])
def test_a_missing_tool_is_none(tool):
    assert first_line(tool) is None


def test_a_checkout_that_is_not_installed_has_a_version():
    # -S leaves site-packages out, so that only PYTHONPATH finds attncheck and no metadata is there.
    command = [sys.executable, "-S", "-c", "import attncheck; print(attncheck.__version__)"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(SRC)}, stdout=subprocess.PIPE, check=True)
    assert done.stdout.decode().strip() == attncheck.__version__


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("Exclusive_Process, Disabled", GpuModes("Exclusive_Process", "Disabled")),
        ("Default, [N/A]", GpuModes("Default", "[N/A]")),
        ("No devices were found", None),
        (None, None),
    ],
)
def test_the_modes_of_a_gpu_are_those_that_nvidia_smi_prints_for_it(printed, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"of {device}"))
    monkeypatch.setattr(device, "first_line", lambda *words: printed if "--id=GPU-of 1" in words else "of another")
    assert Cuda(1).modes() == expected
    assert expected is None or expected.is_shared == (expected.compute == "Default")


def folders(environment):
    return {cache.library: str(cache.folder) for cache in kernel_caches(environment)}


def test_kernel_caches_lie_where_the_libraries_or_their_variables_put_them(monkeypatch):
    placed = {"TRITON_CACHE_DIR": "t", "TORCHINDUCTOR_CACHE_DIR": "i", "FLASHINFER_WORKSPACE_BASE": "f"}
    assert folders(placed) == {"triton": "t", "inductor": "i", "flashinfer": "f/.cache/flashinfer"}
    assert folders({"TRITON_HOME": "h"})["triton"] == "h/.triton/cache"
    found = folders({})
    inductor = pytest.importorskip("torch._inductor.runtime.cache_dir_utils").default_cache_dir()
    home = Path.home()
    assert found == {
        "triton": str(home / ".triton/cache"),
        "inductor": inductor,
        "flashinfer": str(home / ".cache/flashinfer"),
    }

    def nameless():
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr(getpass, "getuser", nameless)
    assert "torchinductor_uid_" in folders({})["inductor"]


def test_files_of_a_cache_are_counted_and_kernels_by_their_ending(tmp_path):
    cache = KernelCache("triton", tmp_path / "cache", (".cubin", ".hsaco"))
    assert cache.contents() == CacheContents(0, 0, 0)
    for name, size in (("key/a.cubin", 100), ("key/a.json", 20), ("other/deep/b.hsaco", 3)):
        (tmp_path / "cache" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cache" / name).write_bytes(b"x" * size)
    (tmp_path / "cache" / "gone.cubin").symlink_to("nowhere")  # as a file that vanishes between the two looks
    assert cache.contents() == CacheContents(3, 123, 2)
