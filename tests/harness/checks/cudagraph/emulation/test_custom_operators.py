"""Custom operators are watched inside, and taped as what they are made of; where part of that is hidden, as one step."""

import ctypes
from types import ModuleType

import numpy as np
import pytest
import torch
from inline_snapshot import snapshot
from torch import Tensor

from attncheck.harness.checks.cudagraph.emulation import EmulatedRecorder
from attncheck.harness.checks.cudagraph.recorder import CaptureError

CONTEXT = {"factor": 2.0}
"""What a model runner keeps for its operators, and changes every step."""
# torch makes the schema of an operator of its annotations.


@torch.library.custom_op("attncheck_custom::scale", mutates_args={"out"})
def scale(out: Tensor, x: Tensor) -> None:
    out.copy_(x * CONTEXT["factor"])


@torch.library.custom_op("attncheck_custom::by_numpy", mutates_args={"out"})
def by_numpy(out: Tensor, x: Tensor) -> None:
    np.multiply(x.numpy(), 3.0, out=out.numpy())


@torch.library.custom_op("attncheck_custom::by_address", mutates_args={"out"})
def by_address(out: Tensor, x: Tensor) -> None:
    out.zero_()
    ctypes.memmove(out.data_ptr(), x.data_ptr(), x.numel() * x.element_size())


@torch.library.custom_op("attncheck_custom::both", mutates_args={"out"})
def both(out: Tensor, x: Tensor) -> None:
    by_numpy(out, x)
    out.mul_(CONTEXT["factor"])


def buffers():
    return torch.zeros(3), torch.ones(3)


def recorded(operator, out, x):
    CONTEXT["factor"] = 2.0
    return EmulatedRecorder().record(lambda: lambda: operator(out, x))


@torch.library.custom_op("attncheck_custom::converts", mutates_args={"out"})
def converts(out: Tensor, x: Tensor) -> None:
    out.copy_(x.view(1, 3).transpose(0, 1).contiguous().to(torch.float64).reshape(3).float())


@torch.inference_mode()
def converts_in_inference_mode(out, x):
    out.copy_(x.to(torch.float64).contiguous().float())


@torch.library.custom_op("attncheck_custom::add", mutates_args=("out",))
def add(out: Tensor, x: Tensor) -> None:
    out.add_(torch.ones(3, device=out.device))


@pytest.mark.parametrize(
    ("operator", "result"),
    [
        (scale, [8.0, 10.0, 12.0]),  # what Python looks up inside an operator is frozen
        (both, [24.0, 30.0, 36.0]),  # also beside an operator inside it that is hidden
        (by_numpy, [12.0, 15.0, 18.0]),  # hidden work is done again
        (by_address, [4.0, 5.0, 6.0]),
        (converts, [4.0, 5.0, 6.0]),  # some of its operators copy here, and others do not
        (converts_in_inference_mode, [4.0, 5.0, 6.0]),
        (add, [3.0, 3.0, 3.0]),  # once in the warm-up, the recording and the replay
    ],
)
def test_an_operator_is_repeated_and_what_it_looked_up_is_frozen(operator, result):
    out, x = buffers()
    recording = recorded(operator, out, x)
    assert recording.released() == ()
    CONTEXT["factor"] = 100.0
    x.copy_(torch.tensor([4.0, 5.0, 6.0]))
    recording.replay()
    assert out.tolist() == result


def test_host_arguments_of_a_hidden_operator_are_frozen_and_reported():
    recorder, (out, twin) = EmulatedRecorder(), buffers()
    recorder.mark_host(twin)
    recording = recorder.record(lambda: lambda: by_address(out, twin))
    twin.fill_(7)
    recording.replay()
    assert out.tolist() == [1.0] * 3
    assert not recording.reads(twin)
    (read,) = recording.host_reads
    assert read.startswith("attncheck_custom.by_address at ")


def test_forgetting_what_was_taped_inside_forgets_its_references():
    for operator in (scale, by_numpy, by_address, both):
        out, x = buffers()
        recording = recorded(operator, out, x)
        assert recording.released() == ()
        assert recording.reads(x)
        del x
        assert len(recording.released()) == 1


@torch.library.custom_op("attncheck_custom::sines", mutates_args=())
def sines(x: Tensor) -> tuple[Tensor, Tensor]:
    array = np.asarray(x)
    return torch.from_numpy(np.sin(array)), torch.empty_like(x).copy_(torch.from_numpy(np.cos(array)))


def test_the_outputs_of_an_operator_keep_their_order():
    out, x = buffers()

    def forward():
        sine, cosine = sines(x)
        out.copy_(sine * sine + cosine)

    recording = EmulatedRecorder().record(lambda: forward)
    x.fill_(0.5)
    recording.replay()
    assert torch.equal(out, torch.full_like(out, 0.5).sin() ** 2 + torch.full_like(out, 0.5).cos())


@torch.library.custom_op("attncheck_custom::planned", mutates_args=())
def planned(x: Tensor, plan: Tensor) -> Tensor:
    return x * sum(plan.tolist()) * plan.max().item()


@pytest.mark.parametrize("is_on_host", [True, False])
def test_an_operator_may_read_a_host_argument_and_no_other(is_on_host):
    (out, x), plan = buffers(), torch.tensor([1, 2, 1])
    recorder = EmulatedRecorder()
    if is_on_host:
        recorder.mark_host(plan)
        recording = recorder.record(lambda: lambda: out.copy_(planned(x, plan)))
        plan.fill_(100)
        x.fill_(2)
        recording.replay()
        assert out.tolist() == [16.0] * 3  # 4 times 2, as it was
        return
    with pytest.raises(CaptureError) as caught:
        recorder.record(lambda: lambda: out.copy_(planned(x, plan)))
    found = [(v.kind, v.call, v.where.partition(" in ")[2]) for v in caught.value.violations]
    assert found == [("host read", ".tolist()", "planned"), ("host read", ".item()", "planned")]


@pytest.mark.parametrize("key", ["CPU", "CompositeExplicitAutograd"])
def test_operators_registered_by_hand_are_watched_as_well(plain, key):
    reads = False

    def double(out, x, factor=2):
        out.copy_(x * factor)
        if reads:
            int(x.sum())

    (out, x), old = buffers(), torch.ops.attncheck_custom_old
    with torch.library._scoped_library("attncheck_custom_old", "DEF") as library:
        library.define("double(Tensor(a!) out, Tensor x, float factor=2) -> ()")
        library.impl("double", double, key)
        recording = EmulatedRecorder().record(lambda: lambda: old.double(out, x))
        x.fill_(7)
        recording.replay()
        assert out.tolist() == [14.0] * 3
        reads = True
        with pytest.raises(CaptureError) as refused:
            EmulatedRecorder().record(lambda: lambda: old.double(out, x))
    assert plain(str(refused.value)) == snapshot(
        "host read: int() at tests/harness/checks/cudagraph/emulation/test_custom_operators.py:N in double"
    )


def interpreter():
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


def test_what_tritons_interpreter_reads_is_the_kernels_own_work():
    out, one = torch.zeros(3), torch.tensor([5])
    launch = interpreter().launch

    def kernel(out, one):
        out += one

    recording = EmulatedRecorder().record(lambda: lambda: launch(kernel, out, one))
    assert out.tolist() == [10.0] * 3
    out.fill_(1)
    recording.replay()
    assert out.tolist() == [1.0] * 3  # an unwrapped launch is invisible: neither its effect nor its copies are repeated
    assert recording.reads(out)
