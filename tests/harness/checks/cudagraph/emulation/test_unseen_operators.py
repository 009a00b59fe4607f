"""Operators that no dispatch mode sees: C++ functions registered without a dispatch key are opaque steps all the same.

torch brings two of them for its own tests, ``_test::leaky_relu`` and ``_test::cat``. What they do inside a mode sees;
that of vLLM's kernels it does not: see ``tests/vllm/test_graphs.py``.
"""

import numpy as np
import pytest
import torch
from inline_snapshot import snapshot
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attncheck.harness.checks.cudagraph.emulation import EmulatedRecorder
from attncheck.harness.checks.cudagraph.operators import passes_unseen, unseen_overload
from attncheck.harness.checks.cudagraph.recorder import CaptureError

leaky_relu = torch.ops._test.leaky_relu

LIBRARY = torch.library.Library("attncheck_unseen", "DEF")
LIBRARY.define("in_python(Tensor x) -> Tensor")
LIBRARY.impl("in_python", lambda x: x + 1, "CompositeImplicitAutograd")
LIBRARY.define("without_key(Tensor x) -> Tensor")
LIBRARY.impl("without_key", lambda x: x + 1)
LIBRARY.define("undeclared(Tensor x, Tensor out) -> ()")
LIBRARY.impl("undeclared", lambda x, out: np.copyto(out.numpy(), x.numpy()), "CPU")


@torch.library.custom_op("attncheck_unseen::calls_one", mutates_args={"out"})
def calls_one(out: Tensor, x: Tensor) -> None:
    out.copy_(leaky_relu(x, 0.25))


def recorded(forward):
    return EmulatedRecorder().record(lambda: forward)


def first_used(recording):
    (released,) = recording.released()
    return released.first_used


@pytest.mark.parametrize(
    ("operator", "is_unseen"),
    [
        (leaky_relu.default, True),
        (torch.ops._test.cat.default, True),
        (torch.ops.aten.reshape.default, False),
        (torch.ops.aten.add.Tensor, False),
        (torch.ops.attncheck_unseen.in_python.default, False),
        (torch.ops.attncheck_unseen.without_key.default, False),
        (torch.ops.attncheck_unseen.undeclared.default, False),
        (torch.ops.attncheck_unseen.calls_one.default, False),
        (torch.ops.quantized.max_pool1d.default, False),
    ],
    ids=str,
)
def test_a_c_function_without_a_dispatch_key_passes_unseen_and_no_other(operator, is_unseen):
    assert passes_unseen(operator) is is_unseen


def test_a_composite_with_a_kernel_for_the_cpu_is_seen():
    library = torch.library.Library("_test", "FRAGMENT")
    try:
        library.impl("leaky_relu", lambda x, v=0.01: x * v, "CPU")
        assert not passes_unseen(leaky_relu.default)
    finally:
        library._destroy()


def test_an_operator_without_a_tensor_is_the_host_s_business():
    assert unseen_overload(torch.ops.mkldnn._is_mkldnn_bf16_supported, (), {}) is None
    out = torch.zeros(1)
    recording = recorded(lambda: out.fill_(1 + torch.ops.mkldnn._is_mkldnn_bf16_supported()))
    out.zero_()
    recording.replay()
    assert out.item() in {1.0, 2.0}


@pytest.mark.parametrize("call", [leaky_relu, leaky_relu.default], ids=["packet", "overload"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_is_one_step_with_its_numbers_frozen(call, mode):
    x, out, slope = torch.tensor([-1.0, 2.0]), torch.zeros(2), [0.5]

    def forward():
        with mode():
            out.copy_(call(x, v=slope[0]))

    recording = recorded(forward)
    assert recording.reads(x)
    slope[0] = 0.0
    x.copy_(torch.tensor([-4.0, 3.0]))
    recording.replay()
    assert out.tolist() == [-2.0, 3.0]


def test_the_memory_it_was_given_is_known_by_its_name():
    out, given = torch.zeros(2), [torch.ones(2)]
    recording = recorded(lambda: out.copy_(leaky_relu(given[0])))
    assert recording.released() == ()
    given[0] = torch.ones(2)
    assert first_used(recording).startswith("_test.leaky_relu at ")
    assert "test_unseen_operators.py" in first_used(recording)


def test_within_an_operator_of_python_it_is_a_step_of_its_own():
    out, given = torch.zeros(2), [torch.tensor([-1.0, 2.0])]
    recording = recorded(lambda: calls_one(out, given[0]))
    given[0].copy_(torch.tensor([-4.0, 3.0]))
    recording.replay()
    assert out.tolist() == [-1.0, 3.0]
    given.clear()
    assert first_used(recording).startswith("_test.leaky_relu")


def test_host_memory_that_it_hands_to_a_kernel_of_the_device_is_no_part_of_a_graph(plain):
    recorder, out = EmulatedRecorder(), torch.zeros(4)
    x, twin = torch.ones(2), torch.full((2,), 5.0)
    recorder.mark_host(twin)
    with pytest.raises(CaptureError) as refused:
        recorder.record(lambda: lambda: out.copy_(torch.ops._test.cat([x, twin])))
    assert plain(str(refused.value)) == snapshot(
        "host copy: aten.cat at tests/harness/checks/cudagraph/emulation/test_unseen_operators.py:N in <lambda>"
    )


def test_made_of_host_memory_alone_it_is_host_work():
    recorder, out = EmulatedRecorder(), torch.zeros(2)
    twin = torch.full((2,), 5.0)
    recorder.mark_host(twin)
    recording = recorder.record(lambda: lambda: out.fill_(leaky_relu(twin).tolist()[0]))
    twin.fill_(7)
    recording.replay()
    assert out.tolist() == [5.0, 5.0]


def test_a_mode_of_the_backends_own_is_not_passed_over():
    x, out, seen = torch.tensor([-1.0, 2.0]), torch.zeros(2), []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    def forward():
        with Mode():
            out.copy_(leaky_relu(x, 0.5))

    recording = recorded(forward)
    assert seen == ["aten.leaky_relu.default", "aten.copy_.default"] * 2
    x.copy_(torch.tensor([-4.0, 3.0]))
    recording.replay()
    assert out.tolist() == [-2.0, 3.0]


def test_a_composite_of_python_stays_what_it_is_made_of():
    out, given = torch.zeros(2), [torch.ones(2)]
    recording = recorded(lambda: out.copy_(torch.ops.attncheck_unseen.in_python(given[0])))
    given[0] = torch.ones(2)
    assert first_used(recording).startswith("aten.add at ")


def test_an_opaque_step_writes_what_it_writes_whatever_its_schema_declares():
    x, out = torch.ones(2), torch.zeros(2)
    recording = recorded(lambda: torch.ops.attncheck_unseen.undeclared(x, out))
    x.fill_(3)
    recording.replay()
    assert out.tolist() == [3.0, 3.0]
