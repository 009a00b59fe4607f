"""Patterns that make a kernel look fast are caught by ``timing``, and by no check of answers alone; honest ones pass.

Clocks are stand-ins, so that nothing depends on how busy the machine is: one counts ATen's operators, one is the clock
of CUDA over a device that is simulated.
"""

import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl
from attncheck.backends.kernel import kernel_backend
from attncheck.backends.registry import load, load_object
from attncheck.cases.loader import load_suite
from attncheck.harness.checks.findings import TimingSettings
from attncheck.harness.checks.timing import check
from attncheck.harness.checks.timing.clock import EventClock
from attncheck.harness.run.evaluate import Examiner, RunPlan
from attncheck.reference import AttentionParams, paged_attention
from attncheck.reports.run_file.timings import Ceilings

FILE = Path(__file__).resolve().with_name("timing.py")
WATCHED = TimingSettings(limit_s=60, min_samples=5, max_samples=6)
ONCE = TimingSettings(limit_s=60, min_samples=1, max_samples=1)
DECODE = "decode/page-edges.float32-NHD"

MEANINGS = {
    "LeavesWorkToAThread": "written after the clock had stopped",
    "EvaluatesLazily": "computed when it is looked at",
    "ReplacesTheClock": "were patched",
    "LowersThePrecision": "a lower precision",
    "LeavesOutTheWrite": "cache write is left out",
    "ComputesWhileItBuilds": "",
    "KeepsThePlan": "",
    "LeavesTheEarlierAnswer": "nothing was written",
    "HandsOutTheEarlierAnswer": "results are kept",
    "CachesByPointer": "results are kept",
    "CachesByFingerprint": "results are kept",
    "HandsBackItsInput": "an input is handed back",
    "FindsItsAnswerInMemory": "",
}
"""What the finding must mean; empty: a wrong answer of no known sort."""


class OperatorClock:
    """A microsecond for each operator."""

    name = "host"

    def time(self, call, *, before=lambda: None, after=lambda: None):
        count = [0]

        class Counting(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                count[0] += 1
                return function(*args, **(kwargs or {}))

        before()
        with Counting():
            call()
        after()
        return 1_000 * (1 + count[0])

    def wait(self):
        pass


@pytest.fixture(autouse=True)
def _clocks(monkeypatch):
    """Clocks that count operators, and known ceilings of the machine."""
    known = Ceilings(copy_bytes_per_s=1e10, matmul_flops_per_s=1e11, dtype="float32")
    monkeypatch.setattr(check, "measure_ceilings", lambda *_: known)
    monkeypatch.setattr(check, "clock_for", lambda _device: OperatorClock())


@cache
def suite(name):
    return {case.id: case for case in load_suite(name).cases}


def case_of(key):
    name, _, case_id = key.partition("/")
    return suite(name)[case_id]


def examined(backend, key=DECODE, checks=("timing",), settings=WATCHED, device="cpu"):
    """The records of a backend by check; without that of ``timing`` where it does not serve the case."""
    case = case_of(key)
    if backend.backend.unsupported_reasons(case.layer, case.cache, case.batch):
        return {}
    examiner = Examiner(RunPlan((case,), (backend,), checks=checks, timing=settings, device=device))
    records = {record.check: record for record in examiner.run()}
    assert not examiner.blind
    return records


@pytest.mark.parametrize("name", MEANINGS)
def test_a_trick_is_caught_under_the_clock(name, monkeypatch):
    clocks = ((time, "perf_counter_ns"), (torch.cuda, "synchronize"), (torch.cuda.Event, "elapsed_time"))
    for owner, attribute in clocks:
        monkeypatch.setattr(owner, attribute, getattr(owner, attribute))  # to be put back
    records = examined(load(f"{FILE}:{name}"), checks=("numerics", "timing"))
    assert records["numerics"].outcome == "passed"
    found = records["timing"]
    assert found.outcome == "failed", found
    assert MEANINGS[name] in (found.meaning or "")
    assert found.timing is None


def test_results_cached_by_content_are_never_found_again():
    backend = load(f"{FILE}:CachesByContent")
    assert examined(backend)["timing"].outcome == "passed"
    assert backend.backend.Impl.hits == 0


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))],
)
def test_work_on_another_stream_is_caught(monkeypatch, device):
    backend = load(f"{FILE}:LeavesWorkToAStream")
    deferred = backend.backend.Impl.cheat.__globals__["deferred"]

    def synchronize():
        while deferred:
            deferred.pop()()

    api = SimpleNamespace(
        current=lambda: "main",
        make_current=lambda _stream: None,
        record=lambda _stream: None,
        is_done=lambda _event: False,
        elapsed_ms=lambda _start, _end: 1.0,
        synchronize=synchronize,
        hold=lambda _ns: None,
        now_ns=time.perf_counter_ns,
    )
    if device == "cpu":
        monkeypatch.setattr(check, "clock_for", lambda _device: EventClock(api))
    else:
        monkeypatch.undo()
    found = examined(backend, device=device)["timing"]
    assert found.outcome == "failed"
    assert "another stream" in found.meaning


DENSE, LATENT = ("reference", "torch_sdpa"), ("reference_mla", "torch_mla")
HONEST = {
    "mixed/usual-order.bfloat16-HND": DENSE,
    "mixed/short-keys": DENSE,
    "head_sizes/value-head-size.v1": DENSE,
    "fp8_kv/per-head-mixed.float32": DENSE,
    "fp8_kv/other-float-cache": DENSE,
    "output_quant/padded-mixed": DENSE,
    "encoder/encoder-only-window.16": DENSE,
    "encoder/cross-mixed.16": DENSE,
    "kv_sharing/fast-prefill.float16": DENSE,
    "spec_decode/tree-odd.bfloat16": DENSE,
    "mla/codes.fp8_e4m3": LATENT,
    "mla/shared-prefix": LATENT,
}


@pytest.mark.parametrize("key", HONEST)
def test_honest_backends_pass(key):
    found = [examined(load(name), key, settings=ONCE) for name in HONEST[key]]
    assert found[0]
    for record in (records["timing"] for records in found if records):
        assert record.outcome == "passed", record
        assert record.figures["budget_share"] <= 1
        assert [note for note in record.timing.notes if "times as long" not in note] == []


def attend(query, key_cache, value_cache, metadata, params, out, output_lse):
    """Right, by the reference; the new rows are in the cache already."""
    rows = int(metadata.query_start_loc[-1])
    table, lens, starts = metadata.block_table_tensor, metadata.seq_lens, metadata.query_start_loc
    result, lse = paged_attention(
        query[:rows], key_cache, value_cache, table, lens, starts, AttentionParams(**vars(params))
    )
    out[:rows], output_lse[:rows] = result.to(out.dtype), lse.to(output_lse.dtype)


class OneBuffer(ReferenceBackend):
    """Returns the front of one tensor of its own, in every call."""

    accept_output_buffer = False

    class Impl(ReferenceImpl):
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


@pytest.mark.parametrize("backend", [kernel_backend(attend, name="plain", features=("lse",)), OneBuffer, NoCodec])
@pytest.mark.parametrize("key", [DECODE, "mixed/usual-order.float32-NHD"])
def test_other_forms_of_backends_pass_and_each_part_has_its_own_work(backend, key):
    record = examined(load_object(backend), key, settings=ONCE)["timing"]
    assert record.outcome == "passed"
    parts = {latency.part: latency for latency in record.timing.latencies}
    assert parts["build"].flops is None
    if key == DECODE:
        assert list(parts) == ["forward", "build"]
        return
    assert list(parts) == ["forward", "build", "decode", "prefill"]
    assert parts["forward"].flops == parts["decode"].flops + parts["prefill"].flops
    assert parts["forward"].moved_bytes == parts["decode"].moved_bytes + parts["prefill"].moved_bytes


def test_what_is_not_timed_is_reported_with_its_reason(monkeypatch):
    for key in ("split_kv/decode.float16", "dcp/decode.float16", "micro_batch/decode.float16"):
        record = examined(load("reference"), key, settings=ONCE)["timing"]
        assert (record.outcome, record.by) == ("unsupported", "attncheck")
    monkeypatch.setattr(ReferenceBackend, "required_environment", lambda _device: {"TRITON_INTERPRET": "1"})
    record = examined(load("reference"), settings=ONCE)["timing"]
    assert record.outcome == "unsupported"
    assert record.reasons == ("its kernels are interpreted here: their times are not those of a GPU",)
