"""Branches on the device: the emulation judges what a GPU would run, or nothing."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attncheck.backends.mutants import graphs
from attncheck.backends.registry import load_object
from attncheck.cases.loader import load_suite
from attncheck.harness.checks.cudagraph.emulation import EmulatedRecorder
from attncheck.harness.checks.cudagraph.recorder import CaptureError, UnseenError
from attncheck.harness.run.evaluate import Examiner, RunPlan


def by_comparison(impl, x):
    if impl.scale.device != x.device:
        impl.scale = impl.scale.to(x.device)
    return impl.scale


def by_kind(impl, x):
    if x.is_cuda:
        impl.scale = impl.scale.cuda()
    return impl.scale


def by_type(impl, x):
    if impl.scale.device.type != x.device.type:
        impl.scale = impl.scale.to(x.device, non_blocking=True)
    return impl.scale


def by_number(impl, x):
    if impl.scale.get_device() != x.get_device():
        impl.scale = impl.scale.to(x.device)
    return impl.scale


def kept_device(impl, x):
    impl.device = x.device
    if impl.scale.is_cpu and not x.is_cpu:
        impl.scale = torch.empty(4, device=impl.device).copy_(impl.scale)
    return impl.scale


def by_number_of_a_keyword(impl, x):
    if impl.scale.get_device() != torch.get_device(input=x):
        impl.scale = impl.scale.cuda()
    return impl.scale


def made_on_first_use(impl, x):
    if impl.table is None or impl.table.device != x.device:
        impl.table = torch.tensor([2.0] * 4).to(x.device)
    return impl.table


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def made_where_a_gpu_is(impl, x):
    if impl.table is None:
        impl.table = torch.full((4,), 2.0, device=DEVICE)
    return impl.table


def made_where_a_gpu_is_at_once(impl, x):
    if impl.table is None:
        impl.table = torch.full((4,), 2.0).to("cuda" if torch.cuda.is_available() else "cpu")
    return impl.table


RIGHT = (
    made_where_a_gpu_is,
    made_where_a_gpu_is_at_once,
    by_comparison,
    by_kind,
    by_type,
    by_number,
    by_number_of_a_keyword,
    kept_device,
    made_on_first_use,
)


def moved_each_time(impl, x):
    return impl.scale.to(x.device)


def moved_but_not_kept(impl, x):
    return impl.scale.to(x.device) if impl.scale.device != x.device else impl.scale


def left_on_the_host(impl, x):
    return impl.scale


def made_on_the_host(impl, x):
    if impl.table is None:
        impl.table = torch.full((4,), 2.0, device="cpu")
    return impl.table


def moved_beside_a_branch(impl, x):
    assert not x.is_cuda or x.shape
    return impl.scale.to(x.device)


def guarded_beside_a_read(impl, x):
    scale = by_comparison(impl, x)
    return scale * x[0].item()


WRONG = {
    moved_each_time: "host copy: .to()",
    moved_but_not_kept: "host copy: .to()",
    left_on_the_host: "host copy: .mul_()",
    made_on_the_host: "host copy: .mul_()",
    moved_beside_a_branch: "host copy: .to()",
    guarded_beside_a_read: "host read: .item()",
}


DEFAULT = """
import torch
def table_of(impl, x):
    def make(device="cpu"):
        return torch.full((4,), 2.0, device=device)
    impl.table = make() if impl.table is None else impl.table
    return impl.table
"""
CONSTANT = """
import torch
HOST = "cpu"
def table_of(impl, x):
    impl.table = torch.full((4,), 2.0, device=HOST) if impl.table is None else impl.table
    return impl.table
"""
ANY_DEVICE = CONSTANT.replace("HOST =", "HOST = 'cuda' if torch.cuda.is_available() else")
OF_ANOTHER_MODULE = """
import torch
from settings import HOST
def is_supported(x):
    return x.device.type in ("cpu", "cuda") or x.device == torch.device("cpu")
def table_of(impl, x):
    assert is_supported(x)
    impl.table = torch.full((4,), 2.0, device=HOST) if impl.table is None else impl.table
    return impl.table
"""


def kept_from_the_first_branch(impl, x):
    if impl.table is None:
        impl.table = impl.scale.cuda() if x.is_cuda else impl.scale
    return impl.table


def kept_by_type(impl, x):
    if impl.table is None:
        device = x.device
        impl.table = impl.scale.to(device) if device.type == "cuda" else impl.scale
    return impl.table


def kept_by_text(impl, x):
    if impl.table is None:
        impl.table = impl.scale.to(x.device) if "cuda" in str(x.device) else impl.scale
    return impl.table


def kept_by_equality(impl, x):
    if impl.table is None:
        impl.table = impl.scale if x.device == torch.device("cpu") else impl.scale.to(x.device)
    return impl.table


def another_library(impl, x):
    if x.device.type == "cuda":
        raise RuntimeError("no driver")
    return impl.scale


UNKNOWN = (kept_from_the_first_branch, kept_by_type, kept_by_text, kept_by_equality, another_library)


def recorded(scale_of):
    """Record ``x *= scale_of(impl, x)`` of a new impl, and return x after a replay with x = 3."""
    x, recorder = torch.ones(4), EmulatedRecorder()
    with recorder.watching():
        impl = SimpleNamespace(scale=torch.full((4,), 2.0), table=None, device=None)
    recording = recorder.record(lambda: lambda: x.mul_(scale_of(impl, x)))
    x.fill_(3)
    recording.replay()
    return x.tolist()


@pytest.mark.parametrize("scale_of", RIGHT, ids=lambda scale_of: scale_of.__name__)
def test_a_constant_that_a_guard_moves_once_is_captured(scale_of):
    assert recorded(scale_of) == [6.0] * 4


@pytest.mark.parametrize("scale_of", WRONG, ids=lambda scale_of: scale_of.__name__)
def test_a_copy_at_each_call_is_no_part_of_a_graph(scale_of):
    with pytest.raises(CaptureError) as caught:
        recorded(scale_of)
    assert str(caught.value).startswith(WRONG[scale_of])
    assert len(caught.value.violations) == 1


def function_in_a_module_of(source, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "settings", SimpleNamespace(HOST="cpu"))
    path = folder / "module.py"
    path.write_text(source)
    spec = spec_from_file_location("module_with_a_table", path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.table_of


@pytest.mark.parametrize("source", [DEFAULT, CONSTANT], ids=["default", "constant"])
def test_a_module_that_names_the_host_means_the_host(source, tmp_path, monkeypatch):
    with pytest.raises(CaptureError, match=r"^host copy: \.mul_\(\)"):
        recorded(function_in_a_module_of(source, tmp_path, monkeypatch))


@pytest.mark.parametrize("source", [ANY_DEVICE, OF_ANOTHER_MODULE], ids=["is_available", "another module"])
def test_a_variable_that_may_name_a_gpu_does_not_mean_the_host(source, tmp_path, monkeypatch):
    assert recorded(function_in_a_module_of(source, tmp_path, monkeypatch)) == [6.0] * 4


@pytest.mark.parametrize("scale_of", UNKNOWN, ids=lambda scale_of: scale_of.__name__)
def test_a_branch_that_a_cpu_cannot_run_is_not_judged(scale_of):
    with pytest.raises(UnseenError, match=r"forward branches on the device.*host copy: \.mul_\(\)"):
        recorded(scale_of)


CASES = load_suite(str(Path(__file__).parents[4] / "miniatures/graphs.yaml")).cases


def backend_with(scale_of):
    """A right backend of any batch, whose impl has a constant per head on the host that ``scale_of`` returns."""

    class Impl(graphs.RowsImpl):
        def __init__(self, *args, **keywords):
            super().__init__(*args, **keywords)
            self.ones = SimpleNamespace(scale=torch.tensor([1.0] * self.num_heads), table=None)

        def attend_rows(self, query, *args):
            return super().attend_rows(query * scale_of(self.ones, query)[:, None], *args)

    return type("WithScales", (graphs.RowByRow,), {"Impl": Impl})


@pytest.mark.parametrize(
    ("scale_of", "outcome", "words"),
    [
        (by_comparison, "passed", ""),
        (kept_from_the_first_branch, "unsupported", "a GPU may take another branch than the CPU"),
        (moved_each_time, "failed", "forward cannot be captured"),
        (left_on_the_host, "failed", "forward cannot be captured"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_check_judges_a_backend_with_the_device_of_a_gpu(scale_of, outcome, words):
    plan = RunPlan(cases=CASES, backends=(load_object(backend_with(scale_of)),), checks=("cudagraph",))
    (record,) = Examiner(plan).run()
    assert record.outcome == outcome
    assert words in record.model_dump_json()
