"""Entries of the catalogue are read, mutants load with their fault, and what judges them keeps its own code."""

import linecache
import sys
from pathlib import Path

import pytest
import torch

from attncheck import reference
from attncheck.backends import registry
from attncheck.backends.contract import AttentionBackend
from attncheck.backends.mutants import loading
from attncheck.backends.mutants.catalogue import Mutant, catalogue, mutant_of, read_mutants
from attncheck.backends.paged import PagedImpl
from attncheck.cases.loader import load_suite
from attncheck.errors import BackendLoadError, BackendUnavailableError, CaseFileError, QuestionError, UnknownNameError
from attncheck.harness.providers.provider import load_provider
from attncheck.harness.run.evaluate import Examiner, RunPlan
from attncheck.reference import varlen_attention

ENTRY = "- name: a-fault\n  class: Fault\n  kind: window\n"
CODE = 'class Fault:\n    """Something is\n    wrong.\n\n    Much.\n    """\n'
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
    suite = "interpreted" if "triton" in base else "state" if base == "torch_state" else "smoke"
    ids = ("decode", "decode.float16", "latent", "mla-decode", "gdn-decode")
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


def test_a_patch_that_does_not_fit_is_refused(refusals, mutant):
    occurs = "its old text occurs {} times in backends/{}; it must occur exactly once"
    patches = [
        (occurs.format(6, "paged.py"), {"file": "backends/paged.py", "old": "Tensor | None,\n", "new": "x"}),
        (occurs.format(0, "mutants/plain.py"), {"old": ["scores * self.scale", "nowhere"], "new": ["scores", "x"]}),
        ("plain does not import backends/uniform.py", {"file": "backends/uniform.py", "old": "import", "new": "x"}),
        (
            "is a provider of utilities; give --provider mutants:own",
            {"base": "utilities", "file": "backends/paged.py", "old": "a", "new": "b"},
        ),
    ]
    found = refusals(lambda patch: mutant("own", **patch[1]), patches, BackendLoadError)
    assert found == [f"backend 'mutants:own': {reason}" for reason, _ in patches]


def test_unknown_names_are_refused_with_the_near_ones():
    near = catalogue()[0].name
    with pytest.raises(UnknownNameError, match=f"did you mean '{near}'"):
        registry.load(f"mutants:{near}x")
    with pytest.raises(QuestionError):
        registry.load("mutants")
    with pytest.raises(BackendLoadError, match="give --backend"):
        load_provider(next(each.ref for each in catalogue() if not each.is_provider))
    assert "mutants" not in {*registry.known_names(), *registry.builtin_names()}
    names = [mutant.name for mutant in catalogue()]
    assert len(set(names)) == len(names)
    assert mutant_of(names[-1]) == catalogue()[-1]


@pytest.fixture
def read(tmp_path):
    def read(text, code=CODE):
        path = tmp_path / "area.yaml"
        path.write_text(text)
        path.with_suffix(".py").write_text(code)
        return list(read_mutants(path))

    return read


def test_a_mistake_is_named_with_file_entry_and_key(refusals, read):
    either = "Value error, a mutant has either class alone, or old and new, with equally many texts"
    mistakes = [
        ("the file must hold a list of mutants (found 'dict')", "window: 1"),
        ("entry 1: is no mapping (found 'window')", "- window"),
        ("A fault.name: String should match pattern", ENTRY.replace("a-fault", "A fault")),
        ("a-fault.fault: String should have at least 1 character (found '')", ENTRY.replace("Fault", "Other")),
        (f"a-fault: {either}", ENTRY + "  old: x\n"),
        (f"x: {either}", "- name: x\n  kind: y\n  fault: z\n  old: [a, b]\n  new: c\n"),
        ("a-fault.file: String should match pattern", ENTRY + "  file: harness/api.py\n"),
        ("a-fault.cause: Value error, no regular expression: missing )", ENTRY + "  cause: (\n"),
        ("a-fault.check: Value error, no check has this name; known are numerics, lse", ENTRY + "  check: numeric\n"),
        ("a-fault.report: Input should be a valid string (found 12)", ENTRY + "  report: 12\n"),
        ("a-fault.reprot: Extra inputs are not permitted (found 'x')", ENTRY + "  reprot: x\n"),
    ]
    found = refusals(lambda mistake: read(mistake[1]), mistakes, CaseFileError)
    for message, (reason, _) in zip(found, mistakes, strict=True):
        assert message.startswith(f"TMP/area.yaml: {reason}")
