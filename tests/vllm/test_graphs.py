"""vLLM's CPU kernels in the emulation of CUDA graphs: no dispatch mode sees them, but they are recorded."""

import pytest
import torch

from attncheck.backends.registry import load
from attncheck.cases.model import Case
from attncheck.harness.checks.cudagraph.check import OVER_NUMBERS
from attncheck.harness.checks.cudagraph.emulation import EmulatedRecorder
from attncheck.harness.checks.cudagraph.operators import passes_unseen
from attncheck.harness.run.evaluate import Examiner, RunPlan
from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import BatchSpec, CacheSpec, RequestSpec

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

CASE = Case(
    suite="graphs",
    id="plain",
    layer=LayerSpec(num_heads=2, num_kv_heads=1, head_size=32, dtype="float32"),
    cache=CacheSpec(block_size=32, layout="HND"),
    batch=BatchSpec(requests=(RequestSpec(query_len=1, seq_len=40),)),
)


@pytest.fixture(scope="module")
def ops():
    return pytest.importorskip("vllm._custom_ops")


def test_its_kernels_pass_unseen(ops):
    for name in ("cpu_attention_with_kv_cache", "cpu_attn_reshape_and_cache", "get_scheduler_metadata"):
        assert passes_unseen(getattr(torch.ops._C, name).default), name
    assert not passes_unseen(torch.ops._C.rms_norm.default)


def test_a_kernel_that_no_mode_sees_is_replayed_and_its_memory_known(ops):
    new, slots = [torch.randn(2, 1, 32), torch.randn(2, 1, 32)], torch.tensor([0, 5])
    planes = torch.zeros(2, 4, 1, 32, 32).unbind()
    given = [torch.tensor([3, 40])]

    def forward():
        ops.cpu_attn_reshape_and_cache(*new, *planes, given[0], "vec")

    recording = EmulatedRecorder().record(lambda: forward)
    expected = torch.zeros(2, 4, 1, 32, 32).unbind()
    given[0].copy_(slots)
    for rows in new:
        rows.normal_()
    ops.cpu_attn_reshape_and_cache(*new, *expected, slots, "vec")
    for plane in planes:
        plane.zero_()
    recording.replay()
    assert all(
        torch.equal(plane, wanted) and bool(wanted.any()) for plane, wanted in zip(planes, expected, strict=True)
    )
    given[0] = slots
    (released,) = recording.released()
    assert released.first_used.startswith("_C.cpu_attn_reshape_and_cache at ")


def test_the_plan_of_the_cpu_s_attention_moves_with_every_build(ops):
    plan = RunPlan(cases=(CASE,), backends=(load("vllm:CPU_ATTN"),), checks=("cudagraph",))
    (record,) = Examiner(plan).run()
    assert (record.outcome, record.graph.declared, record.graph.measured) == ("passed", "NEVER", "NEVER")
    reason = record.graph.probes[0].reason
    assert "build puts metadata.scheduler_metadata into new memory" in reason
    assert record.notes == (OVER_NUMBERS,)
    assert "first used by _C.cpu_attention_with_kv_cache at vllm/_custom_ops.py:" in reason
