"""Memory held for a graph: whose it still is, what becomes of it when it is nobody's, and who writes to it then."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from attncheck.harness.graphs.held_memory import HeldMemory, tensors_within


@pytest.mark.parametrize(
    ("dtype", "spoilt"),
    [
        *((dtype, "nan") for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)),
        *((dtype, "nan") for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)),
        *((dtype, "zero") for dtype in (torch.int32, torch.int64, torch.uint8, torch.bool)),
    ],
)
def test_what_nobody_holds_becomes_nan_or_zero(dtype, spoilt):
    tensor = torch.ones(6).to(dtype)
    held = HeldMemory([tensor[2:4], tensor])
    storage = tensor.untyped_storage()
    held.spoil()
    assert tensor.float().eq(1).all()
    del tensor
    held.spoil()
    found = torch.empty(0, dtype=dtype).set_(storage).float()
    assert found.isnan().all() if spoilt == "nan" else found.eq(0).all()
    assert len(found) == 6
    assert not held.was_written()


def test_a_view_that_somebody_holds_keeps_all_of_it():
    tensor = torch.ones(6)
    held, view = HeldMemory([tensor]), tensor[5:]
    del tensor
    held.spoil()
    assert view.eq(1).all()


def test_what_is_written_after_it_was_spoilt_is_noticed_and_what_was_written_before_is_not():
    tensor = torch.ones(6)
    held, storage = HeldMemory([tensor]), tensor.untyped_storage()
    tensor.fill_(2)
    del tensor
    held.spoil()
    assert not held.was_written()
    storage[3] = 7
    held.spoil()  # once: what is found out is not wiped away
    assert held.was_written()


@pytest.mark.parametrize(
    "make", [lambda: torch.empty(0), lambda: torch.eye(2).to_sparse(), lambda: torch.empty(3, device="meta")]
)
def test_a_tensor_without_memory_of_its_own_is_passed_over(make):
    held = HeldMemory([make()])
    held.spoil()
    assert not held.was_written()


def test_every_tensor_within_is_found():
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
