"""Replays give what eager code gives, name the memory they use, and leave torch as it was."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from inline_snapshot import snapshot
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from attncheck.harness.checks.cudagraph.emulation import EmulatedRecorder
from attncheck.harness.checks.cudagraph.operators import HostMemory
from attncheck.harness.checks.cudagraph.recorder import CaptureError, UnseenError

CPU = torch.device("cpu")


class Buffers:
    """Persistent inputs, refilled in place, and a second set for the eager answer."""

    def __init__(self, seed):
        self.x = torch.empty(4, 6)
        self.y = torch.empty(4, 6)
        self.index = torch.empty(5, dtype=torch.int64)
        self.out = torch.empty(4, 6)
        self.fill(seed)

    def fill(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self.x.copy_(torch.randn(4, 6, generator=generator))
        self.y.copy_(torch.randn(4, 6, generator=generator))
        self.index.copy_(torch.randperm(4, generator=generator).repeat(2)[:5])
        self.out.fill_(torch.nan)

    def state(self):
        return [self.x, self.y, self.index, self.out]


def same(left, right):
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(left, right, strict=True)
    )


def views(b):
    heads = b.x.view(4, 2, 3).transpose(0, 1)
    heads[1].mul_(2)
    first, second = b.y.split(3, dim=1)
    b.out[:, :3] = heads.reshape(8, 3)[:4] + first
    b.out[:, 3:].copy_(second.flip(1))
    b.out.unbind(0)[2].t().zero_()


def geometry_changed_later(b):
    x = b.x.clone()
    b.out.copy_(x)
    x.t_()
    b.out.view(6, 4).add_(x)
    x.resize_(3, 8).unsqueeze_(0)
    b.out.view(1, 3, 8).mul_(x)


def out_arguments(b):
    torch.add(b.x, b.y, alpha=3, out=b.out)
    grown = torch.empty(0, device=CPU)
    torch.mul(b.out, b.y, out=grown)
    torch.arange(6, out=b.out[0])
    b.out[1] = grown[1]


def several_outputs(b):
    values, order = b.x.sort(dim=1)
    top, places = b.y.topk(2, dim=1)
    largest, where = b.x.max(dim=0)
    b.out.copy_(values + order + largest + where)
    b.out[:, :2] += top * places
    b.out[:, 4:] += torch.stack(torch.var_mean(b.y, dim=1), 1)
    b.out += torch.frexp(b.x).exponent


def indexing(b):
    b.out.copy_(b.x[b.index[:4]])
    b.out[b.index[:2], 1] = b.y[b.index[2:4], 3]
    b.out[:, b.index[:1]] *= 2
    b.out.index_add_(0, b.index[:4], b.y)
    b.out.index_put_((b.index, torch.zeros_like(b.index)), b.y[0, :5], accumulate=True)
    b.out.index_copy_(1, b.index[:1], b.x[:, :1])
    b.out.scatter_(1, b.index[:1, None].expand(4, 1), b.y)
    b.out.scatter_reduce_(1, b.index[None, :3].expand(4, 3) % 2, b.y, reduce="amax")
    b.out += b.y.gather(0, b.index[:4, None].expand(4, 6)) + torch.take_along_dim(b.x, b.index[None, :1], dim=1)


def joined(b):
    wide = torch.cat([b.x, b.y, b.x[:, :2]], dim=1)
    deep = torch.stack((b.x, b.y))
    torch.cat([wide[:, :3], deep[1, :, 3:]], dim=1, out=b.out)
    first, second = torch._foreach_mul([b.x, b.y], 2.0)
    torch._foreach_add_([b.out, b.y], [first, second])


def made_inside(b):
    total = torch.zeros(6, device=CPU)
    total += b.x[0]
    filled = torch.full_like(b.x, 3).add_(torch.ones_like(b.y)).add_(b.x.new_zeros(6))
    unset = torch.empty_like(b.x).copy_(b.y)
    scale = torch.scalar_tensor(0.5, device=CPU)
    b.out.copy_(total + filled + unset * scale + torch.linspace(0, 1, 6, device=CPU).mul_(2))


def inference(b):
    with torch.inference_mode():
        made = b.x + 1
        made += b.y
        b.out.copy_(made)


FORWARDS = (views, geometry_changed_later, out_arguments, several_outputs, indexing, joined, made_inside, inference)
"""The arithmetic of attention is replayed by the honest backends of ``tests/miniatures``."""


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda forward: forward.__name__)
def test_a_replay_gives_what_eager_code_gives(forward):
    ours, eager = Buffers(0), Buffers(0)
    with torch.no_grad():
        recording = EmulatedRecorder().record(lambda: lambda: forward(ours))
        for _ in range(2):  # the warm-up, and the recorded run
            forward(eager)
        assert same(ours.state(), eager.state())
        for seed in (1, 2, 2):  # the same twice: a replay leaves nothing behind for the next
            ours.fill(seed)
            eager.fill(seed)
            recording.replay()
            forward(eager)
            assert same(ours.state(), eager.state())


def test_python_numbers_python_code_and_the_recorded_tensor_are_frozen():
    settings, out = {"scale": 2.0, "calls": 0, "x": torch.ones(3)}, torch.zeros(3)
    recorded = settings["x"]

    def prepare():
        settings["calls"] += 1  # anew for the warm-up and the capture
        factor = settings["calls"] * settings["scale"]
        return lambda: out.copy_(settings["x"] * factor)

    recording = EmulatedRecorder().record(prepare)
    settings |= {"scale": 5.0, "x": torch.full((3,), 9.0)}
    recorded.fill_(3)
    recording.replay()
    assert out.tolist() == [12.0] * 3
    assert settings["calls"] == 2


def test_random_numbers_are_drawn_anew():
    out = torch.zeros(8)
    recording = EmulatedRecorder().record(lambda: lambda: out.copy_(torch.rand(8, device=out.device)))
    first = out.clone()
    recording.replay()
    assert not torch.equal(out, first)


HERE = Path(__file__)


def test_it_reads_what_it_was_given_and_what_shares_that_memory():
    x, other, out = torch.ones(3, 4), torch.ones(3, 4), torch.zeros(3, 4)
    index, lens_cpu = torch.tensor([2, 0, 1]), torch.tensor([1, 2])
    recorder = EmulatedRecorder()
    recorder.mark_host(lens_cpu)
    made = []

    def forward():
        made[:] = [x[index] * lens_cpu.max().item(), x.new_zeros(3)]
        out.copy_(made[0] + torch.zeros_like(other))

    recording = recorder.record(lambda: forward)
    assert [recording.reads(t) for t in (x, x.view(-1)[3:], index, out)] == [True] * 4
    assert [recording.reads(t) for t in (other, lens_cpu, *made)] == [False] * 4
    recording = recorder.record(lambda: lambda: (x.t_(), x[1:, None].unbind()))
    assert not recording.reads(x)  # a change of geometry


def metadata_of_each_build(x, out, keep):
    metadata = SimpleNamespace(order=torch.empty(3, dtype=torch.int64, device=x.device).copy_(torch.tensor([2, 0, 1])))
    keep.append(metadata)
    return lambda: out.copy_(x[metadata.order])


def test_metadata_without_a_reference_are_released_memory():
    x, out = torch.ones(3, 4), torch.zeros(3, 4)
    kept = []
    recording = EmulatedRecorder().record(lambda: metadata_of_each_build(x, out, kept))
    assert recording.released() == ()
    kept.clear()
    line = metadata_of_each_build.__code__.co_firstlineno + 3
    (released,) = recording.released()
    assert str(released) == f"memory first used by aten.index at {HERE.relative_to(Path.cwd())}:{line} in <lambda>"
    recording.replay()  # the recording's own references keep it mapped


def test_a_workspace_that_grows_releases_the_one_recorded():
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
    recording = recorder.record(lambda: lambda: out.copy_(torch.mul(x, 2, out=workspace["rows"][:3])))
    workspace["rows"].resize_(2_000, 4)
    assert len(recording.released()) == 1


def test_memory_that_the_recorded_run_itself_resizes_is_kept():
    x, out = torch.ones(3, 4), torch.zeros(3, 4)
    kept = []

    def prepare():
        grown = torch.empty(0, device=x.device)
        kept.append(grown)
        return lambda: out.copy_(torch.mul(x, 2, out=grown))

    recording = EmulatedRecorder().record(prepare)
    assert recording.released() == ()
    x.fill_(3)
    recording.replay()
    assert out.unique().tolist() == [6.0]


def test_memory_seen_as_an_array_or_a_parameter_is_held():
    x, out = torch.ones(3), torch.zeros(3)
    array = x.numpy()
    weights = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    holder = [x, weights]

    def prepare():
        first, second = holder
        return lambda: out.copy_(first * second)

    recording = EmulatedRecorder().record(prepare)
    del x
    holder.clear()
    assert recording.released() == ()
    del array
    assert len(recording.released()) == 1


def test_the_account_lets_memory_go_and_confuses_no_address():
    host = HostMemory()
    for _ in range(5_000):
        host.mark(torch.empty(4))
        assert not host.holds(torch.empty(4))
    kept = torch.empty(4)
    host.mark(kept)
    assert host.holds(kept[1:])
    host.unmark(kept.view(2, 2))
    assert not host.holds(kept)


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
def test_what_is_made_before_a_recording_lies_with_what_it_is_made_of(plain, compute, is_on_host):
    device, host, recorder = torch.tensor([2, 5]), torch.tensor([2, 5]), EmulatedRecorder()
    recorder.mark_host(host)

    def prepare():
        made = compute(device, host)
        return lambda: device.fill_(int(made[0]))

    if is_on_host:
        (read,) = recorder.record(prepare).host_reads
        assert read.startswith("int() at ")
        return
    with pytest.raises(CaptureError) as refused:
        recorder.record(prepare)
    assert plain(str(refused.value)) == snapshot(
        "host read: int() at tests/harness/checks/cudagraph/emulation/test_emulated_recorder.py:N in <lambda>"
    )


@pytest.fixture(autouse=True)
def _modes_are_gone():
    yield
    assert _get_current_dispatch_mode_stack() == []
    assert _get_current_function_mode_stack() == []


def raising(error, run, before=int):
    """A forward that raises ``error`` from a run on: 1 is the warm-up, 2 the recorded one."""
    runs = []

    def forward():
        runs.append(None)
        before()
        if len(runs) >= run:
            raise error

    return forward


STOPS = (KeyboardInterrupt(), SystemExit(3))


@pytest.mark.parametrize(("error", "run"), [*((each, 1) for each in (ValueError(), *STOPS)), *((e, 2) for e in STOPS)])
def test_what_a_warm_up_raises_and_each_stop_comes_through(error, run):
    forward = raising(error, run)
    with pytest.raises(type(error)) as caught:
        EmulatedRecorder().record(lambda: forward)
    assert caught.value is error
    if run == 1:
        with pytest.raises(type(error)):
            EmulatedRecorder().record(raising(error, 1))  # of metadata


def raise_if_watched():
    if _get_current_dispatch_mode_stack():
        raise NotImplementedError("no rule for this mode")


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (
            raising(RuntimeError("only now,\non two lines"), 2),
            "forward raised while its operators were recorded: RuntimeError: only now, on two lines",
        ),
        (raise_if_watched, "it does not run while torch's modes watch it: NotImplementedError: no rule for this mode"),
    ],
)
def test_an_error_of_the_recorded_run_alone_is_nothing_the_recorder_understands(forward, words):
    with pytest.raises(UnseenError) as refused:
        EmulatedRecorder().record(lambda: forward)
    assert str(refused.value) == words


def test_an_error_after_a_violation_is_its_consequence():
    forward = raising(RuntimeError("afterwards"), 2, torch.tensor([1, 2]).tolist)
    with pytest.raises(CaptureError) as refused:
        EmulatedRecorder().record(lambda: forward)
    assert [(each.kind, each.call) for each in refused.value.violations] == [("host read", ".tolist()")]


def test_branches_of_higher_order_operators_cannot_be_seen():
    x = torch.ones(3)
    with pytest.raises(UnseenError, match=r"(?i)cond"):
        EmulatedRecorder().record(lambda: lambda: torch.cond(x.sum() > 0, lambda: x + 1, lambda: x - 1))


def test_compiled_code_is_recorded_as_it_was_written(plain):
    x, out = torch.ones(3), torch.zeros(3)
    compiled = torch.compile(lambda x: (x + 1).sin() * 2, backend="eager")
    recording = EmulatedRecorder().record(lambda: lambda: out.copy_(compiled(x)))
    x.fill_(0.25)
    recording.replay()
    assert torch.equal(out, torch.full_like(x, 1.25).sin() * 2)
    lens = torch.tensor([1, 2])
    reading = torch.compile(lambda x: x * lens.max().item(), backend="eager")
    with pytest.raises(CaptureError) as refused:
        EmulatedRecorder().record(lambda: lambda: reading(x))
    assert plain(str(refused.value)) == snapshot(
        "host read: .item() at tests/harness/checks/cudagraph/emulation/test_emulated_recorder.py:N in <lambda>"
    )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_replays_and_still_runs_alone():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    q, bias = torch.arange(32.0).view(1, 2, 4, 4) / 7, torch.tensor([0.5, 2.0])

    def attend():
        return flex.flex_attention(q, q.sin(), q, score_mod=lambda score, b, h, i, j: score * bias[h])

    out = torch.zeros_like(q)
    recording = EmulatedRecorder().record(lambda: lambda: out.copy_(attend()))
    bias.copy_(torch.tensor([1.0, 3.0]))
    q.mul_(0.5)
    recording.replay()
    torch.testing.assert_close(out, attend())


def test_watching_within_watching_counts_once():
    recorder, x = EmulatedRecorder(), torch.ones(3)
    with recorder.watching(), recorder.watching():
        recording = recorder.record(lambda: lambda: x.add_(1))
    recording.replay()
    assert x.tolist() == [4.0] * 3
