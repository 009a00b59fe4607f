"""Which backends a run takes, and how they are loaded."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.backends import registry
from attncheck.backends.registry import LoadedBackend
from attncheck.cases.loader import load_suite
from attncheck.cases.model import Suite
from attncheck.errors import BackendLoadError, DeviceError, QuestionError, SelectionError, UnknownNameError
from attncheck.harness.device import Cuda
from attncheck.harness.driver.observation import Raised
from attncheck.harness.run.backend_loading import (
    ThisProcess,
    describe_backend,
    load_backend,
    loaded_files,
    unavailable_reasons,
)
from attncheck.harness.run.evaluate import environment_of
from attncheck.harness.run.options import RunOptions
from attncheck.harness.run.outcomes import IMPORT, OURSELVES, BackendDescription, ProcessEnd, not_loaded
from attncheck.harness.run.preparation import (
    choose_backends,
    choose_device,
    first_refs,
    gpu_variables,
    gpus_alike,
    refuse_other_gpu,
    refuse_unavailable,
    suite_device,
)
from attncheck.harness.run.run import Run
from attncheck.harness.run.selection import RunPlan, select_cases
from attncheck.reports.run_file.header import BackendInfo

BUILTIN = [*registry.builtin_names()]
LATENT = ["reference_mla", "torch_mla", "triton_mla"]
STATE = ["reference_state", "torch_state"]
PLAIN = [name for name in BUILTIN if name not in LATENT + STATE]
GONE = not_loaded("flex_attention", ("no library",))


def describe(refs):
    """Of the built-in backends flex_attention lacks its library; another reference names nothing."""
    known = {
        ref: BackendDescription(info=BackendInfo(name=ref, ref=ref), is_mla=ref in LATENT, is_ssm=ref in STATE)
        for ref in BUILTIN
    }
    known |= {"flex_attention": GONE}
    return [known.get(ref, UnknownNameError("backend", ref, ["torch_sdpa"])) for ref in refs]


def choose(refs, wishes, cases=()):
    """The names of the backends, and the notes; ``wishes``: the backends of the suite."""
    backends, notes = choose_backends(refs, [suite(*wishes)], cases, describe)
    return [each.name for each in backends], notes


def suite(*backends):
    return Suite(name="s", description="", cases=(), path=Path("s.yaml"), default_backends=backends)


def gpu(uuid, *, name="H100", minor=0, memory=80):
    sizes = {"total_memory": memory * 2**30, "L2_cache_size": 50 * 2**20, "multi_processor_count": 132}
    return SimpleNamespace(name=name, major=9, minor=minor, uuid=uuid, **sizes)


def machine(monkeypatch, *gpus):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpus[index])


def test_without_a_gpu_the_cpu_is_best_and_cuda_is_refused(monkeypatch):
    machine(monkeypatch)
    assert choose_device(None) == choose_device("cpu") == "cpu"
    with pytest.raises(DeviceError, match="give --device cpu, or "):
        choose_device("cuda")
    device, (note,) = suite_device(["cuda"], None)
    assert device == "cpu"
    assert "examined on cpu instead" in note
    assert suite_device(["cuda"], "cpu") == suite_device(["cpu"], None) == ("cpu", ())
    with pytest.raises(DeviceError):
        suite_device(["cpu"], "cuda")


def test_with_gpus_the_first_is_best_and_counting_starts_at_0(monkeypatch):
    machine(monkeypatch, gpu("a"), gpu("b"))
    chosen = [choose_device(wanted) for wanted in (None, "cuda:1", "cpu:0")]
    assert chosen == ["cuda", "cuda:1", "cpu"]
    with pytest.raises(DeviceError, match=r"^device 'cuda:2': this machine has 2 GPUs, counted from 0$"):
        choose_device("cuda:2")


BOTH = {"HIP_VISIBLE_DEVICES": "3,1", "CUDA_VISIBLE_DEVICES": "0,2"}


@pytest.mark.parametrize(
    ("hip", "count", "given", "expected"),
    [
        (None, 2, {}, ["0", "1"]),
        (None, 2, {"CUDA_VISIBLE_DEVICES": "3,1"}, ["3", "1"]),
        (None, 2, {"CUDA_VISIBLE_DEVICES": "GPU-aa, GPU-bb"}, ["GPU-aa", "GPU-bb"]),
        (None, 2, {"CUDA_VISIBLE_DEVICES": "5,4,-1,2"}, ["5", "4"]),
        (None, 1, {"CUDA_VISIBLE_DEVICES": "MIG-aa,MIG-bb"}, ["MIG-aa"]),
        (None, 2, {"HIP_VISIBLE_DEVICES": "3,1"}, ["0", "1"]),
        ("6.4", 2, {}, ["0", "1"]),
        ("6.4", 2, BOTH, ["3", "1"]),
        ("6.4", 2, {"CUDA_VISIBLE_DEVICES": "2,3"}, ["2", "3"]),
        ("6.4", 2, {"ROCR_VISIBLE_DEVICES": "2,3"}, ["0", "1"]),
    ],
)
def test_each_process_sees_one_of_the_gpus_that_are_visible(monkeypatch, hip, count, given, expected):
    monkeypatch.setattr(torch.version, "hip", hip)
    names = ["HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"] if hip else ["CUDA_VISIBLE_DEVICES"]
    found = gpu_variables(count, given, Cuda.visible_variables())
    assert found == [dict.fromkeys(names, each) for each in expected]


def test_gpus_of_another_kind_than_the_first_are_left_out_with_a_note(monkeypatch):
    machine(monkeypatch, gpu("a"), gpu("b", memory=40), gpu("c"), gpu("d", minor=1), gpu("e", name="H200"))
    gpus, notes = gpus_alike("cuda")
    assert [(each.uuid, each.variables["CUDA_VISIBLE_DEVICES"]) for each in gpus] == [("a", "0"), ("c", "2")]
    assert [note.partition(" (")[0] for note in notes] == ["GPU 1", "GPU 3", "GPU 4"]
    assert notes[0] == (
        "GPU 1 (H100, compute capability 9.0, 40.0 GiB) is not used: it is not of the kind of GPU 0 "
        "(H100, compute capability 9.0, 80.0 GiB)"
    )
    assert [gpus_alike(device) for device in ("cpu", "cuda:1")] == [((), ())] * 2


def test_a_process_on_another_gpu_or_in_another_environment_is_refused(monkeypatch):
    here = environment_of("cpu")
    monkeypatch.setattr("attncheck.harness.run.evaluate.collect_environment", lambda device: here)
    machine(monkeypatch, gpu("a"))
    refuse_other_gpu("cuda", "a", here)
    with pytest.raises(QuestionError, match=r"^the process sees the GPUs a, and has to use b alone$"):
        refuse_other_gpu("cuda", "b", here)
    with pytest.raises(QuestionError, match=r"^driver on GPU a is None, and '570.1' in the run$"):
        refuse_other_gpu("cuda", "a", here.model_copy(update={"driver": "570.1"}))
    machine(monkeypatch, gpu("a"), gpu("b"))
    with pytest.raises(QuestionError, match=r"^the process sees the GPUs a, b, and has to use a alone$"):
        refuse_other_gpu("cuda", "a", here)


ELSEWHERE = "none of the backends that the suite names can run here: the built-in ones run as well"
LACKING = ["trt:FMHA", "flex_attention"]


@pytest.mark.parametrize(
    ("refs", "wishes", "names", "notes"),
    [
        ([], [], BUILTIN, ()),
        (["reference", "reference"], [], ["reference"], ()),
        ([], ["torch_sdpa", "trt:FMHA", "torch_sdpa"], ["torch_sdpa", "trt:FMHA"], ()),
        (["reference"], ["trt:FMHA"], ["reference"], ()),
        ([], LACKING, list(dict.fromkeys(LACKING + BUILTIN)), (ELSEWHERE,)),
    ],
)
def test_the_backends_are_those_of_the_user_else_of_the_suite_else_the_built_in_ones(refs, wishes, names, notes):
    assert choose(refs, wishes) == (names, notes)
    assert first_refs(refs, [suite(*wishes)]) == tuple(dict.fromkeys(refs or wishes or BUILTIN))


def test_by_default_backends_of_the_other_kind_are_left_out_and_named():
    plain, latent, state = (load_suite(name).cases[:1] for name in ("decode", "mla", "state"))
    no_latent = f"not examined, since no case has a latent cache: {', '.join(LATENT)}"
    no_state = f"not examined, since no case has a state: {', '.join(STATE)}"
    assert choose([], [], plain) == (PLAIN, (no_latent, no_state))
    only_latent = f"not examined, since every case has a latent cache: {', '.join(PLAIN)}"
    assert choose([], [], latent) == (LATENT, (no_state, only_latent))
    only_state = f"not examined, since every case has a state: {', '.join(PLAIN)}"
    assert choose([], [], state) == (STATE, (no_latent, only_state))
    either = f"not examined, since every case has a latent cache or a state: {', '.join(PLAIN)}"
    assert choose([], [], [*latent, *state]) == (LATENT + STATE, (either,))
    assert choose([], [], [*plain, *latent, *state]) == (BUILTIN, ())
    assert choose(["torch_mla"], [], plain) == (["torch_mla"], ())


def test_what_cannot_run_here_stays_visible_and_is_refused_by_name():
    backends, _ = choose_backends(["reference", "flex_attention"], [suite()], (), describe)
    assert backends[1] == GONE
    with pytest.raises(SelectionError, match=r"^backend 'flex_attention' is unavailable here: no library$"):
        refuse_unavailable(backends)
    refuse_unavailable(backends[:1])
    (_, unknown), _ = choose_backends([], [suite("torch_sdpa", "trt:FMHA")], (), describe)
    assert unknown.unavailable_reasons[0].startswith("unknown backend 'trt:FMHA'")
    with pytest.raises(UnknownNameError):
        choose(["reference", "nothing"], [])


def test_two_backends_of_one_name_are_refused():
    named_alike = [not_loaded(f"{file}.py:mine", (), "mine") for file in "ab"]
    with pytest.raises(SelectionError, match=r"^two of the backends are called 'mine'; examine them in two runs$"):
        choose_backends(["a.py:mine", "b.py:mine"], [suite()], (), lambda _refs: named_alike)


@pytest.mark.parametrize(
    ("failures", "message"),
    [
        ([ProcessEnd("killed by SIGSEGV"), Raised(IMPORT, "ImportError", "no b")], ""),
        ([Raised(IMPORT, "ImportError", "no a"), Raised(OURSELVES, "ImportError", "no b")], ""),
        ([Raised(IMPORT, "ImportError", "no a"), Raised(IMPORT, "ImportError", "no b")], "no a\nno b"),
    ],
)
def test_a_failure_at_the_import_is_a_backend_of_the_run_unless_all_raise(failures, message):
    found = [not_loaded(ref, failure) for ref, failure in zip("ab", failures, strict=True)]
    if message:
        with pytest.raises(QuestionError, match=f"^{message}$"):
            choose_backends(["a", "b"], [suite()], (), lambda _refs: found)
    else:
        assert choose_backends(["a", "b"], [suite()], (), lambda _refs: found) == (tuple(found), ())


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
