"""Memory held for a graph: who references it, what unreferenced memory becomes, and who writes to it then."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from attncheck.harness.checks.cudagraph.recorder import HeldMemory, tensors_within


def block_of(*tensors):
    (block,) = HeldMemory().of(tensors)
    return block


@pytest.mark.parametrize(
    ("dtype", "spoilt"),
    [
        *((dtype, "nan") for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)),
        *((dtype, "nan") for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)),
        *((dtype, "zero") for dtype in (torch.int32, torch.int64, torch.uint8, torch.bool)),
    ],
)
def test_unreferenced_memory_becomes_nan_or_zero(dtype, spoilt):
    tensor = torch.ones(6).to(dtype)
    block = block_of(tensor[2:4], tensor)
    storage = tensor.untyped_storage()
    block.spoil()
    assert tensor.float().eq(1).all()
    del tensor
    block.spoil()
    found = torch.empty(0, dtype=dtype).set_(storage).float()
    assert found.isnan().all() if spoilt == "nan" else found.eq(0).all()
    assert len(found) == 6
    assert not block.was_written()


def test_a_view_that_somebody_holds_keeps_all_of_it():
    tensor = torch.ones(6)
    block, view = block_of(tensor), tensor[5:]
    del tensor
    block.spoil()
    assert view.eq(1).all()


def test_what_is_written_after_it_was_spoilt_is_noticed_and_what_was_written_before_is_not():
    tensor = torch.ones(6)
    block, storage = block_of(tensor), tensor.untyped_storage()
    tensor.fill_(2)
    del tensor
    block.spoil()
    assert not block.was_written()
    storage[3] = 7
    block.spoil()  # once: what is found out is not wiped away
    assert block.was_written()


def test_graphs_share_the_blocks_of_memory_that_they_share():
    held, tensor, other = HeldMemory(), torch.ones(6), torch.ones(6)
    (one,), (same, another) = held.of([tensor]), held.of([tensor[:2], other])
    assert one is same
    assert another is not one
    del tensor
    one.spoil()
    assert same.is_spoilt
    storage = other.untyped_storage()
    del other, another
    assert torch._C._storage_Use_Count(storage._cdata) == 1  # a block lives no longer than its graphs


@pytest.mark.parametrize(
    "make", [lambda: torch.empty(0), lambda: torch.eye(2).to_sparse(), lambda: torch.empty(3, device="meta")]
)
def test_a_tensor_without_memory_of_its_own_is_passed_over(make):
    assert HeldMemory().of([make()]) == ()


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
