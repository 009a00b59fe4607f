"""What runs in a call: ATen's operators here; a profiler that saw a GPU is a stand-in."""

from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity

from attncheck.harness.checks.timing import profiler as kernels
from attncheck.harness.checks.timing.profiler import kernels_of
from attncheck.reports.run_file.timings import Kernel


def test_operators_of_a_cpu():
    calls = []
    a = torch.randn(40, 40)

    def step():
        calls.append(1)
        for _ in range(3):
            torch.mm(a, a)
        return a.exp()

    found = kernels_of(step, "cpu")
    counts = {each.name: each.count for each in found}
    assert (counts["aten::mm"], counts["aten::exp"]) == (3, 1)
    assert calls == [1]
    assert all(name.startswith("aten::") for name in counts)
    assert [each.duration_ns for each in found] == sorted((each.duration_ns for each in found), reverse=True)


def event(name, kind, us, *, annotation=False):
    return SimpleNamespace(
        name=name,
        device_type=SimpleNamespace(name=kind),
        time_range=SimpleNamespace(elapsed_us=lambda: us),
        self_cpu_time_total=us,
        is_user_annotation=annotation,
    )


@pytest.fixture
def profiler(monkeypatch):
    """Of a GPU: three launches of two kernels, a copy, what the host did, and an annotation."""
    events = [
        event("aten::mm", "CPU", 900.0),
        event("cudaLaunchKernel", "CPU", 5.0),
        event("split_kernel", "CUDA", 40.5),
        event("split_kernel", "CUDA", 41.0),
        event("merge_kernel", "CUDA", 7.25),
        event("Memcpy DtoD (Device -> Device)", "CUDA", 2.0),
        event("a range", "CUDA", 95.0, annotation=True),
    ]
    order = []

    class Profile:
        def __init__(self, activities):
            order.append(f"profile {len(activities)}")
            assert ProfilerActivity.CUDA in activities

        def __enter__(self):
            return self

        def __exit__(self, *error):
            order.append("end")

        def events(self):
            return events

    monkeypatch.setattr(kernels, "profile", Profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append("wait"))
    return order


def test_kernels_of_a_gpu(profiler):
    found = kernels_of(lambda: profiler.append("call"), "cuda")
    assert found == (
        Kernel(name="split_kernel", count=2, duration_ns=81_500),
        Kernel(name="merge_kernel", count=1, duration_ns=7_250),
        Kernel(name="Memcpy DtoD (Device -> Device)", count=1, duration_ns=2_000),
    )
    assert profiler == ["wait", "profile 2", "call", "wait", "end"]
