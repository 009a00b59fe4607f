"""The environment of a run is stated, and an installation needs neither git nor a GPU."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import attncheck
from attncheck.harness import device, host
from attncheck.harness.device import Cuda, GpuModes, accelerator_of, collect_environment

SRC = Path(attncheck.__file__).parents[1]


def test_the_environment_is_what_runs() -> None:
    found = collect_environment("cpu")
    assert found.torch == torch.__version__
    assert found.attncheck == attncheck.__version__
    assert found.device == "cpu"
    assert found.driver is None
    assert found.cores >= 1
    assert found.cpu


def test_tools_are_queried_once_and_policies_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    first = collect_environment("cpu")
    monkeypatch.setattr(subprocess, "run", lambda *_a, **_k: pytest.fail("queried again"))
    assert collect_environment("cpu") == first
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: not first.deterministic)
    assert collect_environment("cpu").deterministic != first.deterministic


def test_a_missing_tool_is_none() -> None:
    assert host.first_line("no-such-tool-at-all") is None
    assert host.first_line("false") is None


def test_a_checkout_that_is_not_installed_has_a_version() -> None:
    code = "import attncheck; print(attncheck.__version__)"
    # -S leaves site-packages out, so that only PYTHONPATH finds attncheck and no metadata is there.
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == attncheck.__version__


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("Exclusive_Process, Disabled", GpuModes("Exclusive_Process", "Disabled")),
        ("Default, [N/A]", GpuModes("Default", "[N/A]")),
        ("No devices were found", None),
        (None, None),
    ],
)
def test_the_modes_of_a_gpu_are_those_that_nvidia_smi_prints_for_it(
    printed: str | None, expected: GpuModes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments: list[str] = []

    def first_line(*words: str) -> str | None:
        arguments.extend(words)
        return printed

    monkeypatch.setattr(device, "first_line", first_line)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"of {device}"))
    assert Cuda(1).modes() == expected
    assert "--id=GPU-of 1" in arguments
    assert expected is None or expected.is_shared == (expected.compute == "Default")


def test_a_cpu_is_no_accelerator() -> None:
    assert accelerator_of("cpu") is None
