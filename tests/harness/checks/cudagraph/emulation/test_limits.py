"""The emulated recorder reports code that raises, and leaves torch unchanged."""

from collections.abc import Callable, Iterator

import pytest
import torch
from inline_snapshot import snapshot
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from attncheck.harness.checks.cudagraph.emulation import EmulatedRecorder
from attncheck.harness.checks.cudagraph.recorder import CaptureError, UnseenError


@pytest.fixture(autouse=True)
def _modes_are_gone() -> Iterator[None]:
    yield
    assert _get_current_dispatch_mode_stack() == []
    assert _get_current_function_mode_stack() == []


def raising_in_run(number: int, error: BaseException, before: Callable[[], object] = int) -> Callable[[], object]:
    runs = []

    def forward() -> None:
        runs.append(None)
        before()
        if len(runs) == number:
            raise error

    return forward


@pytest.mark.parametrize("error", [ValueError("no such layout"), KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize("in_prepare", [True, False])
def test_what_prepare_or_a_warm_up_raises_comes_through(error: BaseException, in_prepare: bool) -> None:
    def forward() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        EmulatedRecorder().record(forward if in_prepare else (lambda: forward))
    assert caught.value is error


def test_an_error_of_the_recorded_run_alone_is_nothing_the_recorder_understands() -> None:
    forward = raising_in_run(2, RuntimeError("only now,\non two lines"))
    with pytest.raises(UnseenError) as caught:
        EmulatedRecorder().record(lambda: forward)
    assert str(caught.value) == snapshot(
        "forward raised while its operators were recorded: RuntimeError: only now, on two lines"
    )


def test_an_error_after_a_violation_is_its_consequence(plain: Callable[[str], str]) -> None:
    lens = torch.tensor([1, 2])
    forward = raising_in_run(2, RuntimeError("afterwards"), lens.tolist)
    with pytest.raises(CaptureError) as refused:
        EmulatedRecorder().record(lambda: forward)
    assert plain(str(refused.value)) == snapshot(
        "host read: .tolist() at tests/harness/checks/cudagraph/emulation/test_limits.py:N in forward"
    )


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_a_stop_of_the_recorded_run_comes_through(error: BaseException) -> None:
    forward = raising_in_run(2, error)
    with pytest.raises(type(error)):
        EmulatedRecorder().record(lambda: forward)


def test_code_that_modes_break_cannot_be_seen() -> None:
    x = torch.ones(3)

    def forward() -> None:
        if _get_current_dispatch_mode_stack():
            raise NotImplementedError("no rule for this mode")
        x.add_(1)

    with pytest.raises(UnseenError) as refused:
        EmulatedRecorder().record(lambda: forward)
    assert str(refused.value) == snapshot(
        "it does not run while torch's modes watch it: NotImplementedError: no rule for this mode"
    )


def test_branches_of_higher_order_operators_cannot_be_seen() -> None:
    x = torch.ones(3)
    with pytest.raises(UnseenError, match=r"(?i)cond"):
        EmulatedRecorder().record(lambda: lambda: torch.cond(x.sum() > 0, lambda: x + 1, lambda: x - 1))


def test_a_mode_of_the_backends_own_sees_what_it_always_sees() -> None:
    seen, x = [], torch.ones(3)

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    def forward() -> None:
        with Mode():
            x.add_(1)

    recording = EmulatedRecorder().record(lambda: forward)
    recording.replay()
    assert seen == ["aten.add_.Tensor"] * 2
    assert x.tolist() == [4.0] * 3


def test_watching_within_watching_counts_once() -> None:
    recorder, x = EmulatedRecorder(), torch.ones(3)

    def prepare() -> Callable[[], object]:
        with recorder.watching():
            return lambda: x.add_(1)

    with recorder.watching():
        recording = recorder.record(prepare)
    recording.replay()
    assert x.tolist() == [4.0] * 3


def test_compiled_code_is_recorded_as_it_was_written(plain: Callable[[str], str]) -> None:
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
        "host read: .item() at tests/harness/checks/cudagraph/emulation/test_limits.py:N in <lambda>"
    )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_replays_and_still_runs_alone() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    q, bias = torch.arange(32.0).view(1, 2, 4, 4) / 7, torch.tensor([0.5, 2.0])

    def attend() -> torch.Tensor:
        return flex.flex_attention(q, q.sin(), q, score_mod=lambda score, b, h, i, j: score * bias[h])

    out = torch.zeros_like(q)
    recording = EmulatedRecorder().record(lambda: lambda: out.copy_(attend()))
    bias.copy_(torch.tensor([1.0, 3.0]))
    q.mul_(0.5)
    recording.replay()
    torch.testing.assert_close(out, attend())
