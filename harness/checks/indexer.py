"""Checks of the function ``sparse_attn_indexer`` that a backend offers."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from attncheck.backends.contract import AttentionBackend
from attncheck.backends.dtypes import DTYPES
from attncheck.cases.model import Case
from attncheck.harness.checks.findings import Broken, Finding, FindingError, Holds, NotExamined
from attncheck.harness.checks.interface import Function, call
from attncheck.harness.checks.numerics import rows_in_words
from attncheck.harness.driver.foreign_code import as_plain
from attncheck.harness.problem.pages import PageLayout, RandomStream, Request, key_places, lay_out
from attncheck.harness.problem.problem import place_requests
from attncheck.reference.attention.indexer import fp8_index_cache
from attncheck.reference.step_spec import IndexerOptions
from attncheck.reports.run_file.causes import ALTERNATIVE

# The rows and keys of an indexer, and the scores of every row and key in float64.
#
# Some rows have all weights negative, a query of zeros (all scores are equal), or queries along one key: the row's own,
# the one behind it, or the last one of a page. Some scores are all close to one large number, so that coarse sums
# exchange keys. Some are the small difference of two heads, which weights of fewer bits lose. Pages, tables and slots
# are those of a batch of attention.
#
# Keys of an FP8 cache have scales that are powers of two, and lie at most a quarter of a step beside the number that
# the cache holds. So every writer that rounds to the nearest number stores the same codes.

_KINDS = 9
"""Kinds of rows, which take turns: the first is random."""

_LARGE = 64.0
"""Factor of the queries of large scores, exact in each dtype."""

_COMMON = 256.0
"""Last channel of the queries of close scores, exact in each dtype. Their other channels are divided by 4."""

_LEVEL = 3.5
"""The last channel of every key, and its largest: 448, the largest number of float8_e4m3fn, times a power of two."""

_FP8_NAN = 0x7F
"""The bits of NaN in float8_e4m3fn, which has no infinity."""

_SCALE_ERROR = 2.0**-21
"""Allowed relative error of the scale of an FP8 key: divisions on a GPU may be approximate."""

_CUT_OFF = 4.0
"""Roundings to 14 bits of the sum of all absolute products, for 32 of them: twice what an emulation loses."""

_NEARLY_1 = 1 + 2.0**-11
"""A weight that formats with 10 bits behind the point round to 1."""


@dataclass(frozen=True)
class IndexProblem:
    """The arguments on the CPU: ``T`` real rows, then those of padding; ``N`` keys of all requests."""

    case: Case
    requests: tuple[Request, ...]
    query: Tensor
    """``[T + padding, H, D]``, in the layer's dtype or that of an FP8 cache."""
    weights: Tensor
    """float32 ``[T + padding, H]``."""
    key: Tensor
    """``[T + padding, D]``, the new keys before they are stored, in the layer's dtype, as are the next two."""
    keys: Tensor
    """``[N, D]``, as the cache holds them."""
    stale: Tensor
    """``[blocks, block size, D]``: the cache where the batch has no keys yet."""
    layout: PageLayout

    @property
    def options(self) -> IndexerOptions:
        """The options of the path."""
        return indexer_options(self.case)

    @cached_property
    def positions(self) -> Tensor:
        """int64 ``[T]``: the position of each real row."""
        return torch.cat([r.first_position + torch.arange(r.rows) for r in self.requests])

    @cached_property
    def new_keys(self) -> Tensor:
        """int64 ``[T]``: the index of the key of each real row."""
        return torch.cat([r.base + r.first_position + torch.arange(r.rows) for r in self.requests])

    def row_name(self, row: int) -> str:
        """Return a readable name for a row."""
        owner = next(n for n, r in enumerate(self.requests) if row < r.first_row + r.rows)
        return f"request {owner}, position {int(self.positions[row])}"

    @property
    def has_fp8_cache(self) -> bool:
        """Whether the cache holds FP8 keys with scales."""
        return self.options.index_cache_dtype != "auto"

    def cache(self, *, with_new: bool) -> Tensor:
        """Return the cache before the call, or after it."""
        cache = self.stale.clone()
        is_old = torch.ones(len(self.keys), dtype=torch.bool)
        is_old[self.new_keys] = with_new
        cache.flatten(0, 1)[self.layout.key_slots[is_old]] = self.keys[is_old]
        if not self.has_fp8_cache:
            return cache
        scales = fp8_scales(cache)
        codes = (cache.double() / scales).to(torch.float8_e4m3fn)
        parts = [part.flatten(1).view(torch.uint8) for part in (codes, scales.float())]
        return torch.cat(parts, dim=1).view(*cache.shape[:2], -1)

    def arguments(self, device: torch.device, poison: float | None = None) -> dict[str, Tensor | None]:
        """Return the positional arguments in order, as new tensors, with ``poison`` in slots that no request owns."""
        padding = self.case.batch.padding
        cache = self.cache(with_new=False)
        if poison is not None:
            is_foreign = torch.ones(cache.shape[:2], dtype=torch.bool)
            is_foreign.view(-1)[self.layout.key_slots] = False
            if self.has_fp8_cache:
                keys, scales = fp8_index_cache(cache)
                scales[is_foreign] = poison
                if math.isnan(poison):
                    keys.view(torch.uint8)[is_foreign] = _FP8_NAN
            else:
                cache[is_foreign] = poison
        lens = torch.tensor([*(r.num_keys for r in self.requests), *[0] * padding.requests])
        starts = torch.tensor([0, *(r.rows for r in self.requests), *[0] * padding.requests]).cumsum(0)
        table = self.layout.block_table
        arguments = {
            "query": self.query,
            "weights": self.weights,
            "key": self.key,
            "index_cache": cache,
            "block_table": torch.cat([table, table.new_zeros(padding.requests, table.shape[1])]),
            "seq_lens": lens.int(),
            "query_start_loc": starts.int(),
            "slot_mapping": torch.cat([self.layout.key_slots[self.new_keys], torch.full((padding.tokens,), -1)]),
        }
        return {name: tensor.to(device, copy=True) for name, tensor in arguments.items()}


def indexer_options(case: Case) -> IndexerOptions:
    """Return the options of the path, or the defaults."""
    options = case.batch.path.options
    return options if isinstance(options, IndexerOptions) else IndexerOptions()


def build_indexer(case: Case, seed: int) -> IndexProblem:
    """Return the tensors of ``case`` under ``seed``, with the same bits on every machine."""
    stream = RandomStream(seed, case.hash, "indexer")
    options, dtype, padding = indexer_options(case), DTYPES[case.layer.dtype], case.batch.padding
    heads, size = options.index_n_heads, options.index_head_dim
    requests = tuple(place_requests(case))
    lengths = [r.num_keys for r in requests]
    layout = lay_out(case, lengths, key_places(lengths), stream)()
    keys = stream.uniform(sum(lengths), size).to(dtype)
    keys[:, -1] = _LEVEL
    has_fp8_cache = options.index_cache_dtype != "auto"
    written = keys
    if has_fp8_cache:
        written = (keys * 2.0 ** -stream.integers(len(keys), 3)[:, None]).to(dtype)
        keys = stored_in_fp8(written)
        written = ((written.double() + keys) / 2).to(dtype)
    rows = sum(r.rows for r in requests)
    problem = IndexProblem(
        case=case,
        requests=requests,
        query=stream.uniform(rows, heads, size).to(dtype),
        weights=stream.uniform(rows, heads, dtype=torch.float32),
        key=written,
        keys=keys,
        stale=stream.uniform(layout.num_blocks, case.cache.block_size, size).to(dtype),
        layout=layout,
    )
    _plant(problem)
    query, weights, key = (
        torch.cat([own, own.new_full((padding.tokens, *own.shape[1:]), torch.nan)])
        for own in (problem.query, problem.weights, written[problem.new_keys])
    )
    query = query.to(torch.float8_e4m3fn) if has_fp8_cache else query
    return replace(problem, query=query, weights=weights, key=key)


def fp8_scales(keys: Tensor) -> Tensor:
    """Return the scale of each key ``[..., D]`` in an FP8 cache: float64 ``[..., 1]``."""
    return keys.double().abs().amax(dim=-1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max


def stored_in_fp8(keys: Tensor) -> Tensor:
    """Return ``keys`` ``[N, D]`` as an FP8 cache holds them."""
    scales = fp8_scales(keys)
    return ((keys.double() / scales).to(torch.float8_e4m3fn).double() * scales).to(keys.dtype)


def _plant(problem: IndexProblem) -> None:
    """Give the rows their kinds, in place."""
    kind = torch.arange(len(problem.query)) % _KINDS
    query, weights, keys, own = problem.query, problem.weights, problem.keys, problem.new_keys
    weights[kind == 1] = -weights[kind == 1].abs()
    query[kind == 2] = 0
    page = problem.case.cache.block_size
    at_edge = own - (problem.positions + 1) % page
    for number, target in ((3, own), (4, own + 1), (5, torch.where(at_edge < own - problem.positions, own, at_edge))):
        rows = kind == number
        query[rows] = keys[target[rows] % len(keys), None].expand_as(query[rows])
        weights[rows] = weights[rows].abs()
    query[kind == 6] *= _LARGE
    query[kind == 7] /= 4
    query[..., -1][kind == 7] = _COMMON
    weights[kind == 7] = weights[kind == 7].abs()
    if query.shape[1] > 1:
        query[kind == 8] = query[kind == 8, :1].expand_as(query[kind == 8])
        weights[kind == 8] = torch.tensor([_NEARLY_1, -1.0, *[0.0] * (query.shape[1] - 2)])


@dataclass(frozen=True)
class Scores:
    """The scores of each real row, and how far those of a good kernel may be off: float64 ``[T, longest]``.

    ``num_visible``: int64 ``[T]``, how many of the first keys a row may name.
    """

    value: Tensor
    slack: Tensor
    num_visible: Tensor


def scores_of(
    problem: IndexProblem,
    *,
    query: Tensor | None = None,
    weights: Tensor | None = None,
    keys: Tensor | None = None,
    relu: Callable[[Tensor], Tensor] = torch.relu,
) -> Scores:
    """Return the scores in float64, from contiguous keys; the arguments replace those of the problem.

    A good kernel multiplies exactly or in float32, and sums in float32, in any order: over the channels, then over the
    heads. So a score is off by that many roundings of the sum of all absolute products, but by 8 at least, as in
    :mod:`~attncheck.harness.truth.unpaged`. Tensor cores add 32 FP8 products to a sum at a time. Of each term, they cut
    off what lies below the 14 highest bits of the largest one (DeepSeek-V3, 2024, section 3.5.2).
    """
    rows, longest = len(problem.positions), max(r.num_keys for r in problem.requests)
    query = (problem.query if query is None else query)[:rows].double()
    weights = (problem.weights if weights is None else weights)[:rows].double()
    keys = problem.keys if keys is None else keys
    heads, size = query.shape[1:]
    rounding = (max(8.0, size / 4) + max(8.0, heads / 4)) * 2.0**-24
    if problem.has_fp8_cache:
        rounding += (size / 32 + 1) * _CUT_OFF * 2.0**-13
    value, slack = (torch.zeros(rows, longest, dtype=torch.float64) for _ in range(2))
    for r in problem.requests:
        own, seen = slice(r.first_row, r.first_row + r.rows), keys[r.base : r.base + r.num_keys].double()
        products = relu(torch.einsum("qhd,nd->qhn", query[own], seen))
        value[own, : r.num_keys] = torch.einsum("qh,qhn->qn", weights[own], products)
        sizes = torch.einsum("qhd,nd->qhn", query[own].abs(), seen.abs())
        slack[own, : r.num_keys] = rounding * torch.einsum("qh,qhn->qn", weights[own].abs(), sizes)
    return Scores(value, slack, problem.positions + 1)


BEHIND, TWICE, FEW, BELOW, GAP, OTHER = (
    "name a key behind their own",
    "name a key twice",
    "name fewer keys than they could",
    "leave out a key that scores higher than one that they name",
    "name a key behind an entry of -1",
    "have a negative entry other than -1",
)


def wrong_rows(indices: Tensor, scores: Scores) -> tuple[dict[str, Tensor], Tensor]:
    """Return which rows are wrong, bool ``[T]`` by kind of fault, and how far the worst key is too low, ``[T]``.

    ``indices``: int64 ``[T, K]``. The last is the distance of the best key left out above the worst named one, in the
    sum of their slacks; above 1, rounding cannot have exchanged them. So each right choice among ties passes.
    """
    longest, num_visible = scores.value.shape[1], scores.num_visible[:, None]
    is_named = indices >= 0
    index = torch.where(is_named & (indices < longest), indices, longest)
    named = torch.zeros(len(indices), longest + 1, dtype=torch.bool).scatter_(1, index, True)[:, :longest]
    is_visible = torch.arange(longest) < num_visible
    seen = named & is_visible
    count, wanted = named.sum(dim=1), num_visible[:, 0].clamp(max=indices.shape[1])
    best, best_at = (scores.value - scores.slack).masked_fill(~is_visible | named, -torch.inf).max(dim=1)
    worst, worst_at = (scores.value + scores.slack).masked_fill(~seen, torch.inf).min(dim=1)
    slack = scores.slack.gather(1, best_at[:, None]) + scores.slack.gather(1, worst_at[:, None])
    off = (scores.value.gather(1, best_at[:, None]) - scores.value.gather(1, worst_at[:, None])).clamp(min=0)
    share = torch.where(off == 0, 0.0, off / slack)[:, 0]
    has_both = best.isfinite() & worst.isfinite()
    kinds = {
        BEHIND: (indices >= num_visible).any(dim=1),
        TWICE: is_named.sum(dim=1) > count + (is_named & (indices >= longest)).sum(dim=1),
        FEW: seen.sum(dim=1) < wanted,
        BELOW: has_both & (best > worst),
        GAP: (is_named[:, 1:] & ~is_named[:, :-1]).any(dim=1),
        OTHER: (indices < -1).any(dim=1),
    }
    return kinds, share.masked_fill(~has_both, 0.0)


# The path `indexer`: the function `sparse_attn_indexer` of a backend.
#
# `numerics`: each row names the keys of the largest scores, as a set with ties, then has entries of -1. `cache_write`:
# exactly the slots of the new keys change. `containment`: slots that no request owns do not matter. Cannot see: the
# order in which a row names its keys, which has no meaning.

INDEXER = "sparse_attn_indexer"


@dataclass(frozen=True)
class _Indexed:
    """The result of a call: int64 indices ``[T + padding, K]``, the cache, and changed arguments."""

    indices: Tensor
    cache: Tensor
    changed: tuple[str, ...]


class Indexing:
    """One backend's ``sparse_attn_indexer`` on the rows of one case."""

    def __init__(
        self, backend: type[AttentionBackend], function: Function, case: Case, seed: int, device: torch.device
    ) -> None:
        self._function, self._device = function, device
        self._problem = build_indexer(case, seed)
        self._scores = scores_of(self._problem)

    def run(self) -> None:
        """Run the first call, whose result the checks share. Raise StageError if it raises."""
        _ = self._first

    def tensors(self) -> dict[str, Tensor | None]:
        """Return the arguments and the scores, for a dump."""
        return {**self._problem.arguments(self._device), "scores": self._scores.value, "slack": self._scores.slack}

    def numerics(self) -> Finding:
        """Judge the keys that each row names, as a set."""
        return self._judged(self._first)

    def lse(self) -> Finding:
        """Return NotExamined, because an indexer has no LSE."""
        return NotExamined(("an indexer has no log-sum-exp",), "attncheck")

    def cache_write(self) -> Finding:
        """Judge the whole cache after the call."""
        right, got = self._problem.cache(with_new=True), self._first.cache
        if self._problem.has_fp8_cache:
            (right, right_scales), (got, scales) = fp8_index_cache(right), fp8_index_cache(got)
            is_off = ~torch.isclose(scales, right_scales, rtol=_SCALE_ERROR, atol=0.0).flatten()
        else:
            is_off = torch.zeros(right.shape[:2], dtype=torch.bool).flatten()
        wrong = (right.view(torch.uint8) != got.view(torch.uint8)).any(dim=-1).flatten() | is_off
        figures = {"slots_written": len(self._problem.new_keys), "slots_wrong": int(wrong.sum())}
        if not bool(wrong.any()):
            return Holds(figures)
        slot = int(wrong.nonzero()[0])
        is_new = bool((self._problem.layout.key_slots[self._problem.new_keys] == slot).any())
        meaning = "a new key is not stored, or not as it is" if is_new else "a slot that no new key has was written"
        return Broken(f"{int(wrong.sum())} slots of the cache are wrong, the first is {slot}", figures, meaning)

    def containment(self) -> Finding:
        """Judge calls with poison in slots that no request owns."""
        poisons = {"NaN": torch.nan, "Inf": torch.inf, "a huge value": torch.finfo(self._problem.keys.dtype).max / 4}
        if isinstance(self._judged(self._first), Broken):
            return NotExamined(("the keys are wrong without poison, too",), "attncheck")
        for name, value in poisons.items():
            found = self._judged(self._index(value), explains=False)
            if isinstance(found, Broken):
                return Broken(f"{name} in slots that no request owns: {found.summary}")
        return Holds({"rows": len(self._problem.positions), "poisonings": len(poisons)})

    @cached_property
    def _first(self) -> _Indexed:
        return self._index()

    def _index(self, poison: float | None = None) -> _Indexed:
        """Run one call. Raise FindingError if it does not return integers of the right shape."""
        arguments = self._problem.arguments(self._device, poison)
        topk = self._problem.options.index_topk
        returned, changed = call(INDEXER, self._function, arguments, {"index_topk": topk}, "index_cache")
        indices, shape = as_plain(returned), (len(self._problem.query), topk)
        if indices is None or tuple(indices.shape) != shape or indices.dtype not in (torch.int32, torch.int64):
            got = type(returned).__name__ if indices is None else f"{indices.dtype} {list(indices.shape)}"
            raise FindingError(Broken(f"{INDEXER} returned {got}, not int32 {list(shape)}"))
        cache = arguments["index_cache"]
        assert cache is not None
        return _Indexed(indices.long().cpu(), cache.cpu(), changed)

    def _judged(self, seen: _Indexed, *, explains: bool = True) -> Finding:
        rows = len(self._problem.positions)
        kinds, share = wrong_rows(seen.indices[:rows], self._scores)
        figures = {"rows": rows, "budget_share": float(share.max())}
        for kind, wrong in kinds.items():
            if bool(wrong.any()):
                summary = f"{rows_in_words(self._problem, wrong)} {kind}"
                meaning = self._meaning(seen) if explains else None
                return Broken(summary, figures, meaning, seen.changed, finding="" if meaning else f"rows {kind}")
        if bool((seen.indices[rows:] != -1).any()):
            return Broken("rows of padding have entries other than -1", figures)
        if seen.changed:
            return Broken(f"arguments were changed: {', '.join(seen.changed)}", figures)
        return Holds(figures)

    def _meaning(self, seen: _Indexed) -> str | None:
        """Return the faults with which the keys of all rows are right, or None."""
        rows = len(self._problem.positions)
        fitting = []
        for meaning, scores, indices in self._mistakes(seen.indices[:rows]):
            kinds, _ = wrong_rows(indices, scores)
            if not any(bool(wrong.any()) for wrong in kinds.values()):
                fitting.append(meaning)
        return ALTERNATIVE.join(fitting) or None

    def _mistakes(self, got: Tensor) -> Iterator[tuple[str, Scores, Tensor]]:
        """Yield faults: the scores that they give, and the indices to compare with these."""
        problem, right = self._problem, self._scores
        rows, exact = len(problem.positions), torch.zeros_like(right.slack)
        number = torch.arange(right.value.shape[1]).double().expand_as(right.value)
        last = torch.tensor([r.num_keys for r in problem.requests for _ in range(r.rows)])
        ones = torch.ones_like(problem.weights)
        first_head = problem.weights * (torch.arange(ones.shape[1]) == 0)
        yield "the ReLU of each head is missing", scores_of(problem, relu=lambda products: products), got
        yield "the weights are missing", scores_of(problem, weights=ones), got
        yield "the weights count by their magnitude", scores_of(problem, weights=problem.weights.abs()), got
        yield "only the first head counts", scores_of(problem, weights=first_head), got
        if problem.has_fp8_cache:
            scales = fp8_scales(problem.keys)
            position = torch.cat([torch.arange(r.num_keys) for r in problem.requests])
            of_page = scales[torch.arange(len(scales)) - position % problem.case.cache.block_size]
            for meaning, factor in (
                ("the scales of the keys are missing", 1 / scales),
                ("the scale of the first key of a page is that of all of them", of_page / scales),
            ):
                yield meaning, scores_of(problem, keys=problem.keys.double() * factor), got
        yield "the keys of the lowest scores are named", replace(right, value=-right.value), got
        for where, by in (("before", 1), ("behind", -1)):
            moved = [each[:rows].roll(by, dims=0) for each in (problem.query, problem.weights)]
            yield f"the query is that of the row {where}", scores_of(problem, query=moved[0]), got
            yield f"the weights are those of the row {where}", scores_of(problem, weights=moved[1]), got
        yield "the causal mask is missing: rows name keys of later rows", replace(right, num_visible=last), got
        yield "a row does not name its own key", replace(right, num_visible=right.num_visible - 1), got
        yield "the first keys are named, whatever they score", Scores(-number, exact, right.num_visible), got
        yield "the last keys are named, whatever they score", Scores(number, exact, right.num_visible), got
        yield "positions count from 1", right, torch.where(got >= 0, got - 1, got)
        yield "slots are named, not positions", right, self._positions_at(got)

    def _positions_at(self, slots: Tensor) -> Tensor:
        """Return the positions of the keys in ``slots`` of each row's request; a number beyond all for other slots."""
        problem, found = self._problem, torch.where(slots < 0, slots, 2**31)
        for r in problem.requests:
            own = slice(r.first_row, r.first_row + r.rows)
            for position, slot in enumerate(problem.layout.key_slots[r.base : r.base + r.num_keys].tolist()):
                found[own][slots[own] == slot] = position
        return found
