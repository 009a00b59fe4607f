"""Choosing a device and backends: what is not there is refused or stays visible, never dropped."""

from pathlib import Path

import pytest
import torch

from attncheck.backends import registry
from attncheck.backends.registry import LoadedBackend
from attncheck.cases.loader import load_suite
from attncheck.cases.model import Suite
from attncheck.errors import BackendUnavailableError, DeviceError, SelectionError, UnknownNameError
from attncheck.harness.candidates import (
    choose_backends,
    choose_device,
    load_backends,
    refuse_unavailable,
    suite_device,
    unavailable_reasons,
)
from attncheck.harness.engine import Missing


def suite(*backends: str, device: str | None = None) -> Suite:
    return Suite(
        name="s", description="", cases=(), path=Path("s.yaml"), default_backends=backends, default_device=device
    )


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def without_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = registry.load

    def load(ref: str) -> LoadedBackend:
        if ref == "flex_attention":
            raise BackendUnavailableError("flex_attention", ["no library"])
        return honest(ref)

    monkeypatch.setattr(registry, "load", load)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_the_cpu_is_best_and_cuda_is_refused() -> None:
    assert choose_device(None) == "cpu"
    assert choose_device("cpu") == "cpu"
    with pytest.raises(DeviceError, match="doctor"):
        choose_device("cuda")


@pytest.mark.usefixtures("two_gpus")
def test_with_gpus_the_first_is_best_and_counting_starts_at_0() -> None:
    assert choose_device(None) == "cuda"
    assert choose_device("cuda:1") == "cuda:1"
    assert choose_device("cpu:0") == "cpu"
    with pytest.raises(DeviceError, match="2 GPUs, counted from 0"):
        choose_device("cuda:2")


@pytest.mark.usefixtures("no_gpu")
def test_a_suite_may_wish_for_a_device_and_a_user_decides() -> None:
    device, notes = suite_device([suite(device="cuda")], None)
    assert device == "cpu"
    assert "examined on cpu instead" in notes[0]
    assert suite_device([suite(device="cuda")], "cpu") == ("cpu", ())
    assert suite_device([suite(device="cpu")], None) == ("cpu", ())
    with pytest.raises(DeviceError):
        suite_device([suite(device="cpu")], "cuda")


@pytest.mark.usefixtures("without_flex")
def test_by_default_all_built_in_backends_run_and_what_is_missing_stays_visible() -> None:
    backends, notes = choose_backends([], [suite()], "cpu")
    assert [backend.name for backend in backends] == list(registry.builtin_names())
    assert [backend for backend in backends if isinstance(backend, Missing)] == [
        Missing("flex_attention", "flex_attention", ("no library",))
    ]
    assert notes == ()


@pytest.mark.usefixtures("without_flex")
def test_asked_for_by_name_it_is_refused_with_the_reasons() -> None:
    backends = load_backends(["reference", "flex_attention"])
    with pytest.raises(SelectionError, match="'flex_attention' is unavailable here: no library"):
        refuse_unavailable(backends, "cpu")
    refuse_unavailable(backends[:1], "cpu")


def test_the_same_reference_twice_is_one_backend() -> None:
    assert [backend.name for backend in load_backends(["reference", "reference"])] == ["reference"]
    with pytest.raises(UnknownNameError):
        load_backends(["reference", "nothing"])


def test_wishes_of_a_suite() -> None:
    backends, notes = choose_backends([], [suite("torch_sdpa", "vllm:FLASH_ATTN")], "cpu")
    assert [(backend.name, isinstance(backend, Missing)) for backend in backends] == [
        ("torch_sdpa", False),
        ("vllm:FLASH_ATTN", True),
    ]
    assert notes == ()


def test_wishes_that_cannot_be_met_do_not_leave_a_run_empty() -> None:
    backends, notes = choose_backends([], [suite("vllm:FLASH_ATTN")], "cpu")
    assert [backend.name for backend in backends] == ["vllm:FLASH_ATTN", *registry.builtin_names()]
    assert "the built-in ones run as well" in notes[0]
    assert [backend.name for backend in choose_backends(["reference"], [suite("vllm:X")], "cpu")[0]] == ["reference"]


def test_a_declaration_that_raises_is_not_judged_here(monkeypatch: pytest.MonkeyPatch) -> None:
    (loaded,) = load_backends(["reference"])
    assert isinstance(loaded, LoadedBackend)

    def broken(device: str) -> list[str]:
        raise RuntimeError("no idea")

    monkeypatch.setattr(loaded.backend, "unavailable_reasons", broken)
    assert unavailable_reasons(loaded, "cpu") == ()


def test_by_default_backends_of_the_other_kind_are_left_out_and_named() -> None:
    plain, latent = (load_suite(name).cases[:2] for name in ("decode", "mla"))
    backends, notes = choose_backends([], [suite()], "cpu", plain)
    assert [backend.name for backend in backends] == ["reference", "torch_sdpa", "flex_attention"]
    assert notes == ("not examined, since no case has a latent cache: reference_mla, torch_mla",)
    backends, notes = choose_backends([], [suite()], "cpu", latent)
    assert [backend.name for backend in backends] == ["reference_mla", "torch_mla"]
    assert notes == ("not examined, since every case has a latent cache: reference, torch_sdpa, flex_attention",)
    assert len(choose_backends([], [suite()], "cpu", [*plain, *latent])[0]) == len(registry.builtin_names())
    assert len(choose_backends(["torch_mla"], [suite()], "cpu", plain)[0]) == 1
