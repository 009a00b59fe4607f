"""Calls that a graph cannot hold are reported with kind, call and line; other calls are not."""

import operator
import statistics
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from attncheck.harness.checks.cudagraph.emulation import EmulatedRecorder
from attncheck.harness.checks.cudagraph.recorder import CaptureError

HERE = Path(__file__)


def inputs():
    lens = torch.tensor([2, 1, 3], dtype=torch.int32)
    return SimpleNamespace(
        x=torch.arange(12.0).view(3, 4),
        out=torch.zeros(3, 4),
        index=torch.tensor([2, 0]),
        mask=torch.tensor([True, False, True]),
        lens=lens,
        lens_cpu=lens.clone(),
        one_cpu=torch.tensor(2.0),
        device=torch.device("cpu"),
    )


def violations(forward):
    """All that recording ``forward`` complains about."""
    b = inputs()
    return violations_of(lambda: forward(b), b.lens_cpu, b.one_cpu)


def violations_of(forward, *on_host):
    recorder = EmulatedRecorder()
    recorder.mark_host(*on_host)
    try:
        recorder.record(lambda: forward)
    except CaptureError as error:
        return error.violations
    return ()


HOST_READS = {
    ".item()": lambda b: b.x[0, 0].item(),
    ".tolist()": lambda b: b.lens.tolist(),
    "bool()": lambda b: "yes" if b.lens[0] > 1 else "no",
    "int()": lambda b: int(b.lens[0]),
    "float()": lambda b: float(b.x[0, 0]),
    "a tensor as an index": lambda b: [list(range(b.lens[0])), operator.index(b.lens[0]), [1, 2, 3][b.lens[1]]],
    "in": lambda b: 2 in b.lens,
    "repr()": lambda b: repr(b.lens),
    "format()": lambda b: f"{b.lens[0]}",
    ".numpy()": lambda b: b.lens.numpy(),
    "numpy.asarray()": lambda b: np.asarray(b.lens),
    ".cpu()": lambda b: b.lens.cpu(),
    '.to("cpu")': lambda b: [b.lens.to("cpu"), b.lens.to(device="cpu")],
    '.to("cpu") ': lambda b: b.lens.to(b.lens_cpu.device),
    "torch.equal()": lambda b: torch.equal(b.lens, b.lens),
    "torch.allclose()": lambda b: torch.allclose(b.x, b.x),
    "torch.is_nonzero()": lambda b: torch.is_nonzero(b.lens[0]),
    "torch.arange()": lambda b: torch.arange(b.lens[0], device=b.device),
    "x[...] (aten._local_scalar_dense)": lambda b: b.x[b.lens[1] :],
    "x[...] (aten._local_scalar_dense) ": lambda b: b.x[b.lens[1], 0],
    ".view()": lambda b: b.x.view(b.lens[2], 4),
    ".view() ": lambda b: b.x.view([b.lens[2], 4]),
    ".expand()": lambda b: b.x[:1].expand(b.lens[2], 4),
    ".select()": lambda b: b.x.select(0, b.lens[0]),
    "torch.narrow()": lambda b: torch.narrow(b.x, 0, b.lens[1], 1),
    ".copy_()": lambda b: b.lens_cpu.copy_(b.lens),
    "torch.tensor()": lambda b: torch.tensor([b.x[0, 0], b.x[0, 1]]),
    ".masked_fill()": lambda b: b.x.masked_fill(b.x > 1, b.x[0, 0]),
}


@pytest.mark.parametrize("call", HOST_READS)
def test_reads_on_the_host_are_violations(call):
    assert [(v.kind, v.call) for v in violations(HOST_READS[call])] == [("host read", call.strip())]


DYNAMIC = {
    ".nonzero()": lambda b: b.lens.nonzero(),
    "torch.where()": lambda b: torch.where(b.mask),
    "x[...] (aten.index)": lambda b: [b.x[b.mask], b.x[b.mask.to(torch.bool), 1:]],
    "x[...] = y (aten.index_put_)": lambda b: operator.setitem(b.out, b.mask, b.x[:2]),
    "x[...] = y (aten.index_put_) ": lambda b: operator.setitem(b.out, (b.mask, b.x[0] > 1), 0.0),
    "x[...] = y (aten.index_put_)  ": lambda b: operator.setitem(b.out, b.mask, b.x[0, 0]),
    ".index_put_()": lambda b: b.out.index_put_((b.mask,), b.one_cpu, accumulate=True),
    "torch.masked_select()": lambda b: torch.masked_select(b.x, b.x > 1),
    "torch.unique_consecutive()": lambda b: torch.unique_consecutive(b.lens),
    "torch.bincount()": lambda b: torch.bincount(b.lens),
    ".repeat_interleave()": lambda b: b.x.repeat_interleave(b.lens, dim=0),
}


@pytest.mark.parametrize("call", DYNAMIC)
def test_shapes_that_depend_on_data_are_violations(call):
    assert {(v.kind, v.call) for v in violations(DYNAMIC[call])} == {("data-dependent shape", call.strip())}


HOST_COPIES = {
    "torch.tensor()": lambda b: [torch.tensor([1, 2], device=b.device), torch.tensor(2.0, device=b.x.device)],
    "torch.as_tensor()": lambda b: [
        torch.as_tensor([1], device=b.device),
        torch.as_tensor(b.lens_cpu, device=b.device),
    ],
    ".new_tensor()": lambda b: b.x.new_tensor([1.0]),
    ".to()": lambda b: [torch.from_numpy(np.ones(3)).to(b.device), b.lens_cpu.to(b.x.device), b.lens_cpu.to(b.x)],
    ".copy_()": lambda b: b.lens.copy_(b.lens_cpu),
    "x[...] (aten.index)": lambda b: [b.x[[0, 1]], b.x[np.array([1, 0])], b.x[b.lens_cpu.long() - 1]],
    "x[...] = y (aten.index_put_)": lambda b: [operator.setitem(b.out, [0, 1], b.x[:2])],
    ".add()": lambda b: b.x + torch.arange(4),
    "torch.cat()": lambda b: torch.cat([b.lens, b.lens_cpu]),
    # torch brings the number to the device before it scatters it, and copies it into a single element
    "x[...] = y (aten.index_put_) ": lambda b: operator.setitem(b.out, b.index, 0.0),
    "x[...] = y (aten.index_put_)  ": lambda b: operator.setitem(b.out, [True, False, True], 0.0),
    "x[...] = y (aten.copy_)": lambda b: operator.setitem(b.out, (0, 0), 1.0),
}


@pytest.mark.parametrize("call", HOST_COPIES)
def test_copies_from_the_host_are_violations(call):
    assert {(v.kind, v.call) for v in violations(HOST_COPIES[call])} == {("host copy", call.strip())}


def lazily_made(b):
    if not hasattr(b, "steps"):
        b.steps = torch.tensor([0.0, 1.0, 2.0, 3.0], device=b.device)
        b.longest = b.lens.max().item()
    b.out.copy_(b.x + b.steps * b.longest)


LEGAL = {
    "reading a host twin": lambda b: b.out.mul_(
        b.lens_cpu.max().item() + sum(b.lens_cpu.tolist()) + b.lens_cpu.numpy()[0]
    ),
    "a loop over a host twin": lambda b: [
        b.out[i].mul_(n) for i, n in enumerate(b.lens_cpu[1:].tolist()) if b.lens_cpu[i] > 1
    ],
    "work on the host": lambda b: [
        b.lens_cpu[b.lens_cpu > 1].nonzero(),
        torch.tensor([1, 2]).unique(),
        b.lens_cpu.cpu(),
    ],
    "a tensor of the host made and read": lambda b: b.out[: int(torch.ones(2).sum())].zero_(),
    "a number of the host": lambda b: [b.out.mul_(b.one_cpu), torch.where(b.mask[:, None], b.x, torch.tensor(0.0))],
    "x[mask] = number": lambda b: [operator.setitem(b.out, b.x > 1, 0.0), operator.setitem(b.out, b.mask, 3)],
    "x[slice] = number": lambda b: [operator.setitem(b.out, 0, 1.0), operator.setitem(b.out, (slice(1), 2), 1)],
    "where with numbers": lambda b: torch.where(b.mask[:, None], b.x, 0.0).masked_fill(b.x > 3, float("-inf")),
    "made on the device": lambda b: [
        torch.zeros(3, device=b.device) + b.x[:, 0],
        torch.arange(3, device=b.x.device) + b.lens,
    ],
    "made after a tensor": lambda b: [
        torch.ones_like(b.x) + b.x.new_full((4,), 2),
        torch.empty_like(b.lens_cpu).tolist(),
    ],
    "a host tensor's like on the device": lambda b: b.lens + torch.zeros_like(b.lens_cpu, device=b.device),
    "moved to where it is": lambda b: [b.lens_cpu.to(b.lens_cpu.device), b.lens.to(b.device), b.lens.to(b.x.device)],
    "the device in words": lambda b: b.x + torch.ones(4, device=b.x.device.type).to(str(b.device)),
    "long indices": lambda b: [b.x[b.index], b.x[b.index, 1:].index_select(0, b.index * 0), b.x[:, None, b.index]],
    "nonzero of a given size": lambda b: torch.nonzero_static(b.mask, size=3),
    "repeats of a given size": lambda b: b.x.repeat_interleave(b.lens, dim=0, output_size=6),
    "numbers as sizes": lambda b: [b.x.shape[0], len(b.x), b.x.numel(), b.x.data_ptr(), list(b.x), *b.x.unbind()],
    "made in a warm-up": lazily_made,
}


@pytest.mark.parametrize("name", LEGAL)
def test_legal_code_raises_no_alarm(name):
    assert violations(LEGAL[name]) == ()


def twice(b):
    for _ in range(2):
        b.lens.tolist()  # the line
    b.lens.tolist()
    b.x[b.mask]


def test_violations_are_in_order_and_each_line_once():
    first = twice.__code__.co_firstlineno
    found = violations(twice)
    where = [f"{HERE.relative_to(Path.cwd())}:{first + line} in twice" for line in (2, 3, 4)]
    assert [(v.kind, v.where) for v in found] == [
        ("host read", where[0]),
        ("host read", where[1]),
        ("data-dependent shape", where[2]),
    ]
    assert str(found[0]) == f"host read: .tolist() at {where[0]}"


LIBRARIES = {
    "numpy": lambda lens: np.testing.assert_equal(lens, np.array([2, 1, 3])),
    "statistics": lambda lens: statistics.median([*lens]),
}


@pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)
def test_a_library_in_between_is_not_to_blame(library):
    def forward(b):
        library(b.lens)

    (found,) = {v.where for v in violations(forward)}
    assert found.startswith(f"{HERE.relative_to(Path.cwd())}:")
    assert found.endswith(" in <lambda>")


def test_who_records_and_who_only_drives_a_library_is_not_to_blame():
    assert {v.where for v in violations_of(inputs().lens.tolist)} == {""}
    bridge = {"__name__": "attncheck.backends.candidates.vllm.impl", "statistics": statistics, "lens": [*inputs().lens]}
    found = violations_of(eval("lambda: statistics.median(lens)", bridge))
    assert all(v.where.startswith("statistics.py:") for v in found)
