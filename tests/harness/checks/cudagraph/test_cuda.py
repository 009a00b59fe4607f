"""The CUDA recorder by fakes: its order of calls, what a rehearsal finds, and memory held for a graph."""

import gc
import sys
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
from attncheck.harness.checks.cudagraph.recorder import (
    SYNCHRONISED,
    CaptureError,
    DeviceRecorder,
    HeldMemory,
    ReleasedMemoryError,
    Violation,
    rehearse,
    tensors_within,
    violation_of,
)
from attncheck.harness.device import Cuda
from attncheck.harness.problem.problem import build_problem

DEVICE = Cuda(0)
HERE = Path(__file__)


class Graph(SimpleNamespace):
    """A graph, which may be referenced weakly."""

    replay = None


class Journal(list):
    """The calls of the fake, in order; ``end`` is what the end of a capture raises."""

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
        "CUDAGraph": lambda: SimpleNamespace(replay=taken.take_down("replay")),
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
    (violation,) = caught.value.violations
    assert violation.kind == "host read"
    assert violation.where == f"{HERE}:{forward.__code__.co_firstlineno + 2} in forward"
    assert not [line for line in journal if line.startswith("begin")]
    assert (journal.mode, torch.cuda.current_stream().name) == (0, "main")


def test_a_backend_that_reads_on_the_host_and_warns_only_outside_of_capture_is_captured(journal):
    """Warnings of torch about the debug mode are errors here as well, and none is seen; garbage waits."""
    capturing = []

    def forward():
        capturing.append((torch.cuda.is_current_stream_capturing(), gc.isenabled()))
        if capturing[-1] == (False, True):
            warnings.warn("no tuned tiles", UserWarning, stacklevel=1)
            if journal.mode == "error":
                raise RuntimeError(SYNCHRONISED)

    with pytest.warns(UserWarning, match="no tuned tiles"):
        DeviceRecorder(DEVICE).record(prepared(journal, forward))
    assert capturing == [(False, True), (True, True), (True, False)]
    assert gc.isenabled()
    assert not torch.cuda.is_current_stream_capturing()


@pytest.mark.parametrize("raises", [ValueError("no such shape"), RuntimeError(SYNCHRONISED)])
def test_a_failed_capture_is_freed_though_its_refusal_is_kept(journal, monkeypatch, make_case, raises):
    """Without the collector: a graph that waits for it might be freed within a later capture."""
    made, left = [], []

    class Rows:
        pass

    def graph():
        made.append(ref(found := Graph()))
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
    assert gc.isenabled()


def test_after_a_capture_that_cannot_be_ended_its_graph_stays_and_the_next_has_a_pool_of_its_own(journal, monkeypatch):
    made = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: made.append(ref(found := Graph())) or found)
    recorder = DeviceRecorder(DEVICE)
    journal.end = RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def forward():
        if "synchronize" in journal:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(
        CaptureError, match=r"^error: RuntimeError: operation not permitted when stream is capturing at"
    ):
        recorder.record(prepared(journal, forward))
    pool = ["pool 1 of 0 records no more", "pool 1 of 0 is given back"]
    assert journal[-4:] == ["back on main", *pool, "synchronize"]
    assert torch.cuda.current_stream().name == "main"
    journal.clear()
    journal.end = None  # whose traceback holds the graph
    recorder.record(prepared(journal))
    assert "begin in pool 2 on side, syncs pass" in journal
    del recorder
    gc.collect()
    assert made[0]() is not None


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


def test_memory_let_go_of_since_the_capture_is_spoilt_and_a_graph_that_writes_to_it_is_found_out(journal, monkeypatch):
    metadata = SimpleNamespace(workspace=torch.ones(2))
    kept, memory = torch.ones(1), metadata.workspace.untyped_storage()
    writes = []
    graph = SimpleNamespace(replay=lambda: memory.fill_(1) if writes else None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    recording = DeviceRecorder(DEVICE).record(lambda: partial(id, (metadata, kept)))
    recording.replay()
    assert memory.tolist() == torch.ones(2).untyped_storage().tolist()
    metadata.workspace = None
    recording.replay()
    assert set(memory.tolist()) == {0xFF}
    assert kept.item() == 1
    writes.append(1)
    with pytest.raises(ReleasedMemoryError) as refused:
        recording.replay()
    assert str(refused.value) == snapshot("the graph wrote to memory that was released after the capture")


@pytest.fixture
def gpu(monkeypatch, elsewhere):
    """A GPU to rehearse on, with no debug mode."""
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)


STREAM = torch.Stream(stream_id=0, device_index=0, device_type=1)  # of CUDA, which need not be there
wait = STREAM.synchronize  # by a name of its own


def rehearsed(call, own, lines=()):
    """What a forward of ``lines`` and then ``call`` does that a capture would not allow."""
    exec(compile("\n".join(["def forward():", *lines, f"    {call}"]), str(HERE), "exec"), own)
    return rehearse(own["forward"], Cuda())


@pytest.mark.parametrize("call", ["STREAM.synchronize()", "wait()"])
def test_what_the_debug_mode_lets_pass_is_named_as_well(gpu, call):
    found = rehearsed(call, dict(globals()))
    assert (found.kind, found.where) == ("host read", f"{HERE}:2 in forward")
    assert sys.getprofile() is None


def test_another_profiler_is_left_alone(gpu):
    def watch(*_):
        pass

    sys.setprofile(watch)
    try:
        assert rehearse(lambda: None, Cuda()) is None
        found = sys.getprofile()
    finally:
        sys.setprofile(None)
    assert found is watch


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch raises where a CPU build has no GPU")
@pytest.mark.parametrize(
    "call",
    [
        *(f"torch.{name}([1, 2], device='cuda')" for name in ("tensor", "as_tensor", "ones(2).new_tensor")),
        *(f"torch.ones(2).{name}" for name in ("to('cuda')", "cuda()")),
    ],
)
def test_a_copy_to_the_device_is_no_host_read(gpu, monkeypatch, call):
    monkeypatch.setattr(recorder_module, "SYNCHRONISED", "not compiled with CUDA enabled")
    found = rehearsed(call, {"torch": torch, "__name__": "backend"})
    assert (found.kind, found.where) == ("host copy", f"{HERE}:2 in forward")


@pytest.mark.parametrize("call", ["torch.ones(2).copy_(META)", "META.tolist()"])
def test_a_copy_from_the_device_is_a_host_read_though_one_to_it_has_failed_before(gpu, monkeypatch, call):
    monkeypatch.setattr(recorder_module, "SYNCHRONISED", "Cannot copy out of meta")
    own = {"torch": torch, "META": torch.ones(2, device="meta"), "__name__": "backend"}
    failing = ["    try:", "        torch.tensor([1], device='hpu')", "    except Exception:"]
    found = rehearsed(f"    {call}", own, failing)
    assert (found.kind, found.where) == ("host read", f"{HERE}:5 in forward")


def test_the_expression_that_waited_is_named_though_another_error_came_of_it(elsewhere):
    of_torch = {"__name__": "torch._tensor"}
    exec(f"def item():\n    raise RuntimeError({SYNCHRONISED!r})", of_torch)
    rows = SimpleNamespace(item=of_torch["item"])

    def read():
        return [0] * (1 + rows.item())

    def forward():
        try:
            read()
        except RuntimeError as error:
            raise ValueError("no lengths") from error

    with pytest.raises(ValueError, match="no lengths") as caught:
        forward()
    where = f"{HERE}:{read.__code__.co_firstlineno + 1} in read"
    assert violation_of(caught.value) == Violation("host read", "rows.item()", where)


def test_without_a_line_of_the_backend_the_message_has_no_place():
    assert violation_of(RuntimeError(SYNCHRONISED)) == Violation("host read", SYNCHRONISED)
    assert violation_of(RuntimeError()) == Violation("error", "RuntimeError: ")


def block_of(*tensors):
    (block,) = HeldMemory().of(tensors)
    return block


FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.int64, torch.uint8, torch.bool])
def test_unreferenced_memory_becomes_nan_or_zero(dtype):
    tensor = torch.ones(6).to(dtype)
    block = block_of(tensor[2:4], tensor)
    storage = tensor.untyped_storage()
    block.spoil()
    assert tensor.float().eq(1).all()
    del tensor
    block.spoil()
    found = torch.empty(0, dtype=dtype).set_(storage).float()
    assert found.isnan().tolist() == [dtype in FLOATS] * 6
    assert dtype in FLOATS or found.eq(0).all()
    assert not block.was_written()


def test_a_view_that_somebody_holds_keeps_all_of_it_and_a_later_write_is_noticed():
    tensor = torch.ones(6)
    block, view, storage = block_of(tensor), tensor[5:], tensor.untyped_storage()
    tensor.fill_(2)
    del tensor
    block.spoil()
    assert view.eq(2).all()
    del view
    block.spoil()
    assert not block.was_written()
    storage[3] = 7
    block.spoil()  # once: what is found out is not wiped away
    assert block.was_written()


def test_every_tensor_within_is_found_and_graphs_share_the_blocks_of_memory_that_they_share():
    held, shared, other = HeldMemory(), torch.ones(6), torch.ones(6)
    (one,), (same, another) = held.of([shared, torch.empty(0)]), held.of([shared[:2], other])
    assert one is same
    assert another is not one
    storage = other.untyped_storage()
    del other, another
    assert torch._C._storage_Use_Count(storage._cdata) == 1  # a block lives no longer than its graphs
    a, b, c, d, e = torch.arange(5.0).split(1)

    class Impl:
        def __init__(self):
            self.workspace = a

        def forward(self, metadata, *, out):
            return d, metadata, out

    metadata = SimpleNamespace(lens=b, parts=[{"slots": c}])
    metadata.itself = metadata
    held = tensors_within(lambda: partial(Impl().forward, metadata)(out=e))
    assert {id(x) for x in held} == {id(x) for x in (b, c, e)}
    held = tensors_within(partial(Impl().forward, metadata, out=e))
    assert {id(x) for x in held} == {id(x) for x in (a, b, c, d, e)}
