"""Why the backend cannot run somewhere, in words; it never crashes for want of the library."""

import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.backends.candidates.flashinfer import backend as backend_module
from attncheck.backends.candidates.flashinfer.backend import FlashInferBackend

Reasons = Callable[..., list[str]]


@pytest.fixture
def reasons(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Reasons:
    """``reasons(version=…, capability=…, nvcc=…, kernels=…, imports=…)``: on a machine where all is well but that."""
    found_version, find_spec, import_module = (
        importlib.metadata.version,
        importlib.util.find_spec,
        importlib.import_module,
    )

    def reasons_of(
        *,
        version: str | None = backend_module.PINNED,
        capability: tuple[int, int] | None = (9, 0),
        nvcc: bool = True,
        kernels: bool = False,
        broken: bool = False,
    ) -> list[str]:
        def version_of(name: str) -> str:
            if name != backend_module.DISTRIBUTION:
                return found_version(name)
            if version is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return version

        def spec_of(name: str, *rest: Any) -> Any:
            if name == "flashinfer_jit_cache":
                return importlib.machinery.ModuleSpec(name, None) if kernels else None
            return find_spec(name, *rest)

        def load(name: str) -> Any:
            if name != "flashinfer":
                return import_module(name)
            if broken:
                raise OSError("libcudart.so.13: cannot open shared object file")
            return None

        monkeypatch.setattr(importlib.metadata, "version", version_of)
        monkeypatch.setattr(importlib.util, "find_spec", spec_of)
        monkeypatch.setattr(importlib, "import_module", load)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(backend_module.shutil, "which", lambda name: None)
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        (tmp_path / "bin").mkdir(exist_ok=True)
        if nvcc:
            (tmp_path / "bin" / "nvcc").touch()
        return FlashInferBackend.unavailable_reasons("cuda")

    return reasons_of


def test_a_complete_installation_has_no_reason_against_it(reasons: Reasons) -> None:
    assert reasons() == []
    assert reasons(version=f"{backend_module.PINNED}+cu130") == []


def test_kernels_need_not_be_compiled_where_they_are_installed(reasons: Reasons) -> None:
    assert reasons(nvcc=False, kernels=True) == []


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        ({"version": None}, snapshot("flashinfer-python is not installed")),
        (
            {"version": "0.7.0"},
            snapshot("flashinfer-python 0.7.0 is installed, and what is relied on was read in 0.6.8.post1"),
        ),
        ({"capability": (7, 5)}, snapshot("device cuda: compute capability 7.5, and the kernels need 8.0")),
        ({"capability": None}, snapshot("device cuda: torch finds no GPU")),
        (
            {"nvcc": False},
            snapshot(
                "there is neither nvcc, by which flashinfer compiles its kernels, nor the package flashinfer_jit_cache"
            ),
        ),
        (
            {"broken": True},
            snapshot("flashinfer cannot be imported: OSError: libcudart.so.13: cannot open shared object file"),
        ),
    ],
)
def test_what_is_missing_is_named(reasons: Reasons, machine: dict[str, Any], words: str) -> None:
    (reason,) = reasons(**machine)
    assert reason == words


def test_all_that_is_missing_is_named_at_once(reasons: Reasons) -> None:
    assert len(reasons(version="0.7.0", capability=(7, 5), nvcc=False)) == 3


def test_a_cpu_is_no_place_for_it() -> None:
    assert "device cpu: the backend runs on cuda" in FlashInferBackend.unavailable_reasons("cpu")


def test_asking_for_it_by_name_where_it_cannot_run_is_a_wrong_question(shell: Any, tmp_path: Path) -> None:
    code, printed = shell("attncheck run --backend flashinfer --suite decode --output run.jsonl", tmp_path)
    assert code == 2
    assert "backend 'flashinfer' is unavailable here: device cpu: the backend runs on cuda" in " ".join(printed.split())


def test_its_version_names_the_packages_of_kernels_and_writer() -> None:
    version = FlashInferBackend.version()
    assert version.startswith("flashinfer-python")
    assert "(fa2), attncheck" in version
    assert "(cache writer)" in version
