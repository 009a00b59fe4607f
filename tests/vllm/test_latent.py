"""vLLM's latent backends through its own ``MLAAttention``: what they get right, and faults planted in them."""

from collections import Counter
from pathlib import Path

import pytest
import torch

import attncheck
from attncheck.backends import registry
from attncheck.errors import BackendLoadError

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

SUITE = "vllm_latent"
EXPECTED = str(Path(__file__).resolve().parents[2] / "docs" / "expected" / "vllm-mla.yaml")

FAULTY = """
import torch
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl


class Right(CPUMLAImpl):
    pass


class StaleLengths(CPUMLAImpl):
    kept = None

    def forward_mqa(self, q, cache, metadata, layer):
        lengths = metadata.decode.seq_lens
        if self.kept is None or len(self.kept) != len(lengths):
            self.kept = lengths.clone()
        metadata.decode.seq_lens = self.kept
        return super().forward_mqa(q, cache, metadata, layer)


class WritesWithoutASlot(CPUMLAImpl):
    def do_kv_cache_update(self, latent, rotated, cache, slots, *others):
        super().do_kv_cache_update(latent, rotated, cache, slots.clamp(min=0), *others)


class ContextLost(CPUMLAImpl):
    def _compute_prefill_context(self, *arguments, **keywords):
        output, lse = super()._compute_prefill_context(*arguments, **keywords)
        return output, torch.full_like(lse, float("-inf"))


def backend(impl):
    members = {"get_name": staticmethod(lambda: "CPU_MLA"), "get_impl_cls": staticmethod(lambda: impl)}
    return type(impl.__name__, (CPUMLABackend,), members)


impls = (Right, StaleLengths, WritesWithoutASlot, ContextLost)
Right, StaleLengths, WritesWithoutASlot, ContextLost = map(backend, impls)
"""

FAULTS = {
    "Right": set(),
    "StaleLengths": {"builder"},
    "WritesWithoutASlot": {"cache_write"},
    "ContextLost": {"numerics"},
}
CASES = ["decode.16", "extend.16", "padded-decode.16"]


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    path = tmp_path_factory.mktemp("faulty") / "faulty.py"
    path.write_text(FAULTY, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_subclass_is_found_by_the_check_it_is_about(faulty, name):
    checks = ["numerics", "cache_write", "invariance", "builder"]
    run = attncheck.examine(f"vllm:{faulty}:{name}", suite=SUITE, cases=CASES, checks=checks, device="cpu")
    failed = {record.check for record in run.records if record.outcome == "failed"}
    assert failed >= FAULTS[name]
    if not FAULTS[name]:
        assert {record.outcome for record in run.records} == {"passed"}


KNOWN = ("--suite", SUITE, "--expect", EXPECTED)


@pytest.mark.parametrize(("name", "size"), [("CPU_MLA", 16), ("AMX_MLA", 32)])
def test_the_cpu_s_classes_are_right_but_for_what_is_known(run_vllm, tmp_path, name, size):
    if missing := registry.load(f"vllm:{name}").backend.unavailable_reasons("cpu"):
        assert (name, torch.cpu._is_avx512_bf16_supported()) == ("AMX_MLA", False)
        pytest.skip(missing[0])
    records = run_vllm(tmp_path / "run.jsonl", *KNOWN, "--backend", f"vllm:{name}")[0].records
    assert {record.outcome for record in records} == {"passed", "unsupported", "xfailed"}
    passed = {(record.case_id, record.check) for record in records if record.outcome == "passed"}
    for case in ("decode", "prefill", "mixed", "extend", "drafts", "scale", "values", "shared-prefix"):
        assert {(f"{case}.{size}", check) for check in ("numerics", "cache_write", "containment")} <= passed
    levels = {record.graph.measured for record in records if record.graph is not None}
    assert levels == {"NEVER"}


def test_triton_s_class_is_right_interpreted_but_for_what_is_known(run_vllm, tmp_path):
    words = (*KNOWN, "--backend", "vllm:TRITON_MLA", "--case", "triton-*")
    records = run_vllm(tmp_path / "run.jsonl", *words)[0].records
    assert Counter(record.outcome for record in records)["xfailed"] == 3
    passed = {record.case_id for record in records if record.outcome == "passed" and record.check == "numerics"}
    assert passed >= {f"triton-{kind}" for kind in ("decode", "mixed", "parts", "drafts", "block", "codes", "padded")}
    written = [record for record in records if record.check == "cache_write"]
    assert {record.outcome for record in written} == {"unsupported"}
    assert "has no cache writer" in written[0].reasons[0]


def test_sparse_classes_are_refused_with_the_reason():
    with pytest.raises(BackendLoadError, match="keys an indexer chooses"):
        registry.load("vllm:FLASHMLA_SPARSE")
