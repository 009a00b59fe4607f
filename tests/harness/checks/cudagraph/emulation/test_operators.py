"""Custom operators are recorded as one piece of work, and watched inside."""

from collections.abc import Callable, Iterator
from types import ModuleType

import numpy as np
import pytest
import torch
from inline_snapshot import snapshot
from torch import Tensor

from attncheck.harness.checks.cudagraph.emulation import EmulatedRecorder
from attncheck.harness.checks.cudagraph.recorder import CaptureError


@torch.library.custom_op("attncheck_emulation::scale_rows", mutates_args=("out",))
def scale_rows(out: Tensor, x: Tensor, lens: Tensor, factor: float = 2.0) -> None:
    """A kernel of the CPU: it takes the memory of its arguments and writes there, which torch does not see."""
    np.multiply(x.numpy(), factor * lens.numpy()[:, None], out=out.numpy())


@torch.library.custom_op("attncheck_emulation::sines", mutates_args=())
def sines(x: Tensor) -> tuple[Tensor, Tensor]:
    array = np.asarray(x)
    return torch.from_numpy(np.sin(array)), torch.empty_like(x).copy_(torch.from_numpy(np.cos(array)))


@torch.library.custom_op("attncheck_emulation::reading", mutates_args=())
def reading(x: Tensor, lens: Tensor) -> Tensor:
    longest = lens.max().item()
    return x[:, : max(lens.tolist())] * longest


@torch.library.custom_op("attncheck_emulation::planned", mutates_args=())
def planned(x: Tensor, plan: Tensor) -> Tensor:
    return x * sum(plan.tolist())


@torch.library.custom_op("attncheck_emulation::count", mutates_args=("out",))
def count(out: Tensor) -> None:
    out.add_(torch.ones(2, device=out.device))


def buffers() -> tuple[Tensor, Tensor, Tensor]:
    return torch.arange(6.0).view(3, 2), torch.tensor([1, 2, 1]), torch.zeros(3, 2)


def test_an_operator_that_torch_cannot_look_into_replays_exactly() -> None:
    x, lens, out = buffers()
    recording = EmulatedRecorder().record(lambda: lambda: scale_rows(out, x, lens, 3.0))
    x.fill_(1.5)
    lens.copy_(torch.tensor([4, 0, 2]))
    recording.replay()
    assert out.tolist() == [[18.0, 18.0], [0.0, 0.0], [9.0, 9.0]]


def test_what_an_operator_does_is_not_done_twice() -> None:
    out = torch.zeros(3, 2)
    EmulatedRecorder().record(lambda: lambda: count(out)).replay()
    assert out.tolist() == [[3.0, 3.0]] * 3  # the warm-up, the recording, the replay


def test_the_outputs_of_an_operator_keep_their_order() -> None:
    x, _, out = buffers()

    def forward() -> None:
        sine, cosine = sines(x)
        out.copy_(sine * sine + cosine)

    recording = EmulatedRecorder().record(lambda: forward)
    x.fill_(0.5)
    recording.replay()
    assert torch.equal(out, torch.full_like(out, 0.5).sin() ** 2 + torch.full_like(out, 0.5).cos())


def test_reads_within_an_operator_are_reported_with_its_own_line() -> None:
    x, lens, _ = buffers()
    with pytest.raises(CaptureError) as caught:
        EmulatedRecorder().record(lambda: lambda: reading(x, lens))
    found = [(v.kind, v.call, v.where.partition(" in ")[2]) for v in caught.value.violations]
    assert found == [("host read", ".item()", "reading"), ("host read", ".tolist()", "reading")]


def test_a_host_argument_may_be_read_and_is_frozen() -> None:
    x, plan, out = buffers()
    recorder = EmulatedRecorder()
    recorder.mark_host(plan)
    recording = recorder.record(lambda: lambda: out.copy_(planned(x, plan)))
    plan.fill_(100)
    x.fill_(2)
    recording.replay()
    assert out.tolist() == [[8.0, 8.0]] * 3  # 1 + 2 + 1, as it was


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("attncheck_emulation_old", "DEF") as library:
        library.define("double(Tensor(a!) out, Tensor x, float factor=2) -> ()")
        yield library


@pytest.mark.parametrize("key", ["CPU", "CompositeExplicitAutograd"])
def test_operators_registered_by_hand_are_watched_as_well(
    plain: Callable[[str], str], library: torch.library.Library, key: str
) -> None:
    reads = False

    def double(out: Tensor, x: Tensor, factor: float = 2) -> None:
        out.copy_(x * factor)
        if reads:
            int(x.sum())

    library.impl("double", double, key)
    x, _, out = buffers()
    recording = EmulatedRecorder().record(lambda: lambda: torch.ops.attncheck_emulation_old.double(out, x))
    x.fill_(7)
    recording.replay()
    assert out.tolist() == [[14.0, 14.0]] * 3
    reads = True
    with pytest.raises(CaptureError) as refused:
        EmulatedRecorder().record(lambda: lambda: torch.ops.attncheck_emulation_old.double(out, x))
    assert plain(str(refused.value)) == snapshot(
        "host read: int() at tests/harness/checks/cudagraph/emulation/test_operators.py:N in double"
    )


def interpreter() -> ModuleType:
    """A module in place of Triton's interpreter: it fetches arguments, runs the kernel, and writes them back."""
    module = ModuleType("triton.runtime.pretended")
    source = (
        "def launch(kernel, *tensors):\n"
        "    fetched = [tensor.cpu() for tensor in tensors]\n"
        "    kernel(*(tensor.numpy() for tensor in fetched))\n"
        "    assert all(int(tensor.sum()) == tensor.tolist()[0] for tensor in fetched[1:])\n"
        "    for tensor, result in zip(tensors, fetched):\n"
        "        tensor.data.copy_(result.to(tensor.device).data)\n"
    )
    exec(compile(source, "pretended.py", "exec"), module.__dict__)
    return module


def test_what_tritons_interpreter_reads_is_the_kernels_own_work() -> None:
    out, one = torch.zeros(3), torch.tensor([5])
    launch = interpreter().launch

    def kernel(out: np.ndarray, one: np.ndarray) -> None:
        out += one

    recording = EmulatedRecorder().record(lambda: lambda: launch(kernel, out, one))
    assert out.tolist() == [10.0] * 3
    out.fill_(1)
    recording.replay()
    assert out.tolist() == [1.0] * 3  # an unwrapped launch is invisible: neither its effect nor its copies are repeated
    assert recording.reads(out)
