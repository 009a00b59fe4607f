"""The CUDA recorder calls torch in the right order and reports exceptions.

A fake of torch's CUDA graphs records the calls; real ones are captured in ``test_cuda_real.py``.
"""

import gc
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from weakref import ref

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.harness.checks.cudagraph import recorder as recorder_module
from attncheck.harness.checks.cudagraph.capture import capture_graph, dummy_call
from attncheck.harness.checks.cudagraph.probes import Bucket
from attncheck.harness.checks.cudagraph.recorder import SYNCHRONISED, CaptureError, DeviceRecorder, ReleasedMemoryError
from attncheck.harness.device import Cuda
from attncheck.harness.problem.problem import build_problem

DEVICE = Cuda(0)
HERE = Path(__file__)


class Graph:
    """A graph that was captured, or not."""

    def __init__(self, replay):
        self.replay = replay


class Journal(list):
    """The calls of the fake, in order; ``waits`` and ``end`` are what it raises."""

    end: Exception | None = None
    mode = 0
    capturing = False

    def take_down(self, name):
        return lambda *args, **kwargs: self.append(name)

    def forward(self):
        self.append(f"forward, syncs {'raise' if self.mode == 'error' else 'pass'}")


@dataclass
class Stream:
    journal: Journal
    name: str
    device_index: int = 0

    def wait_stream(self, other):
        self.journal.append(f"{self.name} waits for {other.name}")

    def synchronize(self):
        self.journal.append(f"wait for {self.name}")


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """Files outside of the current folder are named in full."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def journal(monkeypatch, elsewhere):
    taken = Journal()
    main, side = Stream(taken, "main"), Stream(taken, "side")
    current = [main]
    handles = iter(["pool 1", "pool 2"])

    @contextmanager
    def stream(chosen):
        current.append(chosen)
        try:
            yield
        finally:
            current.pop()

    @contextmanager
    def graph(cuda_graph, pool, stream):
        taken.append(f"begin in {pool} on {stream.name}, syncs {taken.mode or 'pass'}")
        current.append(stream)
        taken.capturing = True
        yield
        taken.capturing = False
        taken.append(f"end, syncs {taken.mode or 'pass'}")
        if taken.end is not None:
            raise taken.end
        current.pop()

    def set_sync_debug_mode(mode):
        warnings.warn("does not yet detect all synchronizing operations", UserWarning, stacklevel=2)
        taken.mode = mode

    def set_stream(chosen):
        taken.append(f"back on {chosen.name}")
        current[:] = [chosen]

    stand_ins = {
        "CUDAGraph": lambda: Graph(taken.take_down("replay")),
        "Stream": lambda device: taken.append("a stream") or side,
        "current_stream": lambda: current[-1],
        "device": nullcontext,
        "get_sync_debug_mode": lambda: taken.mode,
        "graph": graph,
        "graph_pool_handle": lambda: next(handles),
        "set_stream": set_stream,
        "set_sync_debug_mode": set_sync_debug_mode,
        "stream": stream,
        "synchronize": taken.take_down("synchronize"),
        "is_current_stream_capturing": lambda: taken.capturing,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(
        torch._C, "_cuda_endAllocateToPool", lambda device, pool: taken.append(f"{pool} of {device} records no more")
    )
    monkeypatch.setattr(
        torch._C, "_cuda_releasePool", lambda device, pool: taken.append(f"{pool} of {device} is given back")
    )
    recorder_module.capture_stream.cache_clear()
    yield taken
    recorder_module.capture_stream.cache_clear()


def prepared(journal, forward=None):
    """A ``prepare`` that records on which stream it was called."""

    def prepare():
        journal.append(f"prepare on {torch.cuda.current_stream().name}")
        return forward or journal.forward

    return prepare


def test_warms_up_on_the_side_rehearses_and_captures_each_with_fresh_metadata(journal):
    recorder = DeviceRecorder(DEVICE)
    journal.clear()
    recording = recorder.record(prepared(journal))
    side = ["side waits for main", "main waits for side"]
    assert journal == [
        *("prepare on main", side[0], "forward, syncs pass", side[1]),
        *("prepare on main", side[0], "forward, syncs raise", side[1]),
        *("synchronize", "prepare on main", "begin in pool 1 on side, syncs pass"),
        *("forward, syncs raise", "end, syncs pass"),
    ]
    journal.clear()
    recording.replay()
    assert journal == ["replay", "wait for main"]
    assert (recording.reads(torch.zeros(1)), recording.released()) == (None, ())


def test_graphs_of_one_recorder_share_its_pool_and_recorders_of_a_device_a_stream(journal):
    recorder = DeviceRecorder(DEVICE)
    for each in (recorder, recorder, DeviceRecorder(DEVICE)):
        each.record(prepared(journal))
    begun = [line.partition(",")[0] for line in journal if line.startswith("begin")]
    assert begun == ["begin in pool 1 on side", "begin in pool 1 on side", "begin in pool 2 on side"]
    assert journal.count("a stream") == 1


def test_what_waits_for_the_device_is_named_with_its_line_before_anything_is_captured(journal):
    def forward():
        if journal.mode == "error":
            raise RuntimeError(SYNCHRONISED)

    with pytest.raises(CaptureError) as caught:
        DeviceRecorder(DEVICE).record(prepared(journal, forward))
    line = forward.__code__.co_firstlineno + 2
    (violation,) = caught.value.violations
    assert violation.kind == "host read"
    assert violation.where == f"{HERE}:{line} in forward"
    assert not [line for line in journal if line.startswith("begin")]
    assert journal.mode == 0
    assert torch.cuda.current_stream().name == "main"


def test_a_backend_that_reads_on_the_host_only_outside_of_capture_is_captured(journal):
    capturing = []

    def forward():
        capturing.append(torch.cuda.is_current_stream_capturing())
        if journal.mode == "error" and not capturing[-1]:
            raise RuntimeError(SYNCHRONISED)

    DeviceRecorder(DEVICE).record(prepared(journal, forward))
    assert capturing == [False, True, True]
    assert not torch.cuda.is_current_stream_capturing()


def test_a_warning_of_the_backend_is_the_backends(journal):
    """Those of torch, about the debug mode, are errors here as well, and none is seen."""

    def forward():
        warnings.warn("no tuned tiles", UserWarning, stacklevel=1)

    with pytest.warns(UserWarning, match="no tuned tiles"):
        DeviceRecorder(DEVICE).record(prepared(journal, forward))


def test_no_garbage_is_collected_during_a_capture(journal):
    seen = []

    def forward():
        seen.append(gc.isenabled())
        if seen[2:]:
            raise ValueError("no such shape")

    recorder = DeviceRecorder(DEVICE)
    with pytest.raises(CaptureError):
        recorder.record(prepared(journal, forward))
    assert seen == [True, True, False]
    assert gc.isenabled()


@pytest.mark.parametrize("raises", [ValueError("no such shape"), RuntimeError(SYNCHRONISED)])
def test_a_failed_capture_is_freed_though_its_refusal_is_kept(journal, monkeypatch, make_case, raises):
    """Without the collector: a graph that waits for it might be freed within a later capture."""
    made, left = [], []

    class Rows:
        pass

    def graph():
        made.append(ref(found := Graph(None)))
        return found

    def enter(call, kv_cache, metadata, buffers):
        left.append(ref(metadata))
        if len(left) == 3 or (SYNCHRONISED in str(raises) and len(left) == 2):
            raise raises.with_traceback(None)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    recorder = DeviceRecorder(DEVICE)
    call = dummy_call(build_problem(make_case((1, 5)), 0), Bucket(1, 1, 1), 16, longest=False)
    gc.disable()
    try:
        layer = SimpleNamespace(enter=enter)
        refusal = capture_graph(recorder, layer, [(None, call)], None, [None], lambda _builder, _common: Rows())
        raises.__traceback__ = None
        assert isinstance(refusal, CaptureError)
        assert [each() for each in (*made, *left)] == [None] * (len(made) + len(left))
    finally:
        gc.enable()


def test_a_graph_whose_capture_cannot_be_ended_outlives_its_recorder(journal, monkeypatch):
    made = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: made.append(ref(found := Graph(None))) or found)
    recorder = DeviceRecorder(DEVICE)
    journal.end = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    with pytest.raises(CaptureError):
        recorder.record(prepared(journal))
    journal.end = None  # whose traceback holds the graph
    del recorder
    gc.collect()
    assert made[0]() is not None


def test_what_the_capture_raises_is_a_violation_after_it_was_ended(journal):
    def forward():
        if "synchronize" in journal:
            raise ValueError("no such shape\nand more")

    with pytest.raises(CaptureError) as caught:
        DeviceRecorder(DEVICE).record(prepared(journal, forward))
    (violation,) = caught.value.violations
    assert (violation.kind, violation.call) == ("error", "ValueError: no such shape")
    assert violation.where.endswith(" in forward")
    assert journal[-1] == "end, syncs pass"


def test_after_a_capture_that_cannot_be_ended_the_next_is_made_in_a_pool_of_its_own(plain, journal):
    def forward():
        if "synchronize" in journal:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    recorder = DeviceRecorder(DEVICE)
    journal.end = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    with pytest.raises(CaptureError) as refused:
        recorder.record(prepared(journal, forward))
    assert plain(str(refused.value)) == snapshot(
        "error: RuntimeError: CUDA error: operation not permitted when stream is capturing at ROOT/tests/harness/checks/cudagraph/test_cuda.py:N in forward"
    )
    pool = ["pool 1 of 0 records no more", "pool 1 of 0 is given back"]
    assert journal[-4:] == ["back on main", *pool, "synchronize"]
    assert torch.cuda.current_stream().name == "main"
    journal.clear()
    journal.end = None
    recorder.record(prepared(journal))
    assert "begin in pool 2 on side, syncs pass" in journal


@pytest.mark.parametrize("broken_run", [1, 2, 3])
def test_what_prepare_or_the_first_warm_up_raises_comes_through(journal, broken_run):
    runs = iter(range(1, 4))

    def prepare():
        if next(runs) == broken_run:
            raise KeyError("no buffer")
        return journal.forward

    for raising in (prepare, lambda: {}.popitem):
        with pytest.raises(KeyError):
            DeviceRecorder(DEVICE).record(raising)
    assert journal.mode == 0


def test_memory_let_go_of_since_the_capture_is_spoilt_before_a_replay(journal):
    metadata = SimpleNamespace(lens=torch.ones(2))
    kept, memory = torch.ones(1), metadata.lens.untyped_storage()
    recording = DeviceRecorder(DEVICE).record(lambda: partial(id, (metadata, kept)))
    recording.replay()
    assert memory.tolist() == torch.ones(2).untyped_storage().tolist()
    metadata.lens = None
    recording.replay()
    assert set(memory.tolist()) == {0xFF}
    assert kept.item() == 1


def test_a_graph_that_writes_to_memory_let_go_of_is_found_out(journal, monkeypatch):
    metadata = SimpleNamespace(workspace=torch.ones(2))
    memory = metadata.workspace.untyped_storage()
    graph = SimpleNamespace(replay=lambda: memory.fill_(1))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    recording = DeviceRecorder(DEVICE).record(lambda: partial(id, metadata))
    recording.replay()
    metadata.workspace = None
    with pytest.raises(ReleasedMemoryError) as refused:
        recording.replay()
    assert str(refused.value) == snapshot("the graph wrote to memory that was released after the capture")
