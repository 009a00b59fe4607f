"""Custom operators are taped as what they are made of; where part of that is hidden, as one step."""

import ctypes

import numpy as np
import pytest
import torch
from torch import Tensor

from attncheck.harness.checks.cudagraph.emulation import EmulatedRecorder

CONTEXT = {"factor": 2.0}
"""What a model runner keeps for its operators, and changes every step."""


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


def buffers() -> tuple[Tensor, Tensor]:
    return torch.zeros(3), torch.ones(3)


def recorded(operator, out, x):
    CONTEXT["factor"] = 2.0
    return EmulatedRecorder().record(lambda: lambda: operator(out, x))


@pytest.mark.parametrize(("operator", "result"), [(scale, 8.0), (both, 24.0)])
def test_what_python_looks_up_inside_an_operator_is_frozen(operator, result) -> None:
    """Also beside an operator inside it that is hidden."""
    out, x = buffers()
    recording = recorded(operator, out, x)
    CONTEXT["factor"] = 100.0
    x.fill_(4)
    recording.replay()
    assert out.tolist() == [result] * 3


def test_hidden_work_inside_an_operator_is_done_again() -> None:
    for operator, factor in ((by_numpy, 3.0), (by_address, 1.0)):
        out, x = buffers()
        recording = recorded(operator, out, x)
        x.copy_(torch.tensor([4.0, 5.0, 6.0]))
        recording.replay()
        assert out.tolist() == [4.0 * factor, 5.0 * factor, 6.0 * factor]


def test_host_arguments_of_a_hidden_operator_are_frozen_and_reported() -> None:
    recorder, (out, twin) = EmulatedRecorder(), buffers()
    recorder.mark_host(twin)
    recording = recorder.record(lambda: lambda: by_address(out, twin))
    twin.fill_(7)
    recording.replay()
    assert out.tolist() == [1.0] * 3
    assert not recording.reads(twin)
    (read,) = recording.host_reads
    assert read.startswith("attncheck_custom.by_address at ")


def test_forgetting_what_was_taped_inside_forgets_its_references() -> None:
    for operator in (scale, by_numpy, by_address, both):
        out, x = buffers()
        recording = recorded(operator, out, x)
        assert recording.released() == ()
        assert recording.reads(x)
        del x
        assert len(recording.released()) == 1


@torch.library.custom_op("attncheck_custom::converts", mutates_args={"out"})
def converts(out: Tensor, x: Tensor) -> None:
    out.copy_(x.view(1, 3).transpose(0, 1).contiguous().to(torch.float64).reshape(3).float())


def test_operators_that_copy_or_not_are_distinguished_inside_an_operator() -> None:
    out, x = buffers()
    recording = recorded(converts, out, x)
    assert recording.released() == ()
    x.copy_(torch.tensor([4.0, 5.0, 6.0]))
    recording.replay()
    assert out.tolist() == [4.0, 5.0, 6.0]


def test_operators_that_copy_or_not_are_distinguished_in_inference_mode() -> None:
    out, x = buffers()

    def forward() -> None:
        with torch.inference_mode():
            out.copy_(x.to(torch.float64).contiguous().float())

    recording = EmulatedRecorder().record(lambda: forward)
    assert recording.released() == ()
    x.fill_(7)
    recording.replay()
    assert out.tolist() == [7.0] * 3
