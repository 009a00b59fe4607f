"""Choosing a device and backends: what is not there is refused or stays visible, never dropped."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.backends import registry
from attncheck.backends.registry import LoadedBackend
from attncheck.cases.loader import load_suite
from attncheck.cases.model import Case, Suite
from attncheck.errors import BackendUnavailableError, DeviceError, QuestionError, SelectionError, UnknownNameError
from attncheck.harness.driver.observation import Raised
from attncheck.harness.run.backend_loading import ThisProcess
from attncheck.harness.run.outcomes import (
    IMPORT,
    OURSELVES,
    BackendDescription,
    ProcessEnd,
    not_loaded,
)
from attncheck.harness.run.preparation import (
    choose_backends,
    choose_device,
    first_refs,
    refuse_unavailable,
    suite_device,
)


def choose(
    refs: Sequence[str], suites: Sequence[Suite], cases: Sequence[Case] = ()
) -> tuple[tuple[BackendDescription, ...], tuple[str, ...]]:
    return choose_backends(refs, suites, cases, ThisProcess().describe)


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
    with pytest.raises(DeviceError, match="give --device cpu, or "):
        choose_device("cuda")


@pytest.mark.usefixtures("two_gpus")
def test_with_gpus_the_first_is_best_and_counting_starts_at_0() -> None:
    assert choose_device(None) == "cuda"
    assert choose_device("cuda:1") == "cuda:1"
    assert choose_device("cpu:0") == "cpu"
    with pytest.raises(DeviceError) as refused:
        choose_device("cuda:2")
    assert str(refused.value) == snapshot("device 'cuda:2': this machine has 2 GPUs, counted from 0")


@pytest.mark.usefixtures("no_gpu")
def test_a_suite_may_wish_for_a_device_and_a_user_decides() -> None:
    device, notes = suite_device(["cuda"], None)
    assert device == "cpu"
    assert "examined on cpu instead" in notes[0]
    assert suite_device(["cuda"], "cpu") == ("cpu", ())
    assert suite_device(["cpu"], None) == ("cpu", ())
    with pytest.raises(DeviceError):
        suite_device(["cpu"], "cuda")


@pytest.mark.usefixtures("without_flex")
def test_by_default_all_built_in_backends_run_and_what_is_missing_stays_visible() -> None:
    backends, notes = choose([], [suite()])
    assert [backend.name for backend in backends] == list(registry.builtin_names())
    assert [backend for backend in backends if not backend.is_loaded] == [not_loaded("flex_attention", ("no library",))]
    assert notes == ()


@pytest.mark.usefixtures("without_flex")
def test_an_unavailable_backend_requested_by_name_is_refused_with_the_reasons() -> None:
    backends, _ = choose(["reference", "flex_attention"], [suite()])
    with pytest.raises(SelectionError) as refused:
        refuse_unavailable(backends)
    assert str(refused.value) == snapshot("backend 'flex_attention' is unavailable here: no library")
    refuse_unavailable(backends[:1])


def test_the_same_reference_twice_is_one_backend() -> None:
    backends, _ = choose(["reference", "reference"], [suite()])
    assert [backend.name for backend in backends] == ["reference"]
    with pytest.raises(UnknownNameError):
        choose(["reference", "nothing"], [suite()])


def test_two_backends_of_one_name_are_refused() -> None:
    with pytest.raises(SelectionError) as refused:
        choose_backends(
            ["a.py:mine", "b.py:mine"], [suite()], (), lambda refs: [not_loaded(ref, (), "mine") for ref in refs]
        )
    assert str(refused.value) == snapshot("two of the backends are called 'mine'; examine them in two runs")


@pytest.mark.parametrize("failure", [ProcessEnd("killed by SIGSEGV"), Raised(IMPORT, "ImportError", "no module")])
def test_one_whose_code_fails_as_it_is_loaded_stays_beside_others(failure: ProcessEnd | Raised) -> None:
    found = {
        "./mine.py:Mine": not_loaded("./mine.py:Mine", failure),
        "other.py": not_loaded("other.py", ProcessEnd("died")),
    }
    backends, _ = choose_backends([*found], [suite()], (), lambda refs: [found[ref] for ref in refs])
    assert [(backend.name, backend.is_loaded) for backend in backends] == [("Mine", False), ("other", False)]
    assert backends[0].failure == failure


def test_where_all_raise_as_they_are_imported_the_question_is_wrong() -> None:
    with pytest.raises(QuestionError) as refused:
        choose_backends(
            ["a", "b"],
            [suite()],
            (),
            lambda refs: [not_loaded(ref, Raised(IMPORT, "ImportError", f"no {ref}")) for ref in refs],
        )
    assert str(refused.value) == "no a\nno b"


def test_wishes_of_a_suite(plain: Callable[[str], str]) -> None:
    assert first_refs([], [suite("torch_sdpa", "trt:FMHA"), suite("torch_sdpa")]) == ("torch_sdpa", "trt:FMHA")
    backends, notes = choose([], [suite("torch_sdpa", "trt:FMHA")])
    assert [(backend.name, backend.is_loaded) for backend in backends] == [("torch_sdpa", True), ("trt:FMHA", False)]
    assert plain(backends[1].unavailable_reasons[0]) == snapshot(
        "backend 'trt:FMHA': importing it raised ModuleNotFoundError: No module named 'trt'; registered names are ..."
    )
    assert notes == ()


@pytest.mark.usefixtures("without_flex")
def test_wishes_that_cannot_be_met_do_not_leave_a_run_empty() -> None:
    backends, notes = choose([], [suite("trt:FMHA", "flex_attention")])
    others = [name for name in registry.builtin_names() if name != "flex_attention"]
    assert [backend.name for backend in backends] == ["trt:FMHA", "flex_attention", *others]
    assert notes[0] == snapshot("none of the backends that the suite names can run here: the built-in ones run as well")
    assert [backend.name for backend in choose(["reference"], [suite("trt:X")])[0]] == ["reference"]


def test_a_default_backend_that_breaks_is_no_wrong_question() -> None:
    def describe(refs: Sequence[str]) -> list[BackendDescription | QuestionError]:
        return [QuestionError("its process ended") if ref == "torch_sdpa" else not_loaded(ref, ()) for ref in refs]

    backends, _ = choose_backends([], [suite()], (), describe)
    assert backends[1] == not_loaded("torch_sdpa", ("its process ended",))
    with pytest.raises(QuestionError) as refused:
        choose_backends(["torch_sdpa"], [suite()], (), describe)
    assert str(refused.value) == "its process ended"


@pytest.mark.parametrize("stage", [IMPORT, OURSELVES])
def test_backends_that_all_raise_are_a_wrong_question_unless_it_is_our_fault(stage: str) -> None:
    error = Raised(stage, "ValueError", "no such table")

    def choose_them() -> tuple[BackendDescription, ...]:
        return choose_backends(["mine"], [suite()], (), lambda refs: [not_loaded(ref, error) for ref in refs])[0]

    if stage == OURSELVES:
        assert [each.reason for each in choose_them()] == ["no such table"]
    else:
        with pytest.raises(QuestionError) as refused:
            choose_them()
        assert str(refused.value) == "no such table"


def test_by_default_backends_of_the_other_kind_are_left_out_and_named() -> None:
    plain, latent = (load_suite(name).cases[:2] for name in ("decode", "mla"))
    backends, notes = choose([], [suite()], plain)
    latent_ones = ["reference_mla", "torch_mla", "triton_mla"]
    plain_ones = [name for name in registry.builtin_names() if name not in latent_ones]
    assert [backend.name for backend in backends] == plain_ones
    assert notes == snapshot(("not examined, since no case has a latent cache: reference_mla, torch_mla, triton_mla",))
    backends, notes = choose([], [suite()], latent)
    assert [backend.name for backend in backends] == latent_ones
    assert notes == (f"not examined, since every case has a latent cache: {', '.join(plain_ones)}",)
    assert len(choose([], [suite()], [*plain, *latent])[0]) == len(registry.builtin_names())
    assert len(choose(["torch_mla"], [suite()], plain)[0]) == 1
