"""Kernels written out by hand, each with one fault: it is named, and no other; the right kernel needs no name."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from attncheck.backends.candidates.reference import ReferenceImpl
from attncheck.harness.checks.findings import Holds
from attncheck.reports.run_file.causes import EVIDENCE, likely_causes

BATCH = (1, 300), (5, 90), (40, 40), (1, 33)

Slot = Callable[[Tensor, int, int, int], int]
"""(block table, request, position, block size) -> slot."""


def right_slot(table, request, position, size):
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

    def attend(self, *args):
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
def finding(make_case, finding_of):
    def found(batch=BATCH, causal=True, **members):
        own = {name: staticmethod(each) if callable(each) else each for name, each in members.items()}
        features = frozenset() if causal else frozenset({"non_causal"})
        return finding_of(make_case(*batch, dtype="float32", causal=causal), features=features, base=Kernel, **own)

    return found


def fading(tile, *, acc, total):
    """An online softmax over tiles of keys, which does not rescale what it summed before."""

    def softmax(scores, values):
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


def merging(split, *, weighs):
    """Results of splits of keys, merged by ``weighs`` of the log-weight of each; right: the identity of the LSE."""

    def softmax(scores, values):
        parts = list(zip(scores.split(split), values.split(split), strict=True))
        weights = torch.stack([weighs(part) for part, _ in parts]).softmax(0)
        return weights @ torch.stack([part.softmax(0) @ own for part, own in parts])

    return softmax


def test_the_right_kernel_needs_no_explanation(finding):
    assert isinstance(finding(), Holds)
    assert isinstance(finding(softmax=fading(32, acc=False, total=False)), Holds)
    assert isinstance(finding(softmax=merging(64, weighs=lambda part: part.logsumexp(0))), Holds)


FAULTS = {
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
def test_a_fault_is_named(finding, meaning):
    found = finding(**FAULTS[meaning])
    assert str(found.meaning).startswith(f"{meaning}{EVIDENCE.format('output')} "), found


def test_a_fault_of_another_kind_gets_none_of_these_names(finding):
    found = finding(softmax=lambda scores, values: (scores * scores.abs()).softmax(0) @ values)
    assert likely_causes(found.meaning) == (), found


def test_a_page_behind_a_full_one_is_named(finding):
    found = finding(((1, 48), (1, 70)), behind=16, seen=lambda q, n: range(n + 16 if n % 16 == 0 else n))
    assert likely_causes(found.meaning)[0] == "where the last page is full, the next one is seen by every row"


def test_the_length_of_another_request_is_named(finding):
    found = finding(((3, 33), (5, 90), (2, 60)), causal=False, seen=lambda q, n: range(min(n, 33)))
    assert likely_causes(found.meaning)[0] == "keys are missing behind the length of request 0"


# A named cause excludes others: faults that another cause fits in part, or by chance.


SINKS = {"sinks": True}


@dataclass(frozen=True)
class Row:
    """One row: scores ``[H, K]`` of the keys it sees, their values ``[H, K, Dv]``, its place, and the layer's numbers."""

    scores: Tensor
    values: Tensor
    number: int
    position: int
    num_keys: int
    query_len: int
    sinks: Tensor
    slopes: Tensor


def right(row, scores=None, extra=None):
    """``sum P V`` with the sinks, or ``extra [H, n]``, in the sum of the weights."""
    scores = row.scores if scores is None else scores
    both = torch.cat([scores, row.sinks[:, None] if extra is None else extra], dim=1)
    weights = both.softmax(dim=1)[:, : scores.shape[1]]
    return torch.einsum("hk,hkv->hv", weights, row.values)


def shifted(distance):
    return lambda row: right(row, row.scores + row.slopes[:, None] * distance(row))


def times(factor):
    return lambda row: right(row) * factor(row)


def padded(row):
    """Keys to a multiple of 64 have a score of 0, which the soft cap makes of -inf times 0 in some kernels."""
    return right(row, extra=torch.zeros(8, -row.num_keys % 64).double())


def merged(split, weigh, *, by=lambda w: w):
    """Results of splits, each of the weight that ``weigh`` gives to its scores ``[H, k]``."""

    def attend(row):
        parts = list(zip(row.scores.split(split, 1), row.values.split(split, 1), strict=True))
        outs = torch.stack([torch.einsum("hk,hkv->hv", part.softmax(1), own) for part, own in parts])
        weights = by(torch.stack([weigh(part) for part, _ in parts]))
        return (weights / weights.sum(0))[..., None].mul(outs).sum(0)

    return attend


def by_sums(scores):
    return (scores - scores.amax(1, keepdim=True)).exp().sum(1)


def of_kv_heads(heads):
    """Return attention with the right keys, and with values of other KV heads."""
    return lambda row: torch.einsum("hk,hkv->hv", row.scores.softmax(1), row.values[[4 * head for head in heads]])


def causes(ask, attend, batch, **layer):
    asked = ask(*batch, **({"dtype": "float32"} | layer))
    problem, truth = asked
    number = torch.arange(8) // 4
    sinks = torch.tensor(truth.params.sinks or (-math.inf,) * 8, dtype=torch.float64)
    slopes = torch.tensor(truth.params.alibi_slopes or (0.0,) * 8, dtype=torch.float64)
    out, cap = torch.zeros_like(truth.out), truth.params.soft_cap
    for request in problem.requests:
        for nth in range(request.rows):
            index, position = request.first_row + nth, request.num_keys - request.rows + nth
            held = slice(request.base, request.base + position + 1)
            keys, values = (part[held].double()[:, number].transpose(0, 1) for part in (problem.keys, problem.values))
            scores = torch.einsum("hd,hkd->hk", problem.query[index].double(), keys) * truth.params.softmax_scale
            scores = scores if cap is None else cap * torch.tanh(scores / cap)
            scores = scores + slopes[:, None] * (torch.arange(position + 1) - position)
            row = Row(scores, values, index, position, request.num_keys, request.rows, sinks, slopes)
            out[index] = attend(row)
    out = out.to(problem.dtype).double()
    if attend is right:
        assert bool((out - truth.out).norm(dim=-1).le(truth.budget.norm).all())
        return ()
    return likely_causes(asked.explained(out))


SHORT = (1, 150), (5, 90), (12, 12)
NAMED = {
    "the ALiBi bias is measured from the first new position of the request, not from the query": (
        shifted(lambda row: row.position - (row.num_keys - row.query_len)),
        {"sinks": True, "alibi": True},
    ),
    "the ALiBi bias is measured from the last key of the request, not from the query": (
        shifted(lambda row: row.position - (row.num_keys - 1)),
        {"sinks": True, "alibi": True},
    ),
    "the places behind the last key, up to a multiple of 64, count with a score of 0": (
        padded,
        {"logits_soft_cap": 3.0},
    ),
    "the places behind the last key, up to a multiple of 64, count with a score of -cap": (
        lambda row: right(row, extra=torch.full((8, -row.num_keys % 64), -3.0).double()),
        {"logits_soft_cap": 3.0},
    ),
    "query heads 0, 1, 2, 3 read values of KV head 1 instead of their own": (of_kv_heads([1] * 8), {}),
    "query head h reads values of KV head h % num_kv_heads instead of h // group size": (of_kv_heads([0, 1] * 4), {}),
    "the partial results of splits of 32 keys are averaged, whatever their LSE": (
        merged(32, lambda scores: torch.ones(8).double()),
        {},
    ),
    "the partial results of splits of 64 keys are weighed by sums that are not rescaled to a common maximum": (
        merged(64, by_sums),
        {},
    ),
    "the partial results of splits of 64 keys are merged by an LSE to base 2": (
        merged(64, lambda scores: (scores.logsumexp(1) / math.log(2)).exp()),
        {},
    ),
    "the partial results of splits of 64 keys are merged by the LSE of the first head of each group": (
        merged(64, lambda scores: scores.logsumexp(1).exp(), by=lambda w: w[:, [0] * 4 + [4] * 4]),
        {},
    ),
}


@pytest.mark.parametrize("cause", NAMED)
def test_a_fault_is_named_and_no_other(ask, cause):
    attend, layer = NAMED[cause]
    assert causes(ask, attend, SHORT, **layer)[:1] == (cause,)


def spread(row):
    """A factor for each head of each row, without a pattern."""
    return 0.8 + 0.15 * torch.sin(torch.arange(8).double() * 1.7 + row.number * 2.9)[:, None]


def other_lse(row):
    """The sinks are merged with an LSE that another number multiplies in each row."""
    lse = row.scores.logsumexp(1)
    return (
        right(row, extra=torch.full((8, 1), -math.inf).double())
        * torch.sigmoid(lse * (1 - 0.03 * (row.number % 5 + 1)) - row.sinks)[:, None]
    )


def reweighed(row):
    """Every split of 32 keys has a weight of its own."""
    parts = row.scores.shape[1] // 32 + 1
    factor = torch.sin(torch.arange(parts).double() * 3.1 + row.number).repeat_interleave(32)[: row.scores.shape[1]]
    return right(row, row.scores + factor)


UNKNOWN = {
    "a factor for each row and head": (times(spread), SHORT, SINKS),
    "a factor for each head of a single row": (times(spread), [(1, 70)], SINKS),
    "a sink beside another LSE": (other_lse, SHORT, SINKS),
    "other weights for each split": (reweighed, SHORT, {}),
    "small weights are dropped": (
        lambda row: torch.einsum("hk,hkv->hv", row.scores.softmax(1).clamp(min=0.02) - 0.02, row.values),
        SHORT,
        {},
    ),
    "a run of keys in the middle is lost": (
        lambda row: (
            right(row, row.scores.index_fill(1, torch.arange(11, 18).clamp(max=row.position), -math.inf))
            if row.position > 20
            else right(row)
        ),
        SHORT,
        {},
    ),
    "values in another order": (
        lambda row: torch.einsum(
            "hk,hkv->hv", row.scores.softmax(1), row.values[:, torch.arange(row.position + 1) * 7 % (row.position + 1)]
        ),
        SHORT,
        {},
    ),
    "one channel of one row is another number": (
        lambda row: right(row).index_fill(1, torch.tensor([9]), 0.3) if row.number == 3 else right(row),
        SHORT,
        {},
    ),
    "every fifth key of a few is lost": (
        lambda row: (
            right(row, row.scores.index_fill(1, torch.tensor([3]), -math.inf)) if row.position > 3 else right(row)
        ),
        [(1, 5), (3, 4)],
        {},
    ),
}


@pytest.mark.parametrize("fault", UNKNOWN)
def test_a_fault_that_has_no_name_gets_none(ask, fault):
    attend, batch, layer = UNKNOWN[fault]
    assert causes(ask, attend, batch, **layer) == ()


@pytest.mark.parametrize("fault", ["a factor for each row and head", "other weights for each split"])
def test_rounding_to_the_dtype_adds_no_name(ask, fault):
    attend, batch, layer = UNKNOWN[fault]
    assert causes(ask, attend, batch, dtype="bfloat16", **layer) == ()


@pytest.mark.parametrize("layer", [{}, {"sinks": True, "alibi": True}, {"logits_soft_cap": 3.0}])
def test_the_right_kernel_is_right(ask, layer):
    assert causes(ask, right, SHORT, **layer) == ()


def test_a_factor_is_no_rounding(ask):
    assert causes(ask, times(lambda row: 0.99), SHORT, dtype="bfloat16") == ()
