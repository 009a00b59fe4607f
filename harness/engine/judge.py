"""Keeps the keys and values of followed rows, and judges outputs and pages of a step."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, groupby, product

import numpy as np
import torch
from torch import Tensor

from attncheck.harness.engine.causes import LayerCall, WrongRows, cause_of, in_parts
from attncheck.harness.engine.events import (
    EngineFinding,
    KVGroup,
    LayerFacts,
    LayerRows,
    ObserverResult,
    ObserverSettings,
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

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class RowStore:
    """Keys and values of each layer by row number; row 0 is zeros."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._rows: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(self, layer: str, numbers: Tensor, key: Tensor, value: Tensor) -> None:
        """Keep the key and value ``[rows, ...]`` of a layer for rows with these numbers."""
        if layer not in self._rows:  # on a CPU, memory is taken only where it is written
            self._rows[layer] = _zero_first(key, self._capacity), _zero_first(value, self._capacity)
        for kept, given in zip(self._rows[layer], (key, value), strict=True):
            kept[numbers] = given

    def rows(self, layer: str, numbers: Numbers) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer for these rows."""
        key, value = self._rows[layer]
        some = torch.from_numpy(numbers).to(key.device)
        return key[some], value[some]

    def has(self, layer: str) -> bool:
        """Return whether rows of the layer are kept."""
        return layer in self._rows


def _zero_first(like: Tensor, count: int) -> Tensor:
    rows = like.new_empty(count, *like.shape[1:])
    rows[ZERO_ROW] = 0
    return rows


class Judge:
    """Judges the followed rows of an engine, step by step."""

    def __init__(
        self,
        settings: ObserverSettings,
        groups: Sequence[KVGroup],
        layers: Mapping[str, LayerFacts],
        history: EngineHistory,
        result: ObserverResult,
    ) -> None:
        self.store = RowStore(history.capacity)
        self._settings, self._groups, self._layers = settings, groups, layers
        self._history, self._result = history, result
        self._group_of = {layer: index for index, group in enumerate(groups) for layer in group.layers}
        self._never_judged: dict[str, str] = {}
        self._reported: set[tuple[str, str, int, int]] = set()

    def judge(self, due: StepInputs, layers: Sequence[LayerRows], *, is_judged: bool) -> None:
        """Keep the keys and values of a step, and in a judged step judge its outputs and pages.

        ``layers``: what each computes for the rows of ``due``; without query and output if the step is not judged.
        """
        followed = due.followed
        rows = torch.from_numpy(np.flatnonzero(due.positions >= 0))
        if not len(rows):
            return
        numbers = torch.from_numpy(np.concatenate([each.keys[0][each.done :] for each in followed]))
        times = Counter(each.layer for each in layers)
        calls: list[LayerCall] = []
        for each in layers:
            call = self._call(each)
            if call is None:
                self._result.not_followed["layers without a followed KV-cache group"] += len(rows)
                continue
            why_not = self._why_not_known(call, times)
            if why_not is None and call.source == each.layer and each.key is not None and each.value is not None:
                device = each.key.device
                self.store.keep(each.layer, numbers.to(device), each.key[rows.to(device)], each.value[rows.to(device)])
            if not is_judged:
                continue
            why_not = why_not or self._why_not_judged(call)
            if why_not is None:
                calls.append(call)
            else:
                self._result.not_followed[why_not] += len(rows)
        for call in calls:
            self._compare_pages(call, followed)
        for together in _of_equal_settings(calls):
            for requests in in_parts(followed, partial(_bytes_of_keys, together), _JUDGED_BYTES):
                self._judge(together, requests, followed)

    def _call(self, rows: LayerRows) -> LayerCall | None:
        facts, group = self._layers.get(rows.layer), self._group_of.get(rows.layer)
        return None if facts is None or group is None else LayerCall(rows, facts, group, self._groups[group].block_size)

    def _why_not_known(self, call: LayerCall, times: Mapping[str, int]) -> str | None:
        """Return why this call does not have all rows of a layer, or None."""
        layer, reason = call.rows.layer, None
        if call.rows.is_part:
            reason = "layers that compute a part of the rows"
        elif times[layer] > 1:
            reason = "layers that are called more than once in a step"
        if reason is not None and call.source == layer:  # some of its keys are not known from now on
            self._never_judged[layer] = reason
        return reason

    def _why_not_judged(self, call: LayerCall) -> str | None:
        query, output = call.rows.query, call.rows.output
        if query.dtype not in _DTYPES or output.dtype not in _DTYPES:
            return f"queries of {query.dtype} with outputs of {output.dtype}"
        not_followed = self._groups[call.group].not_followed
        unseen = None if self.store.has(call.source) else "layers whose keys were not seen"
        return call.facts.not_judged or self._never_judged.get(call.source) or not_followed or unseen

    # Outputs.

    def _judge(
        self, together: Sequence[LayerCall], requests: Sequence[FollowedRequest], followed: Sequence[FollowedRequest]
    ) -> None:
        """Compare the outputs of some requests with the truth; of layers that are judged as heads of one."""
        first = together[0]
        params, counts = first.facts.params, [len(each.given) for each in requests]
        query = torch.cat([_rows_of(call.rows.query, requests) for call in together], dim=1)
        shape = sum(counts), params.num_heads, params.value_head_size
        output = torch.cat([_rows_of(call.rows.output, requests).reshape(shape) for call in together], dim=1).double()
        keys = [_keys(first, each) for each in requests]
        kept = [self.store.rows(call.source, np.concatenate(keys)) for call in together]
        ends = _ends(counts, query.device), _ends([len(each) for each in keys], query.device)
        truth, budget = _truth(together, query, kept, ends)
        overflows = ~(truth.isfinite().all(dim=2) & budget.norm.isfinite())
        by_layer = len(together), params.num_heads
        overflows = overflows.unflatten(1, by_layer).any(dim=2)
        worst = share_of_budget(output - truth, budget).unflatten(1, by_layer).amax(dim=2).masked_fill(overflows, 0.0)
        self._result.checks["output"] += int((~overflows).sum())
        self._result.not_followed["rows for which a good kernel overflows"] += int(overflows.sum())
        self._result.worst_share = max(self._result.worst_share, float(worst.max()))
        shares, starts = worst.cpu().numpy(), accumulate(counts, initial=0)
        for (request, start), (index, call) in product(zip(requests, starts, strict=False), enumerate(together)):
            own = shares[start : start + len(request.given), index]
            wrong = np.flatnonzero(own > 1)
            if not len(wrong):
                continue
            worst_first = wrong[np.argsort(-own[wrong])]
            rows, heads = torch.from_numpy(start + worst_first).to(query.device), _heads(params, index)
            wrong_rows = WrongRows(
                call=call,
                request=request,
                others=tuple(each for each in followed if each is not request),
                positions=request.done + worst_first,
                query=query[rows, heads],
                output=output[rows, heads],
                budget=Budget(*(part[rows, heads] for part in (budget.norm, budget.peak, budget.lse))),
                attended=partial(self._attended, call),
            )
            self._find_output(wrong_rows, float(own.max()))

    def _attended(self, call: LayerCall, numbers: Numbers) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer that attention reads, for these rows."""
        return call.facts.attended(*self.store.rows(call.source, numbers))

    def _find_output(self, wrong: WrongRows, share: float) -> None:
        """Report wrong rows, with what the pages lack and a wrong reading that gives the same output, if one does."""
        call, request = wrong.call, wrong.request
        note, cause = _not_finite(wrong.output), None
        block_index = None
        if self._result.counts["explained findings"] < self._settings.max_explained:
            self._result.counts["explained findings"] += 1
            lacking = self._compare_pages(call, [request], whole=True)
            cause = cause_of(wrong, lacking, self._history)
            if lacking is not None:
                note = "; ".join(filter(None, (note, _words_of_pages(call, request, lacking))))
                block_index = int(lacking[0]) // call.block_size if len(lacking) else None
            if cause is not None and cause.block_index is not None:
                block_index = cause.block_index
        self._result.find(
            EngineFinding(
                kind="output",
                step=self._result.steps,
                request_id=request.request_id,
                position=int(wrong.positions.min()),
                layer=call.rows.layer,
                group=call.group,
                block_id=None if block_index is None else request.block_ids[call.group][block_index],
                block_index=block_index,
                num_rows=len(wrong.positions),
                budget_share=share,
                cause=None if cause is None else cause.meaning,
                note=note,
            )
        )

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
        if cache is None:
            why_not = "pages with async scheduling, whose steps are judged late"
        elif facts.write is None or cache.numel() == 0:
            why_not = "pages that cannot be compared"
        elif cache[:1].numel() < page_size * facts.row_size:  # the layer would write behind the scratch pages
            why_not = f"pages that are smaller than {page_size} keys"
        if cache is None or facts.write is None or why_not is not None:
            self._result.not_followed[str(why_not)] += len(requests)
            return None
        compared = [self._compared(call, request, whole=whole) for request in requests]
        owners = np.repeat(np.arange(len(requests)), [len(each) for each in compared])
        positions = np.concatenate(compared)
        slots, numbers = [], []
        for request, some in zip(requests, compared, strict=True):
            table = np.array(request.block_ids[call.group])
            slots.append(table[some // size] * size + some % size)
            numbers.append(request.keys[call.group][some])
        key, value = self.store.rows(call.rows.layer, np.concatenate(numbers))
        pages = owners * 2**32 + positions // page_size  # a page that two requests share is compared for each
        found = lacking_keys(facts.write, page_size, pages, np.concatenate(slots), key, value, cache)
        self._result.checks["write"] += len(np.unique(pages))
        for owner in np.unique(owners[found]).tolist():
            self._find_lacking(call, requests[owner], positions[found[owners[found] == owner]])
        return positions[found]

    def _compared(self, call: LayerCall, request: FollowedRequest, *, whole: bool) -> Numbers:
        """Return the positions of a request whose slots are compared."""
        size = call.block_size
        first, end = first_seen(call.facts.params, request.done), request.end
        written = max(first, request.done // size * size)
        if whole or written == first:
            return np.arange(first, end)
        turn = first // size + self._result.steps % (written // size - first // size)
        before = np.arange(max(first, turn * size), min(written, (turn + 1) * size))
        return np.concatenate([before, np.arange(written, end)])

    def _find_lacking(self, call: LayerCall, request: FollowedRequest, positions: Numbers) -> None:
        """Report each block that lacks positions which were not reported before."""
        layer, page_size = call.rows.layer, call.facts.page_size or call.block_size
        for index, of_block in groupby(positions.tolist(), key=lambda position: position // call.block_size):
            block_id = request.block_ids[call.group][index]
            places = {(request.request_id, layer, block_id, position): position for position in of_block}
            new = [position for place, position in places.items() if place not in self._reported]
            self._reported.update(places)
            if not new:
                continue
            self._result.find(
                EngineFinding(
                    kind="write",
                    step=self._result.steps,
                    request_id=request.request_id,
                    position=new[0],
                    layer=layer,
                    group=call.group,
                    block_id=block_id,
                    block_index=index,
                    num_rows=len({position // page_size for position in new}),
                    note=_lacks(block_id, index, new),
                )
            )


def _truth(
    together: Sequence[LayerCall], query: Tensor, kept: Sequence[tuple[Tensor, Tensor]], ends: tuple[Tensor, Tensor]
) -> tuple[Tensor, Budget]:
    """Return the right output, float64 ``[T, H, Dv]``, and the budget around it, of all layers as heads of one.

    ``kept``: key and value of each layer, as they are kept.
    """
    facts, dtype = together[0].facts, query.dtype
    params, weights = _as_heads([call.facts.params for call in together]), facts.up_projections
    attended = [call.facts.attended(*rows) for call, rows in zip(together, kept, strict=True)]
    key, value = (torch.cat(parts, dim=1) for parts in zip(*attended, strict=True))
    rows = UnpagedAttention(query if weights is None else query.double(), key, value, *ends)
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
    """Return the layers that can be judged as heads of one; each latent or coded layer is alone."""
    together: dict[object, list[LayerCall]] = {}
    for call in calls:
        facts, params, query = call.facts, call.facts.params, call.rows.query
        settings = replace(params, sinks=params.sinks and (0.0,) * params.num_heads)
        alone = call.rows.layer if facts.up_projections is not None or facts.code is not None else None
        together.setdefault((call.group, settings, query.dtype, query.device, alone), []).append(call)
    return together.values()


def _as_heads(params: Sequence[AttentionParams]) -> AttentionParams:
    """Return the settings of one layer that has the heads of all."""
    first = params[0]
    return replace(
        first,
        num_heads=first.num_heads * len(params),
        num_kv_heads=first.num_kv_heads * len(params),
        scale=first.softmax_scale,
        sinks=None if first.sinks is None else tuple(sink for each in params for sink in each.sinks or ()),
        alibi_slopes=None if first.alibi_slopes is None else first.alibi_slopes * len(params),
    )


def _heads(params: AttentionParams, index: int) -> slice:
    """Return the heads of one of several layers that are judged together."""
    return slice(index * params.num_heads, (index + 1) * params.num_heads)


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


def _ends(counts: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *counts], device=device).cumsum(0)


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
    by_block = groupby(lacking.tolist(), key=lambda position: position // call.block_size)
    return "; ".join([_lacks(table[index], index, list(positions)) for index, positions in by_block][:3])


def _lacks(block_id: int, index: int, positions: Sequence[int]) -> str:
    return f"{block_in_words(block_id, index)} lacks {positions_in_words(positions)}"
