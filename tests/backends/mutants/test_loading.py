"""Mutants load with their fault, and what judges them keeps its own code."""

import linecache
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from inline_snapshot import snapshot

from attncheck import reference
from attncheck.backends import registry
from attncheck.backends.contract import AttentionBackend
from attncheck.backends.mutants import loading
from attncheck.backends.mutants.catalogue import Mutant, catalogue
from attncheck.backends.paged import PagedImpl
from attncheck.cases.loader import load_suite
from attncheck.errors import BackendLoadError, BackendUnavailableError, QuestionError, UnknownNameError
from attncheck.harness.providers.provider import load_provider
from attncheck.harness.run.evaluation import Examiner, RunPlan
from attncheck.reference import varlen_attention

PATCH = {"area": "own", "kind": "own", "fault": "own"}


@pytest.fixture
def mutant(monkeypatch):
    """Adds a mutant of one test to the catalogue, and loads it."""

    def load(name, **fields):
        found = Mutant.model_validate({"name": name, **PATCH, **fields})
        monkeypatch.setattr(loading, "mutant_of", lambda _: found)
        return loading.MutantBackend.from_argument(name)

    return load


def test_mutants_without_a_case_load():
    """``test_caught`` loads all others."""
    for each in catalogue():
        if each.case:
            continue
        if each.is_provider:
            provider = load_provider(each.ref)
            assert {key for key in reference.__all__ if provider.find(key) is None} == set(), each.name
            continue
        try:
            loaded = registry.load(each.ref)
        except BackendUnavailableError:  # the library of its base is not installed
            continue
        assert issubclass(loaded.backend, AttentionBackend)
        assert (loaded.name, loaded.ref) == (each.ref, each.ref)


def test_copies_are_private_and_all_other_modules_the_real_ones(mutant):
    fault = {"file": "reference/attention/online_softmax.py", "old": "def attend(", "new": "def attend("}
    fault |= {"base": "reference"}
    copy, right = mutant("no-change", **fault), registry.load("reference").backend
    assert copy.__module__ == "attncheck_mutants.no_change.attncheck.backends.candidates.reference"
    names = vars(sys.modules[copy.__module__])
    assert names["varlen_attention"] is not varlen_attention
    assert names["PagedImpl"] is PagedImpl
    assert right.get_impl_cls().attend.__globals__["varlen_attention"] is varlen_attention


@pytest.mark.parametrize("base", sorted({each.base for each in catalogue() if each.old and not each.is_provider}))
def test_a_copy_without_a_fault_is_right(base, mutant):
    """Of every patched module at once, since each patch copies what leads to its own."""
    patches = {each.file: each for each in catalogue() if each.base == base and each.old}
    suite = "interpreted" if "triton" in base else "smoke"
    ids = ("decode", "decode.float16", "latent", "mla-decode")
    cases = tuple(case for case in load_suite(suite).cases if case.id in ids)
    for file, each in patches.items():
        name = f"right-{Path(file).stem.replace('_', '-')}"
        backend = mutant(name, base=base, file=file, old=each.old, new=each.old)
        if backend.unavailable_reasons("cpu"):
            pytest.skip(f"{base} cannot run here")
        records = list(Examiner(RunPlan(cases, (registry.load_object(backend),), ("numerics", "cache_write"))).run())
        assert {record.outcome for record in records} >= {"passed"}
        assert {record.outcome for record in records} <= {"passed", "unsupported"}, records


def test_the_source_of_a_patch_can_be_read(mutant):
    patched = mutant("readable", base="torch_sdpa", file="backends/candidates/torch_sdpa.py", old="= 16", new="= 17")
    file = "mutants:readable/backends/candidates/torch_sdpa.py"
    assert sys.modules[patched.__module__].UNIFORM_ROWS == 17
    assert "UNIFORM_ROWS = 17\n" in linecache.getlines(file)


def test_operators_of_a_patch_have_names_of_their_own(mutant):
    pytest.importorskip("triton")
    before = torch.ops.attncheck.reshape_and_cache if hasattr(torch.ops.attncheck, "reshape_and_cache") else None
    file = "backends/candidates/triton_unified/kernels/shared.py"
    patched = mutant("operators", base="triton_unified", file=file, old="size < 0.25", new="size < 0.2")
    assert set(patched.functions()) == {"reshape_and_cache", "merge_attn_states"}  # imports the operators
    assert hasattr(torch.ops.attncheck_mutants_operators, "reshape_and_cache")
    assert before is None or torch.ops.attncheck.reshape_and_cache is before


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"file": "backends/paged.py", "old": "Tensor | None,\n", "new": "x"},
            snapshot(
                "backend 'mutants:own': its old text occurs 6 times in backends/paged.py; it must occur exactly once"
            ),
        ),
        (
            {"old": ["scores * self.scale", "nowhere"], "new": ["scores", "x"]},
            snapshot(
                "backend 'mutants:own': its old text occurs 0 times in backends/mutants/plain.py; it must occur exactly once"
            ),
        ),
        (
            {"file": "backends/uniform.py", "old": "import", "new": "x"},
            snapshot("backend 'mutants:own': plain does not import backends/uniform.py"),
        ),
        (
            {"base": "utilities", "file": "backends/paged.py", "old": "a", "new": "b"},
            snapshot("backend 'mutants:own': is a provider of utilities; give --provider mutants:own"),
        ),
    ],
)
def test_a_patch_that_does_not_fit_is_refused(mutant, fields, words):
    with pytest.raises(BackendLoadError) as refused:
        mutant("own", **fields)
    assert str(refused.value) == words


def test_unknown_names_are_refused_with_the_near_ones():
    near = catalogue()[0].name
    with pytest.raises(UnknownNameError, match=f"did you mean '{near}'"):
        registry.load(f"mutants:{near}x")
    with pytest.raises(QuestionError):
        registry.load("mutants")
    with pytest.raises(BackendLoadError, match="give --backend"):
        load_provider(next(each.ref for each in catalogue() if not each.is_provider))


def test_no_list_names_mutants():
    assert "mutants" not in {*registry.known_names(), *registry.builtin_names()}


def test_the_catalogue_loads_no_torch():
    code = "import attncheck.backends.mutants.catalogue as c, sys; c.catalogue(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
