"""Keeps the keys and values of followed rows, and judges outputs and pages of a step."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, groupby, product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attncheck.harness.engine.causes import LayerCall, WrongRows, cause_of, in_parts
from attncheck.harness.engine.events import (
    CheckKind,
    EngineFinding,
    LayerRows,
    ObserverResult,
)
from attncheck.harness.engine.history import (
    ZERO_ROW,
    EngineHistory,
    FollowedRequest,
    Numbers,
    StepInputs,
    block_in_words,
    first_seen,
    positions_in_words,
)
from attncheck.harness.engine.pages import lacking as lacking_keys
from attncheck.harness.truth.faults import LATENT_ROUNDINGS, CacheRows, absorbed_rows, latent_answers
from attncheck.harness.truth.unpaged import Budget, UnpagedAttention, budget_of, share_of_budget
from attncheck.reference import AttentionParams, Precision

# Truth and budget are those of attncheck's cases.

_JUDGED_BYTES = 2**27
"""Bytes of float64 keys and values that are judged at once."""

_UNSEEN = "layers whose keys were not seen"
"""Why a layer is not judged."""

_NOT_CALLED = "layers that are not called in each step, such as those of a drafter"
"""Why a layer is not judged in later steps: some of its keys are not known."""

_MOST_SCORES = {"cpu": 2**26, "cuda": 2**30}
"""Scores of rows and keys, in all heads and layers, that one step is judged with: about 10 s of one CPU core."""

_TOO_LONG = "rows that see too many keys to be judged within a step"
"""Why some rows are not judged: the engine waits for the judge."""

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Judge:
    """Keeps keys and values of each layer by row number, and judges the followed rows of an engine step by step."""

    def __init__(self, history: EngineHistory, result: ObserverResult, max_explained: int) -> None:
        self._history, self._result, self._max_explained = history, result, max_explained
        self._groups, self._layers = history.groups, history.layers
        self._group_of = {layer: index for index, group in enumerate(self._groups) for layer in group.layers}
        self._rows: dict[str, tuple[Tensor, Tensor]] = {}
        self._never_judged: dict[str, str] = {}
        self._reported: set[tuple[str, str, int, int]] = set()

    def judge(self, due: StepInputs, layers: Sequence[LayerRows], *, is_judged: bool) -> None:
        """Keep the keys and values of a step, and in a judged step judge its outputs and pages.

        ``layers``: what each computes for the rows of ``due``; without query and output if the step is not judged.
        """
        rows = torch.from_numpy(np.flatnonzero(due.positions >= 0))
        if not len(rows):
            return
        numbers = torch.from_numpy(np.concatenate([each.keys[0][each.done :] for each in due.followed]))
        times = Counter(each.layer for each in layers)
        self._note_not_called(times, len(rows) if is_judged else 0)
        calls: list[LayerCall] = []
        for given in layers:
            facts, group = self._layers.get(given.layer), self._group_of.get(given.layer)
            if facts is None or group is None:
                reason = "layers without a followed KV-cache group"
                self._result.not_compared["output", reason] += len(rows) if is_judged else 0
                continue
            call = LayerCall(given, facts, group, self._groups[group].block_size, due.followed)
            incomplete = _why_incomplete(call, times)
            if facts.row_size and incomplete is not None:
                self._never_judged[given.layer] = incomplete  # some of its keys are not known from now on
            elif facts.row_size:
                self._keep(given, rows, numbers)
            why_not = incomplete or self._why_not_judged(call)
            if is_judged and why_not is not None:
                self._result.not_compared["output", why_not] += len(rows)
            elif is_judged:
                calls.append(call)
        for call in calls:
            self._compare_pages(call, call.requests)
        for together in _of_equal_settings(calls):
            judged = self._affordable(together, due.followed, len(together) / len(calls))
            for requests in in_parts(judged, partial(_bytes_of_keys, together), _JUDGED_BYTES):
                self._judge(together, requests)

    def forget(self, request_id: str) -> None:
        """Forget what was reported of a request that ended."""
        self._reported = {place for place in self._reported if place[0] != request_id}

    def _note_not_called(self, times: Mapping[str, int], num_rows: int) -> None:
        """Count the rows of each layer that is not called in a step, and judge the layer no more."""
        for layer in self._layers.keys() & self._group_of.keys() - times.keys():
            self._never_judged.setdefault(layer, _NOT_CALLED)
            not_followed = self._groups[self._group_of[layer]].not_followed
            why_not = self._layers[layer].not_judged or not_followed or _NOT_CALLED
            self._result.not_compared["output", why_not] += num_rows

    def _why_not_judged(self, call: LayerCall) -> str | None:
        query, output = call.rows.query, call.rows.output
        if query.dtype not in _DTYPES or output.dtype not in _DTYPES:
            return f"queries of {query.dtype} with outputs of {output.dtype}"
        not_followed = self._groups[call.group].not_followed
        why_not = call.facts.not_judged or self._never_judged.get(call.source) or not_followed
        return why_not or (None if call.source in self._rows else _UNSEEN)

    def _keep(self, given: LayerRows, rows: Tensor, numbers: Tensor) -> None:
        """Keep the key and value of some rows of a layer."""
        assert given.key is not None
        assert given.value is not None
        device, capacity = given.key.device, self._history.capacity
        if given.layer not in self._rows:  # on a CPU, memory is taken only where it is written
            key, value = (each.new_empty(capacity, *each.shape[1:]) for each in (given.key, given.value))
            key[ZERO_ROW], value[ZERO_ROW] = 0, 0
            self._rows[given.layer] = key, value
        for kept, new in zip(self._rows[given.layer], (given.key, given.value), strict=True):
            kept[numbers.to(device)] = new[rows.to(device)]

    def _kept(self, call: LayerCall, numbers: Numbers) -> tuple[Tensor, Tensor]:
        """Return the keys and values that a layer reads, as they are kept, for these rows."""
        key, value = self._rows[call.source]
        some = torch.from_numpy(numbers).to(key.device)
        return key[some], value[some]

    # Outputs.

    def _affordable(
        self, together: Sequence[LayerCall], requests: Sequence[FollowedRequest], share: float
    ) -> list[FollowedRequest]:
        """Return the requests that these layers are judged for, and count others. ``share``: of all layers' scores."""
        left = share * _MOST_SCORES.get(together[0].rows.query.device.type, _MOST_SCORES["cuda"])
        heads, judged = len(together) * together[0].facts.params.num_heads, []
        for request in requests:
            scores = heads * len(request.given) * len(_keys(together[0], request))
            if scores <= left:
                left -= scores
                judged.append(request)
            else:
                self._result.not_compared["output", _TOO_LONG] += len(request.given) * len(together)
        return judged

    def _judge(self, together: Sequence[LayerCall], requests: Sequence[FollowedRequest]) -> None:
        """Compare the outputs of some requests with the truth; of layers that are judged as heads of one."""
        params, counts = together[0].facts.params, [len(each.given) for each in requests]
        by_layer = len(together), params.num_heads
        query = torch.cat([_rows_of(call.rows.query, requests) for call in together], dim=1)
        output = torch.cat([_rows_of(call.rows.output, requests).flatten(1) for call in together], dim=1).double()
        output = output.unflatten(1, (-1, params.value_head_size))
        keys = [_keys(together[0], each) for each in requests]
        kept = [self._kept(call, np.concatenate(keys)) for call in together]
        ends = [torch.tensor([0, *each], device=query.device).cumsum(0) for each in (counts, map(len, keys))]
        truth, budget = _truth(together, query, kept, ends)
        overflows = ~(truth.isfinite().all(dim=2) & budget.norm.isfinite()).unflatten(1, by_layer).all(dim=2)
        worst = share_of_budget(output - truth, budget).unflatten(1, by_layer).amax(dim=2).masked_fill(overflows, 0.0)
        self._result.checks["output"] += int((~overflows).sum())
        self._result.not_compared["output", "rows for which a good kernel overflows"] += int(overflows.sum())
        self._result.worst_share = max(self._result.worst_share, float(worst.max()))
        shares, starts = worst.cpu().numpy(), accumulate(counts, initial=0)
        for (index, call), (request, start) in product(enumerate(together), zip(requests, starts, strict=False)):
            own = shares[start : start + len(request.given), index]
            worst_first = np.argsort(-own)[: int((own > 1).sum())]
            if not len(worst_first):
                continue
            rows = torch.from_numpy(start + worst_first).to(query.device)
            heads = slice(index * params.num_heads, (index + 1) * params.num_heads)
            wrong = WrongRows(
                call=call,
                request=request,
                positions=request.done + worst_first,
                query=query[rows, heads],
                output=output[rows, heads],
                budget=Budget(*(part[rows, heads] for part in (budget.norm, budget.peak, budget.lse))),
                kept=partial(self._kept, call),
            )
            self._find_output(wrong, float(own.max()))

    def _find_output(self, wrong: WrongRows, share: float) -> None:
        """Report wrong rows, with what the pages lack and a wrong reading that gives the same output, if one does."""
        call, request, notes = wrong.call, wrong.request, [_not_finite(wrong.output)]
        cause = block_index = None
        if self._result.counts["explained findings"] < self._max_explained:
            self._result.counts["explained findings"] += 1
            lacking = self._compare_pages(call, [request], whole=True)
            if lacking is not None:
                notes.append(_words_of_pages(call, request, lacking))
                block_index = int(lacking[0]) // call.block_size if len(lacking) else None
            cause = cause_of(wrong, lacking, self._history)
            if cause is not None and cause.block_index is not None:
                block_index = cause.block_index
        else:
            notes.append(f"its cause was not sought: max_explained is {self._max_explained}")
        self._find(
            "output",
            call,
            request,
            int(wrong.positions.min()),
            block_index,
            num_rows=len(wrong.positions),
            budget_share=share,
            cause=None if cause is None else cause.meaning,
            note="; ".join(filter(None, notes)),
        )

    def _find(
        self, kind: CheckKind, call: LayerCall, request: FollowedRequest, position: int, index: int | None, **more: Any
    ) -> None:
        """Report what is wrong. ``index``: the number of the block in the request's table."""
        block_id = None if index is None else request.block_ids[call.group][index]
        place = request.request_id, position, call.rows.layer, call.group, block_id, index
        self._result.find(EngineFinding(kind, self._result.steps, *place, **more))

    # Pages.

    def _compare_pages(
        self, call: LayerCall, requests: Sequence[FollowedRequest], *, whole: bool = False
    ) -> Numbers | None:
        """Compare pages of a layer that the rows of this step read; report and return the positions that they lack.

        These are the pages that the step wrote to, and one other page of each request, in turn; ``whole``: all pages.
        Return None if pages cannot be compared.
        """
        facts, cache, size = call.facts, call.rows.kv_cache, call.block_size
        page_size = facts.page_size or size
        if facts.kv_sharing_target is not None:
            return None  # its pages are those of the other layer
        why_not = None
        if self._result.engine.is_async:
            why_not = "pages with async scheduling, whose steps are judged late"
        elif facts.write is None or cache is None or cache.numel() == 0:
            why_not = "pages that cannot be compared"
        elif cache[:1].numel() < page_size * facts.row_size:  # the layer would write behind the scratch pages
            why_not = f"pages that are smaller than {page_size} keys"
        if cache is None or facts.write is None or why_not is not None:
            self._result.not_compared["write", str(why_not)] += len(requests)
            return None
        parts = [self._compared(call, request, whole=whole) for request in requests]
        owners = np.repeat(np.arange(len(requests)), [len(part[0]) for part in parts])
        positions, slots, numbers = (np.concatenate(each) for each in zip(*parts, strict=True))
        pages = owners * 2**32 + positions // page_size  # a page that two requests share is compared for each
        found = lacking_keys(facts.write, page_size, pages, slots, self._kept(call, numbers), cache)
        self._result.checks["write"] += len(np.unique(pages))
        for owner in np.unique(owners[found]).tolist():
            self._find_lacking(call, requests[owner], positions[found[owners[found] == owner]])
        lacking: Numbers = positions[found]
        return lacking

    def _compared(self, call: LayerCall, request: FollowedRequest, *, whole: bool) -> tuple[Numbers, Numbers, Numbers]:
        """Return the positions of a request that are compared, their slots, and the numbers of their rows."""
        size, table = call.block_size, np.array(request.block_ids[call.group])
        first = first_seen(call.facts.params, request.done)
        written = max(first, request.done // size * size)
        positions = np.arange(first, request.end)
        if not whole and written > first:
            turn = first // size + self._result.steps % (written // size - first // size)
            positions = positions[(positions // size == turn) | (positions >= written)]
        return positions, table[positions // size] * size + positions % size, request.keys[call.group][positions]

    def _find_lacking(self, call: LayerCall, request: FollowedRequest, positions: Numbers) -> None:
        """Report each block that lacks positions which were not reported before."""
        page_size = call.facts.page_size or call.block_size
        for index, of_block in _by_block(positions, call.block_size):
            block_id = request.block_ids[call.group][index]
            places = {position: (request.request_id, call.rows.layer, block_id, position) for position in of_block}
            new = [position for position, place in places.items() if place not in self._reported]
            self._reported.update(places.values())
            if new:
                pages, note = {position // page_size for position in new}, _lacks(block_id, index, new)
                self._find("write", call, request, new[0], index, num_rows=len(pages), note=note)


def _truth(
    together: Sequence[LayerCall], query: Tensor, kept: Sequence[tuple[Tensor, Tensor]], ends: Sequence[Tensor]
) -> tuple[Tensor, Budget]:
    """Return the right output, float64 ``[T, H, Dv]``, and the budget around it, of all layers as heads of one.

    ``kept``: key and value of each layer, as they are kept.
    """
    facts, dtype = together[0].facts, query.dtype
    weights, heads = facts.up_projections, (facts.params.num_heads, facts.params.num_kv_heads)
    params = replace(
        facts.params,
        num_heads=len(together) * heads[0],
        num_kv_heads=len(together) * heads[1],
        scale=facts.params.softmax_scale,
    )
    attended = [call.facts.attended(*rows) for call, rows in zip(together, kept, strict=True)]
    key, value = (torch.cat(parts, dim=1) for parts in zip(*attended, strict=True))
    rows = UnpagedAttention(query if weights is None else query.double(), key, value, ends[0], ends[1])
    out, lse, weighted = rows.attend_weighted(params)
    kernel = Precision.kernel(dtype)
    if weights is None:
        honest: list[tuple[Tensor, Tensor]] = []
        if facts.code is not None:  # kernels read codes exactly, or rounded to their dtype
            rounded = replace(rows, keys=key.to(dtype), values=value.to(dtype))
            honest = [each.attend(params, kernel) for each in (rows, rounded)]
        return out, budget_of(rows, params, dtype, out, lse, weighted, honest)
    cached = CacheRows(*(each.double().reshape(len(each), 1, -1) for each in kept[0]))
    absorbed = absorbed_rows(weights, cached, rows)
    sizes = 1, absorbed.keys.shape[-1], absorbed.values.shape[-1]  # KV heads, and columns of keys and values
    latent = AttentionParams(params.num_heads, *sizes, scale=params.softmax_scale)
    forms = params, latent
    runs = latent_answers(weights, cached, rows, forms, dtype, lambda some, how: some.attend(how, kernel))
    return out, budget_of(rows, params, dtype, out, lse, weighted, runs, [(absorbed, latent)], LATENT_ROUNDINGS)


def _of_equal_settings(calls: Sequence[LayerCall]) -> Iterable[list[LayerCall]]:
    """Return the layers that can be judged as heads of one; each with latent rows, codes, or numbers of heads alone."""
    together: dict[object, list[LayerCall]] = {}
    for call in calls:
        facts, params, query = call.facts, call.facts.params, call.rows.query
        has_own = any((facts.up_projections, facts.code, params.sinks, params.alibi_slopes))
        key = call.rows.layer if has_own else (call.group, params, query.dtype, query.device)
        together.setdefault(key, []).append(call)
    return together.values()


def _why_incomplete(call: LayerCall, times: Mapping[str, int]) -> str | None:
    """Return why a call does not have all rows and keys of its layer, or None."""
    if call.rows.is_part:
        return "layers that compute a part of the rows"
    if times[call.rows.layer] > 1:
        return "layers that are called more than once in a step"
    lacks_keys = call.facts.row_size and (call.rows.key is None or call.rows.value is None)
    return _UNSEEN if lacks_keys else None


def _rows_of(given: Tensor, requests: Sequence[FollowedRequest]) -> Tensor:
    return torch.cat([given[request.rows] for request in requests])


def _keys(call: LayerCall, request: FollowedRequest) -> Numbers:
    """Return the row numbers of the keys that rows of a request see; whole chunks, which are counted from key 0."""
    first = first_seen(call.facts.params, request.done)
    return request.keys[call.group][first - first % (call.facts.params.attn_chunk_size or 1) :]


def _bytes_of_keys(together: Sequence[LayerCall], request: FollowedRequest) -> int:
    """Return the bytes of float64 keys, values and absolute values."""
    params = together[0].facts.params
    size = params.num_kv_heads * (params.head_size + 2 * params.value_head_size)
    return 8 * size * len(together) * len(_keys(together[0], request))


def _not_finite(output: Tensor) -> str:
    if bool(output.isnan().any()):
        return "the output is NaN"
    return "the output is infinite" if bool(output.isinf().any()) else ""


def _words_of_pages(call: LayerCall, request: FollowedRequest, lacking: Numbers) -> str:
    """Return what the pages of a wrong output lack, or that they are right."""
    if not len(lacking) and call.facts.code is not None:
        return "the pages hold the codes that the layer itself writes: they are wrong codes, or are read wrongly"
    if not len(lacking):
        return "the pages hold the right keys and values, but are read wrongly or the attention is wrong"
    table = request.block_ids[call.group]
    parts = [_lacks(table[index], index, positions) for index, positions in _by_block(lacking, call.block_size)]
    return "; ".join(parts[:3])


def _lacks(block_id: int, index: int, positions: Sequence[int]) -> str:
    return f"{block_in_words(block_id, index)} lacks {positions_in_words(positions)}"


def _by_block(positions: Numbers, size: int) -> Iterator[tuple[int, list[int]]]:
    for index, of_block in groupby(positions.tolist(), key=lambda position: position // size):
        yield index, list(of_block)
