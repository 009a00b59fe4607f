"""Backends in this process: their descriptions, and the environment they require."""

import sys
from types import ModuleType

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

    def __getattr__(self, name):
        raise ImportError(name)


def test_files_of_the_same_name_in_two_folders_share_a_digest_of_both(tmp_path, monkeypatch):
    files = [tmp_path / root / "kernel.so" for root in ("one", "two")]
    for file in files:
        file.parent.mkdir()
        file.write_text("as built")
        module = ModuleType(file.parent.name)
        module.__file__ = str(file)
        monkeypatch.setitem(sys.modules, f"{file.parent.name}_of_this_test", module)
        monkeypatch.syspath_prepend(file.parent)
    monkeypatch.setitem(sys.modules, "lazy_of_this_test", Lazy())
    digests = {loaded_files()["kernel.so"]}
    for file in files:
        file.write_text("edited")
        digests.add(loaded_files()["kernel.so"])
    assert len(digests) == 3


TEXT = """\
import torch
from attncheck.backends.candidates.torch_sdpa import SDPABackend

torch.set_default_dtype(torch.float64)

class Needy(SDPABackend):
    @classmethod
    def required_environment(cls, device): return {"ATTNCHECK_TEST_NEED": device}

    @classmethod
    def default_suite(cls, device): return "interpreted"

class NoName(SDPABackend):
    get_name = staticmethod(lambda: None)

class RaisesName(SDPABackend):
    get_name = staticmethod(lambda: 1 / 0)

class NoImpl(SDPABackend):
    get_impl_cls = staticmethod(lambda: None)

class NoSuite(SDPABackend):
    default_suite = classmethod(lambda cls, device: None)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(TEXT)
    return str(path)


@pytest.fixture
def backend():
    loaded = load_backend("torch_sdpa")
    assert isinstance(loaded, LoadedBackend)
    return loaded


def test_a_description_has_what_the_class_declares_and_a_wrong_name_is_an_error_in_its_place(backend):
    found, wrong, latent = ThisProcess().describe(["torch_sdpa", "torch_spda", "torch_mla"])
    assert isinstance(wrong, QuestionError)
    assert isinstance(found, BackendDescription)
    assert found.features == backend.backend.features
    assert found.info.conventions["lse_base"] == backend.backend.conventions.lse_base
    assert (found.name, found.is_loaded, found.is_mla, found.unavailable_reasons) == ("torch_sdpa", True, False, ())
    assert isinstance(latent, BackendDescription)
    assert latent.is_mla


def test_a_backend_that_requires_an_environment_is_usable_where_it_is_set(file, monkeypatch):
    here = ThisProcess()
    (description,) = here.describe([f"{file}:Needy"])
    assert torch.get_default_dtype() == torch.float32  # what a module sets for the process is undone
    assert isinstance(description, BackendDescription)
    assert description.unavailable_reasons == snapshot(
        ("this process must have been started with ATTNCHECK_TEST_NEED=cpu: type it before the command",)
    )
    assert (description.is_loaded, description.default_suite) == (False, "interpreted")
    run = Run(RunOptions(), select_cases(["smoke"]), RunPlan(()), environment_of("cpu"), (description,))
    assert here.examiner(run).plan.backends == (description,)
    monkeypatch.setenv("ATTNCHECK_TEST_NEED", "cpu")
    (usable,) = ThisProcess().describe([f"{file}:Needy"])
    assert isinstance(usable, BackendDescription)
    assert usable.unavailable_reasons == ()
    assert usable.info.required_environment == {"ATTNCHECK_TEST_NEED": "cpu"}


def raises(*_args):
    raise RuntimeError("no idea")


NO_ENVIRONMENT = "no dict of names to texts"


@pytest.mark.parametrize(
    ("member", "answer", "message"),
    [
        *(
            ("required_environment", lambda *_, given=given: given, NO_ENVIRONMENT)
            for given in (None, {"A": 1}, {"A": "a\0b"}, {"": "1"}, {"A=": "1"}, {"A": "\ud800"}, ["A=1"])
        ),
        ("required_environment", raises, "required_environment raised RuntimeError: no idea"),
        ("is_mla", raises, "is_mla raised RuntimeError: no idea"),
        ("is_mla", lambda: "no", "is_mla answered 'no', neither True nor"),
    ],
)
def test_a_wrong_declaration_is_a_wrong_backend(backend, monkeypatch, member, answer, message):
    monkeypatch.setattr(backend.backend, member, answer)
    with pytest.raises(BackendLoadError, match=message):
        describe_backend(backend, "cpu")


def test_reasons_that_raise_are_left_to_the_examination_and_odd_ones_are_spelled_out(backend, monkeypatch):
    monkeypatch.setattr(backend.backend, "unavailable_reasons", raises)
    assert unavailable_reasons(backend, "cpu") == ()
    monkeypatch.setattr(backend.backend, "unavailable_reasons", lambda device: ["no \ud800 here"])
    assert describe_backend(backend, "cpu").unavailable_reasons == (r"no \ud800 here",)


def test_a_declaration_that_breaks_the_contract_costs_that_backend_only(file):
    broken = ("NoName", "RaisesName", "NoImpl", "NoSuite")
    refs = [f"{file}:{name}" for name in broken]
    options = RunOptions(backends=(*refs, "reference"), device="cpu")
    here = ThisProcess()
    run = Run.open(select_cases(["smoke"], ["decode.float16"], ["numerics"]), options, here)
    run.examine(here.examiner(run))
    *errored, passed = [(each.backend, each.outcome, getattr(each, "stage", "")) for each in run.records]
    assert errored == [(name, "errored", "the import") for name in broken]
    assert passed == ("reference", "passed", "")
