"""Traces state which tensors of metadata moved and which numbers changed, and keep nothing alive."""

import gc
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from attncheck.harness.checks.cudagraph.capture import parts_of
from attncheck.harness.checks.cudagraph.capture import trace as trace_parts


def trace(metadata):
    return trace_parts(parts_of(metadata))


@dataclass
class Metadata:
    lens: torch.Tensor
    longest: int
    parts: dict = field(default_factory=dict)


def test_a_tensor_in_new_memory_has_moved_and_one_refilled_in_place_has_not():
    buffer = torch.arange(4)
    first = trace(Metadata(buffer, 3, {"decode": [buffer[:2], buffer.clone()]}))
    buffer.add_(1)
    later = trace(Metadata(buffer, 3, {"decode": [buffer[:2], buffer.clone()]}))
    assert first.moved(later) == ["metadata.parts['decode'][1]"]
    assert first.changed(later) == []


def test_another_shape_at_the_same_address_is_distinguished_from_another_address():
    buffer = torch.arange(4)
    first, later = trace(Metadata(buffer, 3)), trace(Metadata(buffer[:3], 3))
    assert first.moved(later) == []
    assert first.reshaped(later) == ["metadata.lens"]
    assert first.reshaped(trace(Metadata(buffer.clone(), 3))) == []


def test_what_lies_between_two_addresses_has_a_name():
    buffer, other = torch.arange(4), torch.arange(4)
    memory = buffer.untyped_storage()
    start, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes()
    assert trace(Metadata(buffer[2:], 3)).path_of(start, end) == "metadata.lens"
    assert trace(Metadata(other, 3)).path_of(start, end) is None


def test_numbers_of_the_backend_s_own_come_first_and_of_a_sequence_only_one():
    def metadata(longest, plan, bound):
        return SimpleNamespace(common=SimpleNamespace(max_seq_len=bound), plan=plan, longest=longest)

    changed = trace(metadata(3, [1, 2, 3], 80)).changed(trace(metadata(8, [1, 5, 6], 9)))
    assert [text.partition(" was ")[0] for text in changed] == [
        "metadata.plan[1]",
        "metadata.longest",
        "metadata.common.max_seq_len",
    ]


def test_what_is_missing_later_has_moved_or_is_gone():
    first, later = trace(SimpleNamespace(plan=torch.zeros(2), size=7, kept=3)), trace(SimpleNamespace(kept=8))
    assert first.moved(later) == ["metadata.plan"]
    assert first.changed(later) == [
        "metadata.size was 7 at capture and is gone now",
        "metadata.kept was 3 at capture and is 8 now",
    ]


def test_a_trace_keeps_no_tensor_alive():
    tensor = torch.zeros(3)
    gone = weakref.ref(tensor)
    kept = trace(SimpleNamespace(plan=tensor))
    del tensor
    gc.collect()
    assert gone() is None
    assert list(kept.places) == ["metadata.plan"]


def test_slots_are_followed_and_metadata_that_refer_to_themselves_end():
    slotted = make_dataclass("Slotted", [("table", torch.Tensor), ("itself", object)], slots=True)
    table = torch.zeros(2)
    metadata = slotted(table, None)
    metadata.itself = metadata
    assert parts_of(metadata) == {"metadata.table": table}


class Closed:
    """Cannot be looked into."""

    def __getattribute__(self, name):
        raise ValueError(name)


class Endless(Mapping):
    """Numbers without end."""

    def __getitem__(self, key):
        return key

    def __len__(self):
        return 1

    def __iter__(self):
        return count()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_cannot_be_looked_into_is_left_out_and_the_rest_is_traced():
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    metadata = SimpleNamespace(closed=Closed(), nested=nested, number=7)
    assert trace(metadata).numbers == {"metadata.number": 7}
    assert trace(metadata).places == {}


def test_a_trace_has_an_end():
    found = trace(SimpleNamespace(endless=Endless(), library=torch, number=7))
    assert found.numbers["metadata.number"] == 7
    assert len(found.numbers) < 2_000
    assert found.places == {}
    hundred = range(100)
    assert 1_000 < len(trace([[[number] * 100 for number in hundred] for _ in hundred]).numbers) <= 10_000
    assert trace([[[[] for _ in hundred] for _ in hundred] for _ in hundred]).numbers == {}
