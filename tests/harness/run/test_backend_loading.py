"""Backends in this process: their descriptions, and the environment they require."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.backends.registry import LoadedBackend
from attncheck.errors import BackendLoadError, QuestionError
from attncheck.harness.run.backend_loading import (
    ThisProcess,
    describe_backend,
    load_backend,
    loaded_files,
    unavailable_reasons,
)
from attncheck.harness.run.evaluate import environment_of
from attncheck.harness.run.options import RunOptions
from attncheck.harness.run.outcomes import BackendDescription
from attncheck.harness.run.run import Run
from attncheck.harness.run.selection import RunPlan, select_cases


class Lazy:
    """Raises for each attribute, as what a library may put into ``sys.modules``."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError(name)


def test_files_of_the_same_name_in_two_folders_share_a_digest_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for root in ("one", "two"):
        (tmp_path / root).mkdir()
        (tmp_path / root / "kernel.so").write_text(root)
        module = ModuleType(root)
        module.__file__ = str(tmp_path / root / "kernel.so")
        monkeypatch.setitem(sys.modules, f"{root}_of_this_test", module)
        monkeypatch.syspath_prepend(tmp_path / root)
    monkeypatch.setitem(sys.modules, "lazy_of_this_test", Lazy())  # type: ignore[arg-type]
    digests = {loaded_files()["kernel.so"]}
    for root in ("one", "two"):
        (tmp_path / root / "kernel.so").write_text(f"{root}, edited")
        digests.add(loaded_files()["kernel.so"])
    assert len(digests) == 3


TEXT = """\
import torch
from attncheck.backends.candidates.torch_mla import TorchMLABackend
from attncheck.backends.candidates.torch_sdpa import SDPABackend

torch.set_default_dtype(torch.float64)

class Needy(SDPABackend):
    @classmethod
    def required_environment(cls, device): return {"ATTNCHECK_TEST_NEED": device}

    @classmethod
    def default_suite(cls, device): return "interpreted"

class Latent(TorchMLABackend):
    pass
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(TEXT)
    return str(path)


def of(ref: str) -> LoadedBackend:
    backend = load_backend(ref)
    assert isinstance(backend, LoadedBackend)
    return backend


def described(ref: str) -> BackendDescription:
    (description,) = ThisProcess().describe([ref])
    assert isinstance(description, BackendDescription)
    return description


def test_a_description_has_what_the_class_declares() -> None:
    description = described("torch_sdpa")
    backend = of("torch_sdpa").backend
    assert description.features == backend.features
    assert description.info.conventions["lse_base"] == backend.conventions.lse_base
    assert (description.name, description.is_loaded, description.is_mla) == ("torch_sdpa", True, False)
    assert description.unavailable_reasons == ()


def test_a_latent_backend_is_described_as_one(file: str) -> None:
    assert described(f"{file}:Latent").is_mla


def test_what_a_module_sets_for_the_process_is_undone(file: str) -> None:
    of(f"{file}:Latent")
    assert torch.get_default_dtype() == torch.float32


def test_a_backend_that_requires_an_environment_is_usable_where_it_is_set(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = ThisProcess()
    (description,) = here.describe([f"{file}:Needy"])
    assert isinstance(description, BackendDescription)
    assert description.unavailable_reasons == snapshot(
        ("this process must have been started with ATTNCHECK_TEST_NEED=cpu: type it before the command",)
    )
    assert (description.is_loaded, description.default_suite) == (False, "interpreted")
    run = Run(RunOptions(), select_cases(["smoke"]), RunPlan(()), environment_of("cpu"), (description,))
    assert here.examiner(run).plan.backends == (description,)
    monkeypatch.setenv("ATTNCHECK_TEST_NEED", "cpu")
    loaded = described(f"{file}:Needy")
    assert loaded.unavailable_reasons == ()
    assert loaded.info.required_environment == {"ATTNCHECK_TEST_NEED": "cpu"}


@pytest.mark.parametrize("answer", [None, {"A": 1}, {"A": "a\0b"}, {"": "1"}, {"A=": "1"}, {"A": "\ud800"}, ["A=1"]])
def test_an_environment_that_is_none_is_a_wrong_backend(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    backend = of("torch_sdpa")
    monkeypatch.setattr(backend.backend, "required_environment", classmethod(lambda cls, device: answer))
    with pytest.raises(BackendLoadError, match="no dict of names to texts"):
        describe_backend(backend, "cpu")


def test_declarations_that_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: str) -> Any:
        raise RuntimeError("no idea")

    backend = of("reference")
    monkeypatch.setattr(backend.backend, "unavailable_reasons", broken)
    assert unavailable_reasons(backend, "cpu") == ()  # an outcome of the examination
    monkeypatch.setattr(backend.backend, "required_environment", broken)
    with pytest.raises(BackendLoadError) as refused:
        describe_backend(backend, "cpu")
    assert str(refused.value) == snapshot("backend 'reference': required_environment raised RuntimeError: no idea")


@pytest.mark.parametrize(
    ("answer", "message"),
    [(lambda: 1 / 0, "raised ZeroDivisionError"), (lambda: "no", "answered 'no', neither True nor")],
)
def test_a_backend_without_an_answer_to_is_mla_is_wrong(
    monkeypatch: pytest.MonkeyPatch, answer: Any, message: str
) -> None:
    backend = of("torch_sdpa")
    monkeypatch.setattr(backend.backend, "is_mla", answer)
    with pytest.raises(BackendLoadError, match=f"is_mla {message}"):
        describe_backend(backend, "cpu")


def test_reasons_that_no_file_could_hold_are_spelled_out(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = of("torch_sdpa")
    monkeypatch.setattr(backend.backend, "unavailable_reasons", lambda device: ["no \ud800 here"])
    assert describe_backend(backend, "cpu").unavailable_reasons == (r"no \ud800 here",)


def test_what_cannot_be_loaded_is_described_in_place() -> None:
    found = ThisProcess().describe(["torch_sdpa", "torch_spda", "reference"])
    assert [isinstance(each, QuestionError) for each in found] == [False, True, False]


BROKEN = """\
from attncheck.backends.candidates.torch_sdpa import SDPABackend

class NoName(SDPABackend):
    get_name = staticmethod(lambda: None)

class RaisesName(SDPABackend):
    get_name = staticmethod(lambda: 1 / 0)

class NoImpl(SDPABackend):
    get_impl_cls = staticmethod(lambda: None)

class NoSuite(SDPABackend):
    default_suite = classmethod(lambda cls, device: None)
"""


def test_a_declaration_that_breaks_the_contract_costs_that_backend_only(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    refs = [f"{tmp_path}/broken.py:{name}" for name in ("NoName", "RaisesName", "NoImpl", "NoSuite")]
    options = RunOptions(backends=(*refs, "reference"), device="cpu")
    here = ThisProcess()
    run = Run.open(select_cases(["smoke"], ["decode.float16"], ["numerics"]), options, here)
    run.examine(here.examiner(run))
    assert [(each.backend, each.outcome, getattr(each, "stage", "")) for each in run.records] == [
        ("NoName", "errored", "the import"),
        ("RaisesName", "errored", "the import"),
        ("NoImpl", "errored", "the import"),
        ("NoSuite", "errored", "the import"),
        ("reference", "passed", ""),
    ]
