"""Kernels written out by hand, each with one fault: the fault is named, and the right kernel needs no name."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attncheck.backends.candidates.reference import ReferenceImpl
from attncheck.harness.checks.findings import Broken, Finding, Holds
from attncheck.reports.run_file.causes import EVIDENCE, likely_causes

BATCH = (1, 300), (5, 90), (40, 40), (1, 33)

Slot = Callable[[Tensor, int, int, int], int]
"""(block table, request, position, block size) -> slot."""


def right_slot(table: Tensor, request: int, position: int, size: int) -> int:
    return int(table[request, position // size]) * size + position % size


class Kernel(ReferenceImpl):
    """Attention of a causal layer, row by row and head by head, in float64; each member is one step of it."""

    slot: Slot = staticmethod(right_slot)
    softmax: Callable[[Tensor, Tensor], Tensor] = staticmethod(lambda scores, values: scores.softmax(0) @ values)
    kv_head: Callable[[int], int] = staticmethod(lambda head: head // 4)
    seen: Callable[[int, int], range] = staticmethod(lambda position, keys: range(position + 1))
    factor = 0.125
    key_from, value_from = 0, 1
    behind = 0  # slots that are held behind the last key

    def attend(self, *args: Any) -> None:
        _, query, _, _, caches, metadata, output, _ = args
        flat = [cache.double().flatten(0, 1) for cache in caches]
        size, table = caches[0].shape[1], metadata.common.block_table_tensor.long()
        starts, lengths = metadata.common.query_start_loc.tolist(), metadata.common.seq_lens.tolist()
        for request, keys in enumerate(lengths):
            held = range(min(keys + self.behind, table.shape[1] * size))
            slots = torch.tensor([self.slot(table, request, position, size) for position in held])
            key, value = flat[self.key_from][slots], flat[self.value_from][slots]
            for row in range(starts[request], starts[request + 1]):
                seen = list(self.seen(keys - starts[request + 1] + row, keys))
                for head in range(query.shape[1]):
                    read = self.kv_head(head)
                    scores = key[seen, read] @ query[row, head].double() * self.factor
                    output[row, head] = self.softmax(scores, value[seen, read]).float() if seen else 0.0


@pytest.fixture
def finding(make_case: Any, judge: Any) -> Callable[..., Finding]:
    def found(batch: Any = BATCH, causal: bool = True, **members: Any) -> Finding:
        own = {name: staticmethod(each) if callable(each) else each for name, each in members.items()}
        features = frozenset() if causal else frozenset({"non_causal"})
        return judge(make_case(*batch, dtype="float32", causal=causal), features=features, base=Kernel, **own)

    return found


def fading(tile: int, *, acc: bool, total: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """An online softmax over tiles of keys, which does not rescale what it summed before."""

    def softmax(scores: Tensor, values: Tensor) -> Tensor:
        top, weight, out = -math.inf, torch.tensor(0.0).double(), values.new_zeros(values.shape[1])
        for begin in range(0, len(scores), tile):
            part = scores[begin : begin + tile]
            new = max(top, float(part.max()))
            factor = math.exp(top - new)
            probs = torch.exp(part - new)
            out = out * (1.0 if acc else factor) + probs @ values[begin : begin + tile]
            weight = weight * (1.0 if total else factor) + probs.sum()
            top = new
        return out / weight

    return softmax


def merging(split: int, *, weighs: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Results of splits of keys, merged by ``weighs`` of the log-weight of each; right: the identity of the LSE."""

    def softmax(scores: Tensor, values: Tensor) -> Tensor:
        parts = list(zip(scores.split(split), values.split(split), strict=True))
        weights = torch.stack([weighs(part) for part, _ in parts]).softmax(0)
        return weights @ torch.stack([part.softmax(0) @ own for part, own in parts])

    return softmax


def test_the_right_kernel_needs_no_explanation(finding: Any) -> None:
    assert isinstance(finding(), Holds)
    assert isinstance(finding(softmax=fading(32, acc=False, total=False)), Holds)
    assert isinstance(finding(softmax=merging(64, weighs=lambda part: part.logsumexp(0))), Holds)


FAULTS: dict[str, dict[str, Any]] = {
    "query head 3 reads KV head 1 instead of 0, query head 4 reads KV head 0 instead of 1": {
        "kv_head": lambda h: {3: 1, 4: 0}.get(h, h // 4)
    },
    "query heads 4, 5, 6, 7 read KV head 0 instead of their own": {"kv_head": lambda h: 0},
    "page p is read from slot 8 * p on instead of 16 * p": {
        "slot": lambda table, r, k, size: int(table[r, k // size]) * 8 + k % size
    },
    "the block table is read one column too far right": {
        "slot": lambda table, r, k, size: int(table[r, k // size + 1]) * size + k % size
    },
    "every request reads the block table of request 0": {
        "slot": lambda table, r, k, size: int(table[0, k // size]) * size + k % size
    },
    "keys and values are read one position too late": {
        "slot": lambda table, r, k, size: right_slot(table, r, k + 1, size)
    },
    "the mask is that of the next row: a key too late": {"seen": lambda q, n: range(min(q + 2, n))},
    # A tile of 8 rows and 8 keys whose mask is left out where it begins before the tile's last row.
    "keys after the last visible one are seen, up to 7 of them": {"seen": lambda q, n: range(min(q // 8 * 8 + 8, n))},
    "the last visible keys are missing, up to 3 of them": {"seen": lambda q, n: range((q + 1) // 4 * 4 or q + 1)},
    "the keys begin too late: up to 16 of its first keys are missing": {
        "seen": lambda q, n: range(16 if q > 80 else 0, q + 1)
    },
    "only the first page is read": {"seen": lambda q, n: range(min(q + 1, 16))},
    "only the last page is read": {"seen": lambda q, n: range((n - 1) // 16 * 16, q + 1)},
    "only the first split of 128 keys is read": {"seen": lambda q, n: range(min(q + 1, 128))},
    "the scale is applied twice": {"factor": 1 / 64},
    "the scale is that of head size 128, not of 64": {"factor": 128**-0.5},
    "values are read instead of keys": {"key_from": 1},
    "keys are read instead of values": {"value_from": 0},
    "keys and values are exchanged": {"key_from": 1, "value_from": 0},
    "the accumulator is not rescaled when a tile of 32 keys raises the maximum": {
        "softmax": fading(32, acc=True, total=False)
    },
    "the sum of the weights is not rescaled when a tile of 64 keys raises the maximum": {
        "softmax": fading(64, acc=False, total=True)
    },
    "the partial results of splits of 64 keys are weighed by their largest scores, not by their LSE": {
        "softmax": merging(64, weighs=lambda part: part.max())
    },
    "neither the accumulator nor the sum of the weights is rescaled when a tile of 16 keys raises the maximum": {
        "softmax": fading(16, acc=True, total=True)
    },
}


@pytest.mark.parametrize("meaning", FAULTS)
def test_a_fault_is_named(finding: Any, meaning: str) -> None:
    found = finding(**FAULTS[meaning])
    assert isinstance(found, Broken)
    assert str(found.meaning).startswith(f"{meaning}{EVIDENCE.format('output')} "), found


def test_a_fault_of_another_kind_gets_none_of_these_names(finding: Any) -> None:
    found = finding(softmax=lambda scores, values: (scores * scores.abs()).softmax(0) @ values)
    assert isinstance(found, Broken)
    assert likely_causes(found.meaning) == (), found


def test_a_page_behind_a_full_one_is_named(finding: Any) -> None:
    found = finding(((1, 48), (1, 70)), behind=16, seen=lambda q, n: range(n + 16 if n % 16 == 0 else n))
    assert isinstance(found, Broken)
    assert likely_causes(found.meaning)[0] == "where the last page is full, the next one is seen by every row"


def test_the_length_of_another_request_is_named(finding: Any) -> None:
    found = finding(((3, 33), (5, 90), (2, 60)), causal=False, seen=lambda q, n: range(min(n, 33)))
    assert isinstance(found, Broken)
    assert likely_causes(found.meaning)[0] == "keys are missing behind the length of request 0"
