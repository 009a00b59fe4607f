"""What a library's kernels need of a machine, in words; the answers of torch are pretended."""

import pytest
import torch

from attncheck.backends import machine


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))


@pytest.mark.usefixtures("gpu")
def test_a_gpu_is_held_against_the_capability_that_kernels_need() -> None:
    assert machine.gpu_reasons("cuda:1", (8, 6)) == []
    assert machine.gpu_reasons("cuda:1", (9, 0)) == [
        "device cuda:1: compute capability 8.6, and the kernels need 9.0",
    ]


@pytest.mark.usefixtures("gpu")
def test_a_gpu_of_amd_s_is_none_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    (reason,) = machine.gpu_reasons("cuda", (8, 0))
    assert "AMD" in reason


def test_a_machine_without_a_gpu_says_so_and_of_a_cpu_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine.gpu_reasons("cuda", (8, 0)) == ["device cuda: torch finds no GPU"]
    assert machine.gpu_reasons("cpu", (8, 0)) == []


def test_versions_are_those_of_distributions() -> None:
    assert machine.installed_version("pytest") == pytest.__version__
    assert machine.installed_version("no-such-distribution") is None
    assert (machine.public("2.8.3+cu128"), machine.public("2.8.3")) == ("2.8.3", "2.8.3")


def test_a_module_that_does_not_import_is_a_reason() -> None:
    assert machine.import_reasons("pytest") == []
    assert machine.import_reasons("no_such_module") == [
        "no_such_module cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"
    ]
