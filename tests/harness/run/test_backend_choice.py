"""Choosing a device and backends: what is not there is refused or stays visible, never dropped."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.backends import registry
from attncheck.cases.loader import load_suite
from attncheck.cases.model import Case, Suite
from attncheck.errors import DeviceError, QuestionError, SelectionError, UnknownNameError
from attncheck.harness.driver.observation import Raised
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
from attncheck.reports.run_file.header import BackendInfo

LATENT = ("reference_mla", "torch_mla", "triton_mla")
PLAIN = tuple(name for name in registry.builtin_names() if name not in LATENT)
GONE = not_loaded("flex_attention", ("no library",))


def describe(refs: Sequence[str]) -> list[BackendDescription | QuestionError]:
    """Of the built-in backends flex_attention lacks its library; another reference names nothing."""
    found: list[BackendDescription | QuestionError] = []
    for ref in refs:
        if ref == "flex_attention":
            found.append(GONE)
        elif ref in registry.builtin_names():
            found.append(BackendDescription(info=BackendInfo(name=ref, ref=ref), is_mla=ref in LATENT))
        else:
            found.append(UnknownNameError("backend", ref, ["torch_sdpa"]))
    return found


def choose(
    refs: Sequence[str], suites: Sequence[Suite], cases: Sequence[Case] = ()
) -> tuple[list[str], tuple[str, ...]]:
    """The names of the backends, and the notes."""
    backends, notes = choose_backends(refs, suites, cases, describe)
    return [each.name for each in backends], notes


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


ELSEWHERE = "none of the backends that the suite names can run here: the built-in ones run as well"


@pytest.mark.parametrize(
    ("refs", "wishes", "names", "notes"),
    [
        ([], [], [*registry.builtin_names()], ()),
        (["reference", "reference"], [], ["reference"], ()),
        ([], ["torch_sdpa", "trt:FMHA", "torch_sdpa"], ["torch_sdpa", "trt:FMHA"], ()),
        (["reference"], ["trt:FMHA"], ["reference"], ()),
        (
            [],
            ["trt:FMHA", "flex_attention"],
            ["trt:FMHA", "flex_attention", *(name for name in registry.builtin_names() if name != "flex_attention")],
            (ELSEWHERE,),
        ),
    ],
)
def test_the_backends_are_those_of_the_user_else_of_the_suite_else_the_built_in_ones(
    refs: list[str], wishes: list[str], names: list[str], notes: tuple[str, ...]
) -> None:
    assert choose(refs, [suite(*wishes)]) == (names, notes)
    assert first_refs(refs, [suite(*wishes)]) == tuple(dict.fromkeys(refs or wishes or registry.builtin_names()))


def test_by_default_backends_of_the_other_kind_are_left_out_and_named() -> None:
    plain, latent = (load_suite(name).cases[:1] for name in ("decode", "mla"))
    note = "not examined, since no case has a latent cache: reference_mla, torch_mla, triton_mla"
    assert choose([], [suite()], plain) == ([*PLAIN], (note,))
    note = f"not examined, since every case has a latent cache: {', '.join(PLAIN)}"
    assert choose([], [suite()], latent) == ([*LATENT], (note,))
    assert choose([], [suite()], [*plain, *latent]) == ([*registry.builtin_names()], ())
    assert choose(["torch_mla"], [suite()], plain) == (["torch_mla"], ())


def test_what_cannot_run_here_stays_visible_and_is_refused_by_name() -> None:
    backends, _ = choose_backends(["reference", "flex_attention"], [suite()], (), describe)
    assert backends[1] == GONE
    with pytest.raises(SelectionError, match=r"^backend 'flex_attention' is unavailable here: no library$"):
        refuse_unavailable(backends)
    refuse_unavailable(backends[:1])
    (_, unknown), _ = choose_backends([], [suite("torch_sdpa", "trt:FMHA")], (), describe)
    assert unknown.unavailable_reasons[0].startswith("unknown backend 'trt:FMHA'")
    with pytest.raises(UnknownNameError):
        choose(["reference", "nothing"], [suite()])


def test_two_backends_of_one_name_are_refused() -> None:
    with pytest.raises(SelectionError, match=r"^two of the backends are called 'mine'; examine them in two runs$"):
        choose_backends(
            ["a.py:mine", "b.py:mine"], [suite()], (), lambda refs: [not_loaded(ref, (), "mine") for ref in refs]
        )


@pytest.mark.parametrize(
    ("failures", "message"),
    [
        ([ProcessEnd("killed by SIGSEGV"), Raised(IMPORT, "ImportError", "no b")], ""),
        ([Raised(IMPORT, "ImportError", "no a"), Raised(OURSELVES, "ImportError", "no b")], ""),
        ([Raised(IMPORT, "ImportError", "no a"), Raised(IMPORT, "ImportError", "no b")], "no a\nno b"),
    ],
)
def test_a_failure_at_the_import_is_a_backend_of_the_run_unless_all_raise(
    failures: list[ProcessEnd | Raised], message: str
) -> None:
    found = [not_loaded(ref, failure) for ref, failure in zip("ab", failures, strict=True)]
    if message:
        with pytest.raises(QuestionError, match=f"^{message}$"):
            choose_backends(["a", "b"], [suite()], (), lambda _refs: found)
    else:
        assert choose_backends(["a", "b"], [suite()], (), lambda _refs: found) == (tuple(found), ())
