"""Honest backends pass ``timing``, whatever their layer, and whatever the harness does to their inputs."""

from functools import cache

import pytest
import torch

from attncheck.backends.candidates.reference import ReferenceBackend
from attncheck.backends.kernel import kernel_backend
from attncheck.backends.registry import load, load_object
from attncheck.cases.loader import load_suite
from attncheck.harness.checks.findings import TimingSettings
from attncheck.harness.checks.timing import check
from attncheck.harness.checks.timing import check as timing
from attncheck.harness.run.evaluate import Examiner, RunPlan
from attncheck.reference import AttentionParams, paged_attention
from attncheck.reports.run_file.timings import Ceilings

SETTINGS = TimingSettings(limit_s=60, min_samples=1, max_samples=1)

CASES = (
    "decode/page-edges.float16-NHD",
    "mixed/usual-order.bfloat16-HND",
    "mixed/short-keys",
    "alibi/mixed.NHD-16",
    "sinks/mixed.HND-16",
    "sliding_window/decode-width.16",
    "head_sizes/value-head-size.v1",
    "fp8_kv/per-head-mixed.float32",
    "fp8_kv/other-float-cache",
    "output_quant/padded-mixed",
    "encoder/encoder-only-window.16",
    "encoder/cross-mixed.16",
    "kv_sharing/fast-prefill.float16",
    "local/mixed.2",
    "spec_decode/tree-odd.bfloat16",
)
LATENT = ("mla/decode.float16", "mla/mixed.1", "mla/codes.fp8_e4m3", "mla/shared-prefix")


class SteadyClock:
    """Everything takes a microsecond."""

    name = "host"

    def time(self, call, *, before=lambda: None, after=lambda: None):
        before()
        call()
        after()
        return 1_000

    def wait(self):
        pass


@pytest.fixture(autouse=True)
def steady(monkeypatch):
    known = Ceilings(copy_bytes_per_s=1e10, matmul_flops_per_s=1e11, dtype="float32")
    monkeypatch.setattr(timing, "measure_ceilings", lambda *_: known)
    monkeypatch.setattr(check, "clock_for", lambda _device: SteadyClock())


@cache
def suite(name):
    return {case.id: case for case in load_suite(name).cases}


def case_of(key):
    name, _, case_id = key.partition("/")
    return suite(name)[case_id]


def examined(backend, key):
    """The record of ``timing``; None where the backend does not claim to support the case."""
    case = case_of(key)
    if backend.backend.unsupported_reasons(case.layer, case.cache, case.batch):
        return None
    examiner = Examiner(RunPlan(cases=(case,), backends=(backend,), checks=("timing",), timing=SETTINGS))
    (record,) = examiner.run()
    assert not examiner.blind
    return record


@pytest.mark.parametrize("key", CASES)
def test_the_reference_and_sdpa_pass(key):
    records = {name: examined(load(name), key) for name in ("reference", "torch_sdpa")}
    assert records["reference"] is not None
    present = [record for record in records.values() if record is not None]
    assert [record.outcome for record in present] == ["passed"] * len(present), present
    assert all(record.figures["budget_share"] <= 1 for record in present)
    assert all(record.timing.notes == () for record in present)


@pytest.mark.parametrize("key", LATENT)
def test_latent_attention_passes(key):
    assert {examined(load(name), key).outcome for name in ("reference_mla", "torch_mla")} == {"passed"}


def attend(query, key_cache, value_cache, metadata, params, out, output_lse):
    """Right, by the reference; the new rows are in the cache already."""
    rows = int(metadata.query_start_loc[-1])
    table, lens, starts = metadata.block_table_tensor, metadata.seq_lens, metadata.query_start_loc
    result, lse = paged_attention(
        query[:rows], key_cache, value_cache, table, lens, starts, AttentionParams(**vars(params))
    )
    out[:rows], output_lse[:rows] = result.to(out.dtype), lse.to(output_lse.dtype)


Plain = kernel_backend(attend, name="plain", features=("lse",))


class OwnMemory(ReferenceBackend):
    """Returns a tensor of its own."""

    accept_output_buffer = False

    class Impl(ReferenceBackend.get_impl_cls()):
        def forward(self, *arguments, output, **keywords):
            return super().forward(*arguments, output=torch.empty_like(output), **keywords)

    @staticmethod
    def get_impl_cls():
        return OwnMemory.Impl


class OneBuffer(ReferenceBackend):
    """Returns the front of one tensor of its own, in every call."""

    accept_output_buffer = False

    class Impl(ReferenceBackend.get_impl_cls()):
        own = None

        def forward(self, *arguments, output, **keywords):
            if self.own is None:
                self.own = output.new_empty(1024, *output.shape[1:])
            return super().forward(*arguments, output=self.own[: len(output)], **keywords)

    @staticmethod
    def get_impl_cls():
        return OneBuffer.Impl


class NoCodec(ReferenceBackend):
    """Its own writer fills its cache, and nothing reads it."""

    @classmethod
    def kv_cache_codec(cls, layer, cache):
        return None


@pytest.mark.parametrize("backend", [Plain, OwnMemory, OneBuffer, NoCodec])
@pytest.mark.parametrize("key", ["decode/page-edges.float16-NHD", "mixed/usual-order.float32-NHD"])
def test_other_forms_of_backends_pass(backend, key):
    record = examined(load_object(backend), key)
    assert record.outcome == "passed"
    parts = ["forward", "build", "decode", "prefill"] if key.startswith("mixed") else ["forward", "build"]
    assert [latency.part for latency in record.timing.latencies] == parts


def test_parts_have_the_work_of_their_requests_alone():
    timed = examined(load("reference"), "mixed/usual-order.float32-NHD").timing
    forward, decode, prefill = (timed.latency(part) for part in ("forward", "decode", "prefill"))
    assert forward.flops == decode.flops + prefill.flops
    assert forward.moved_bytes == decode.moved_bytes + prefill.moved_bytes
    assert timed.latency("build").flops is None


def test_what_is_not_timed_is_reported_with_its_reason():
    for key in ("split_kv/decode.float16", "dcp/decode.float16", "micro_batch/decode.float16"):
        record = examined(load("reference"), key)
        assert (record.outcome, record.by) == ("unsupported", "attncheck")


def test_interpreted_kernels_are_not_timed(monkeypatch):
    monkeypatch.setattr(ReferenceBackend, "required_environment", lambda _device: {"TRITON_INTERPRET": "1"})
    record = examined(load("reference"), "decode/page-edges.float16-NHD")
    assert record.outcome == "unsupported"
    assert record.reasons == ("its kernels are interpreted here: their times are not those of a GPU",)
