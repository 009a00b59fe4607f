"""A recording names the memory it uses: its inputs, and memory without another reference."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.harness.checks.cudagraph.emulation import EmulatedRecorder
from attncheck.harness.checks.cudagraph.operators import HostMemory
from attncheck.harness.checks.cudagraph.recorder import CaptureError, Recording

HERE = Path(__file__)


def table() -> torch.Tensor:
    return torch.tensor([2, 0, 1])


def test_it_reads_what_it_was_given_and_what_shares_that_memory() -> None:
    x, index, out, other, lens_cpu = (
        torch.ones(3, 4),
        table(),
        torch.zeros(3, 4),
        torch.ones(3, 4),
        torch.tensor([1, 2]),
    )
    recorder = EmulatedRecorder()
    recorder.mark_host(lens_cpu)
    made: list[torch.Tensor] = []

    def forward() -> None:
        made[:] = [x[index] * lens_cpu.max().item(), x.new_zeros(3)]
        out.copy_(made[0] + torch.zeros_like(other))

    recording = recorder.record(lambda: forward)
    assert [recording.reads(t) for t in (x, x.view(-1)[3:], index, out)] == [True] * 4
    assert [recording.reads(t) for t in (other, lens_cpu, *made)] == [False] * 4


def test_a_change_of_geometry_reads_nothing() -> None:
    x = torch.ones(2, 3)
    recording = EmulatedRecorder().record(lambda: lambda: (x.t_(), x[1:, None].unbind()))
    assert not recording.reads(x)


def metadata_of_each_build(x: torch.Tensor, out: torch.Tensor, keep: list[object]) -> Callable[[], object]:
    metadata = SimpleNamespace(order=torch.empty(3, dtype=torch.int64, device=x.device).copy_(table()))
    keep.append(metadata)
    return lambda: out.copy_(x[metadata.order])


def test_metadata_without_a_reference_are_released_memory() -> None:
    x, out = torch.ones(3, 4), torch.zeros(3, 4)
    kept: list[object] = []
    recording = EmulatedRecorder().record(lambda: metadata_of_each_build(x, out, kept))
    assert recording.released() == ()
    kept.clear()
    line = metadata_of_each_build.__code__.co_firstlineno + 3
    (released,) = recording.released()
    assert str(released) == f"memory first used by aten.index at {HERE.relative_to(Path.cwd())}:{line} in <lambda>"
    recording.replay()  # the recording's own references keep it mapped


def test_a_workspace_that_grows_releases_the_one_recorded() -> None:
    workspace, number = {"rows": torch.empty(3, 4)}, torch.tensor(2.0)
    x, out, recorder = torch.ones(3, 4), torch.zeros(3, 4), EmulatedRecorder()
    recorder.mark_host(number)  # beside which memory is tracked by another way
    recording = recorder.record(lambda: lambda: out.copy_(torch.mul(x, number, out=workspace["rows"])))
    assert recording.released() == ()
    part = workspace["rows"][1:]
    workspace["rows"] = torch.empty(8, 4)
    assert recording.released() == ()  # a view holds it
    del part
    assert [memory.first_used.partition(" at ")[0] for memory in recording.released()] == ["aten.mul"]


def test_graphs_of_several_buckets_do_not_hold_memory_for_each_other() -> None:
    workspace = {"rows": torch.empty(3, 4)}
    x, out, recorder = torch.ones(3, 4), torch.zeros(3, 4), EmulatedRecorder()

    def forward(rows: int) -> None:
        out[:rows] = torch.mul(x[:rows], 2, out=workspace["rows"][:rows])

    recordings = [recorder.record(lambda rows=rows: lambda: forward(rows)) for rows in (3, 2)]
    assert [recording.released() for recording in recordings] == [(), ()]
    workspace["rows"] = torch.empty(8, 4)
    assert [len(recording.released()) for recording in recordings] == [1, 1]


def test_a_resize_that_moves_memory_releases_it() -> None:
    workspace, x, out = torch.empty(3, 4), torch.ones(3, 4), torch.zeros(3, 4)
    recording = EmulatedRecorder().record(lambda: lambda: out.copy_(torch.mul(x, 2, out=workspace)))
    workspace.resize_(2_000, 4)
    assert [memory.first_used.partition(" at ")[0] for memory in recording.released()] == ["aten.mul"]


def test_memory_that_the_recorded_run_itself_resizes_is_kept() -> None:
    x, out = torch.ones(3, 4), torch.zeros(3, 4)
    kept: list[torch.Tensor] = []

    def prepare() -> Callable[[], object]:
        grown = torch.empty(0, device=x.device)
        kept.append(grown)
        return lambda: out.copy_(torch.mul(x, 2, out=grown))

    recording = EmulatedRecorder().record(prepare)
    assert recording.released() == ()
    x.fill_(3)
    recording.replay()
    assert out.unique().tolist() == [6.0]


def test_memory_seen_as_an_array_or_a_parameter_is_held() -> None:
    x, out = torch.ones(3), torch.zeros(3)
    array = x.numpy()
    weights = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    holder = [x, weights]

    def prepare() -> Callable[[], object]:
        first, second = holder
        return lambda: out.copy_(first * second)

    recording = EmulatedRecorder().record(prepare)
    del x
    holder.clear()
    assert recording.released() == ()
    del array
    assert len(recording.released()) == 1


def test_what_a_recording_allocates_is_its_own() -> None:
    out = torch.zeros(3)
    recording = EmulatedRecorder().record(lambda: lambda: out.copy_(torch.arange(3, device=out.device) + 1.5))
    assert recording.released() == ()
    out.zero_()
    recording.replay()
    assert out.tolist() == [1.5, 2.5, 3.5]


def test_the_account_lets_memory_go_and_confuses_no_address() -> None:
    host = HostMemory()
    for _ in range(5_000):
        host.mark(torch.empty(4))
        assert not host.holds(torch.empty(4))
    kept = torch.empty(4)
    host.mark(kept)
    assert host.holds(kept[1:])
    host.unmark(kept.view(2, 2))
    assert not host.holds(kept)


def test_a_host_read_is_recorded_and_no_violation() -> None:
    recorder, lens, out = EmulatedRecorder(), torch.tensor([2, 5]), torch.zeros(2)
    recorder.mark_host(lens)
    recording = recorder.record(lambda: lambda: out.fill_(int(lens.max())))
    (host_read,) = recording.host_reads
    assert host_read.startswith("int() at ")
    assert "test_memory.py" in host_read
    assert recorder.record(lambda: lambda: out.fill_(1)).host_reads == ()


def recorded_with(compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Recording:
    """A recording that reads what ``compute`` made before it, of memory of the device and of the host."""
    device, host, recorder = torch.tensor([2, 5]), torch.tensor([2, 5]), EmulatedRecorder()
    recorder.mark_host(host)

    def prepare() -> Callable[[], object]:
        made = compute(device, host)
        return lambda: device.fill_(int(made[0]))

    return recorder.record(prepare)


@pytest.mark.parametrize(
    ("compute", "is_on_host"),
    [
        (lambda device, host: host + 1, True),
        (lambda device, host: torch.arange(2) + host, True),
        (lambda device, host: torch.cat([host, host]), True),
        (lambda device, host: torch.func.vmap(lambda value: value * 2)(host), True),
        (lambda device, host: host[:1].detach(), True),
        (lambda device, host: host.to(torch.int64), True),
        (lambda device, host: device + host, False),
        (lambda device, host: torch.where(device > 0, host, host), False),
        (lambda device, host: host + device, False),
        (lambda device, host: device.to(torch.int64), False),
        (lambda device, host: torch.zeros_like(device), False),
        (lambda device, host: device[:1].detach(), False),
    ],
)
def test_what_is_made_before_a_recording_lies_with_what_it_is_made_of(plain, compute, is_on_host) -> None:
    if is_on_host:
        (read,) = recorded_with(compute).host_reads
        assert read.startswith("int() at ")
        return
    with pytest.raises(CaptureError) as refused:
        recorded_with(compute)
    assert plain(str(refused.value)) == snapshot(
        "host read: int() at tests/harness/checks/cudagraph/emulation/test_memory.py:N in <lambda>"
    )
