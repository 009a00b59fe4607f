"""Keeps the keys and values of followed rows, and judges outputs and pages of a step."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from attncheck.harness.engine.causes import WrongRows, cause_of
from attncheck.harness.engine.events import (
    EngineFinding,
    KVGroup,
    LayerFacts,
    LayerRows,
    ObserverResult,
    ObserverSettings,
)
from attncheck.harness.engine.history import (
    EngineHistory,
    Numbers,
    StepInputs,
    StepRows,
    block_in_words,
    first_needed,
    first_seen,
    positions_in_words,
)
from attncheck.harness.engine.pages import KeptKeys, PageChecks
from attncheck.harness.truth.faults import LATENT_ROUNDINGS, CacheRows, absorbed_rows, latent_answers
from attncheck.harness.truth.unpaged import ROUNDINGS, Budget, UnpagedAttention, budget_of, share_of_budget
from attncheck.reference import AttentionParams, Precision

# Truth and budget are those of attncheck's cases. Layers of equal settings are judged together, as heads of one layer:
# the reference then runs once a step for all of them.

_PENDING_BYTES = 2**28
"""Bytes of queries and outputs that wait for the end of the step."""

_JUDGED_BYTES = 2**27
"""Bytes of float64 keys and values that are judged at once."""

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class RowStore:
    """Keys and values of each layer by row number; row 0 is zeros."""

    def __init__(self, history: EngineHistory, max_bytes: int) -> None:
        self._numbers = history.numbers
        self._max_bytes = max_bytes
        self._rows: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(self, layer: str, numbers: Tensor, key: Tensor, value: Tensor) -> None:
        """Keep the key and value ``[rows, ...]`` of a layer for rows with these numbers."""
        kept = self._rows.get(layer)
        capacity = self._numbers.capacity
        if kept is None or len(kept[0]) < capacity:
            grown = tuple(each.new_zeros(capacity, *each.shape[1:]) for each in (key, value))
            for new, old in zip(grown, kept or (), strict=False):
                new[: len(old)] = old
            kept = self._rows[layer] = (grown[0], grown[1])
        kept[0][numbers], kept[1][numbers] = key, value

    def rows(self, layer: str, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer for these rows."""
        key, value = self._rows[layer]
        return key[numbers], value[numbers]

    def has(self, layer: str) -> bool:
        """Return whether rows of the layer are kept."""
        return layer in self._rows

    def limit_numbers(self) -> None:
        """Set how many rows there may be, from the bytes that a row has in all layers."""
        size = sum(each[0].numel() * each.element_size() for pair in self._rows.values() for each in pair)
        if size and self._numbers.max_capacity is None:
            self._numbers.max_capacity = max(2, self._max_bytes // size)


@dataclass(frozen=True)
class JudgedCall:
    """What a layer did in this step, for the followed rows: query ``[T, H, D]`` and output ``[T, H, Dv]``."""

    layer: str
    facts: LayerFacts
    group: int
    query: Tensor
    output: Tensor
    kv_cache: Tensor | None


class Judge:
    """Judges the followed rows of an engine, step by step."""

    def __init__(
        self,
        settings: ObserverSettings,
        groups: Sequence[KVGroup],
        layers: Mapping[str, LayerFacts],
        history: EngineHistory,
        tally: ObserverResult,
    ) -> None:
        self.store = RowStore(history, settings.max_row_bytes)
        self._settings, self._groups, self._layers = settings, groups, layers
        self._history, self._tally = history, tally
        self._group_of = {layer: index for index, group in enumerate(groups) for layer in group.layers}
        self._followed: tuple[StepRows, ...] = ()
        self._is_judged = False
        self._input_rows = self._numbers = torch.zeros(0, dtype=torch.int64)
        self._pending: list[JudgedCall] = []
        self._pending_bytes = 0
        self._taken: set[str] = set()
        self._never_judged: dict[str, str] = {}
        self._pages = PageChecks()
        self._reported: dict[tuple[str, str, int], set[int]] = {}

    # One step.

    def begin(self, inputs: StepInputs, *, is_judged: bool) -> None:
        """Take the followed rows of a step."""
        self._followed, self._is_judged = inputs.followed, is_judged
        self._taken.clear()
        empty = np.zeros(0, dtype=np.int64)
        spans = [np.arange(rows.first, rows.first + rows.num_rows) for rows in inputs.followed]
        self._input_rows = torch.from_numpy(np.concatenate([empty, *spans]))
        self._numbers = torch.from_numpy(np.concatenate([empty, *(rows.numbers for rows in inputs.followed)]))

    def take(self, given: LayerRows) -> None:
        """Keep a layer's keys and values, and in a judged step its query and output."""
        layer, query, key, value, output, kv_cache, is_part = given
        facts, num_rows = self._layers.get(layer), len(self._input_rows)
        group = self._group_of.get(layer)
        if not num_rows or facts is None or group is None:
            self._tally.not_followed["layers without a followed KV-cache group"] += num_rows
            return
        if is_part:
            reason = "layers that compute a part of the rows"
            if facts.kv_sharing_target is None:  # some keys were not seen
                self._never_judged[layer] = reason
            self._tally.not_followed[reason] += num_rows
            return
        if layer in self._taken:
            self._never_judged[layer] = "layers that are called more than once in a step"
            self._pending = [each for each in self._pending if each.layer != layer]
        self._taken.add(layer)
        rows, numbers = self._input_rows.to(query.device), self._numbers.to(query.device)
        if facts.kv_sharing_target is None and key is not None and value is not None:
            self.store.keep(layer, numbers, key[rows], value[rows])
        if not self._is_judged:
            return
        why_not = facts.not_judged or self._reason(layer, facts, query, output, group)
        if why_not:
            self._tally.not_followed[why_not] += num_rows
            return
        params = facts.params
        heads = output.reshape(len(output), params.num_heads, params.value_head_size)
        pending = JudgedCall(layer, facts, group, query[rows], heads[rows], kv_cache)
        self._pending.append(pending)
        self._pending_bytes += sum(each.numel() * each.element_size() for each in (pending.query, pending.output))
        if self._pending_bytes > _PENDING_BYTES:
            self.finish()

    def _reason(self, layer: str, facts: LayerFacts, query: Tensor, output: Tensor, group: int) -> str | None:
        """Return why this call of a layer cannot be judged."""
        source = facts.kv_sharing_target or layer
        for each in (layer, source):
            if each in self._never_judged:
                return self._never_judged[each]
        if self._groups[group].not_followed:
            return self._groups[group].not_followed
        if query.dtype not in _DTYPES or output.dtype not in _DTYPES:
            return f"queries of {query.dtype} with outputs of {output.dtype}"
        if not self.store.has(source):
            return "layers whose keys were not seen"
        return None

    def finish(self) -> None:
        """Judge what was taken in this step."""
        self.store.limit_numbers()
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        for each in pending:
            self._compare_pages(each, self._followed)
        for together in _of_equal_settings(pending):
            for requests in self._in_parts(together):
                self._judge(together, requests)

    def _in_parts(self, together: Sequence[JudgedCall]) -> Iterator[tuple[StepRows, ...]]:
        """Yield requests whose keys and values fit into memory together."""
        params = together[0].facts.params
        size = 8 * len(together) * params.num_kv_heads * (params.head_size + 2 * params.value_head_size)
        part: list[StepRows] = []
        num_keys = 0
        for request in self._followed:
            keys = request.position + request.num_rows - first_needed(params, request.position)
            if part and size * (num_keys + keys) > _JUDGED_BYTES:
                yield tuple(part)
                part, num_keys = [], 0
            part.append(request)
            num_keys += keys
        if part:
            yield tuple(part)

    # Outputs.

    def _judge(self, together: Sequence[JudgedCall], requests: Sequence[StepRows]) -> None:
        begin = next(at for at, each in _starts(self._followed) if each is requests[0])
        budget, truth = self._truth(together, requests, begin)
        own = slice(begin, begin + len(truth))
        got = torch.cat([each.output[own] for each in together], dim=1).double()
        share = share_of_budget(got - truth, budget).unflatten(1, (len(together), -1))
        is_finite = torch.isfinite(truth).all(dim=2) & torch.isfinite(budget.norm)
        is_finite = is_finite.unflatten(1, (len(together), -1)).all(dim=2)
        share = torch.where(is_finite[..., None], share, 0.0)
        worst = share.amax(dim=2)
        num_finite = int(is_finite.sum())
        self._tally.checks["output"] += num_finite
        self._tally.not_followed["rows for which a good kernel overflows"] += worst.numel() - num_finite
        self._tally.worst_share = max(self._tally.worst_share, float(worst.max()))
        if not bool((worst > 1).any()):
            return
        shares = worst.cpu().numpy()
        heads = together[0].facts.params.num_heads
        for index, each in enumerate(together):
            of_layer = slice(index * heads, (index + 1) * heads)
            for at, request in _starts(requests):
                of_request = slice(at, at + request.num_rows)
                bad = np.flatnonzero(shares[of_request, index] > 1)
                if len(bad):
                    allowed = Budget(*(part[of_request, of_layer] for part in (budget.norm, budget.peak, budget.lse)))
                    self._find(each, request, bad, shares[of_request, index], begin + at, allowed)

    def _truth(self, together: Sequence[JudgedCall], requests: Sequence[StepRows], begin: int) -> tuple[Budget, Tensor]:
        """Return the budget and the right output, float64 ``[T, H, Dv]``, of all layers as heads of one.

        ``begin``: the first row of the requests.
        """
        first = together[0]
        params, group, facts = _as_heads([each.facts.params for each in together]), first.group, first.facts
        num_rows = [each.num_rows for each in requests]
        query = torch.cat([each.query[begin : begin + sum(num_rows)] for each in together], dim=1)
        keys = [
            each.keys_of(group)[first_needed(facts.params, each.position) : each.position + each.num_rows]
            for each in requests
        ]
        numbers = torch.from_numpy(np.concatenate(keys)).to(query.device)
        kept = [self.store.rows(each.facts.kv_sharing_target or each.layer, numbers) for each in together]
        ends = _ends(num_rows).to(query.device), _ends([len(each) for each in keys]).to(query.device)
        dtype = query.dtype
        if facts.up_projections is not None:
            return _latent_truth(facts, query, kept[0], ends)
        coded = [(key, value) if facts.code is None else facts.code(key, value) for key, value in kept]
        key, value = (torch.cat([each[part] for each in coded], dim=1) for part in (0, 1))
        rows = UnpagedAttention(query, key, value, *ends)
        out, lse, weighted = rows.attend_weighted(params)
        honest = []
        if facts.code is not None:  # kernels read codes exactly, or rounded to their dtype
            kernel = Precision.kernel(dtype)
            rounded = replace(rows, keys=key.to(dtype), values=value.to(dtype))
            honest = [rows.attend(params, kernel), rounded.attend(params, kernel)]
        return budget_of(rows, params, dtype, out, lse, weighted, honest, (), ROUNDINGS), out

    def _find(
        self,
        pending: JudgedCall,
        request: StepRows,
        bad: Numbers,
        shares: np.ndarray,
        at: int,
        allowed: Budget,
    ) -> None:
        """Report the wrong rows of a request in a layer. ``at``: of its first row; ``bad``: counted from that."""
        finding = EngineFinding(
            kind="output",
            step=self._tally.steps,
            request_id=request.request_id,
            position=request.position + int(bad[0]),
            layer=pending.layer,
            group=pending.group,
            num_rows=len(bad),
            budget_share=float(shares.max()),
            note=_not_finite(pending.output[at + torch.from_numpy(bad).to(pending.output.device)]),
        )
        if self._tally.counts["explained findings"] < self._settings.max_explained:
            self._tally.counts["explained findings"] += 1
            finding = self._explained(finding, pending, request, bad[np.argsort(-shares[bad])], at, allowed)
        self._tally.find(finding)

    def _explained(
        self, finding: EngineFinding, pending: JudgedCall, request: StepRows, order: Numbers, at: int, allowed: Budget
    ) -> EngineFinding:
        """Return the finding with what the pages lack, and a wrong reading that gives the same output, if one does.

        ``order``: the wrong rows, counted from that at ``at``, the worst first.
        """
        lacking = self._compare_pages(pending, [request], whole=True)
        if lacking is not None:
            notes = (finding.note, self._words_of_pages(pending, request, lacking))
            finding = replace(finding, note="; ".join(filter(None, notes)))
            if len(lacking):
                index = int(lacking[0]) // self._groups[pending.group].block_size
                finding = replace(finding, block_index=index, block_id=request.block_ids[pending.group][index])
        cause = cause_of(self._wrong_rows(pending, request, order, at, allowed, lacking), self._history)
        if cause is not None:
            finding = replace(finding, cause=cause.meaning)
            if cause.block_id is not None:
                finding = replace(finding, block_id=cause.block_id, block_index=cause.block_index)
        return finding

    def _wrong_rows(
        self,
        pending: JudgedCall,
        request: StepRows,
        order: Numbers,
        at: int,
        allowed: Budget,
        lacking: Numbers | None,
    ) -> WrongRows:
        facts = pending.facts

        def rows_of(numbers: Numbers) -> tuple[Tensor, Tensor]:
            kept = torch.from_numpy(numbers).to(pending.query.device)
            key, value = self.store.rows(facts.kv_sharing_target or pending.layer, kept)
            if facts.up_projections is not None:
                latent = CacheRows(key.double().reshape(len(key), 1, -1), value.double().reshape(len(value), 1, -1))
                return (
                    facts.up_projections.keys(latent.latent, latent.rotary),
                    facts.up_projections.values(latent.latent),
                )
            return (key, value) if facts.code is None else facts.code(key, value)

        some = torch.from_numpy(order).to(pending.query.device)
        return WrongRows(
            request=request,
            others=tuple(each for each in self._followed if each is not request),
            group=pending.group,
            block_size=self._groups[pending.group].block_size,
            params=facts.params,
            positions=request.position + order,
            query=pending.query[at + some],
            output=pending.output[at + some],
            budget=allowed.of_rows(some),
            rows_of=rows_of,
            lacking=lacking,
        )

    def _words_of_pages(self, pending: JudgedCall, request: StepRows, lacking: Numbers) -> str:
        if not len(lacking) and pending.facts.code is not None:
            return "the pages hold the codes that the layer itself writes: they are wrong codes, or are read wrongly"
        if not len(lacking):
            return "the pages hold the right keys and values, but are read wrongly or the attention is wrong"
        size = self._groups[pending.group].block_size
        table = request.block_ids[pending.group]
        by_block = groupby(lacking.tolist(), key=lambda position: position // size)
        parts = [_lacks(table[index], index, list(positions)) for index, positions in by_block]
        return "; ".join(parts[:3])

    # Pages.

    def _compare_pages(
        self, pending: JudgedCall, requests: Sequence[StepRows], *, whole: bool = False
    ) -> Numbers | None:
        """Compare pages of a layer that the rows of this step read; report and return the positions that they lack.

        These are the pages that the step wrote to, and one other page of each request, in turn; ``whole``: all pages.
        Return None if pages cannot be compared.
        """
        facts, cache = pending.facts, pending.kv_cache
        if facts.kv_sharing_target is not None:
            return None  # its pages are those of the other layer
        if facts.write is None or cache is None or cache.numel() == 0:
            late = "pages with async scheduling, whose steps are judged late"
            reason = late if cache is None else "pages that cannot be compared"
            self._tally.not_followed[reason] += len(requests)
            return None
        size = self._groups[pending.group].block_size
        spans = [self._span(pending, request, whole=whole) for request in requests]
        numbers = [request.keys_of(pending.group)[span] for request, span in zip(requests, spans, strict=True)]
        tables = [np.array(request.block_ids[pending.group], dtype=np.int64) for request in requests]
        slots = [table[span // size] * size + span % size for table, span in zip(tables, spans, strict=True)]
        key, value = self.store.rows(pending.layer, torch.from_numpy(np.concatenate(numbers)).to(cache.device))
        page_size = facts.page_size or size
        if not self._pages.fits(page_size, key, value, cache):
            self._tally.not_followed[f"pages that are smaller than {page_size} keys"] += len(requests)
            return None
        owners = np.repeat(np.arange(len(requests)), [len(span) for span in spans])
        kept = KeptKeys(owners, np.concatenate(spans), np.concatenate(slots), key, value)
        found, compared = self._pages.lacking(facts, page_size, kept, cache)
        self._tally.checks["write"] += compared
        for index in np.unique(owners[found]).tolist():
            self._find_lacking(pending, requests[index], kept.positions[found[owners[found] == index]])
        return kept.positions[found]

    def _span(self, pending: JudgedCall, request: StepRows, *, whole: bool) -> Numbers:
        """Return the positions of a request whose slots are compared."""
        size = self._groups[pending.group].block_size
        first, end = first_seen(pending.facts.params, request.position), request.position + request.num_rows
        written = max(first, request.position // size * size)
        if whole or written == first:
            return np.arange(first, end)
        turn = first // size + self._tally.steps % (written // size - first // size)
        before = np.arange(max(first, turn * size), min(written, (turn + 1) * size))
        return np.concatenate([before, np.arange(written, end)])

    def _find_lacking(self, pending: JudgedCall, request: StepRows, lacking: Numbers) -> None:
        """Report each block that lacks positions which were not reported before."""
        size = self._groups[pending.group].block_size
        for index, positions in groupby(lacking.tolist(), key=lambda position: position // size):
            block_id = request.block_ids[pending.group][index]
            reported = self._reported.setdefault((request.request_id, pending.layer, block_id), set())
            some = [position for position in positions if position not in reported]
            if some:
                reported.update(some)
                finding = EngineFinding(
                    kind="write",
                    step=self._tally.steps,
                    request_id=request.request_id,
                    position=some[0],
                    layer=pending.layer,
                    group=pending.group,
                    block_id=block_id,
                    block_index=index,
                    num_rows=len({position // (pending.facts.page_size or size) for position in some}),
                    note=_lacks(block_id, index, some),
                )
                self._tally.find(finding)


def _not_finite(output: Tensor) -> str:
    if bool(output.isnan().any()):
        return "the output is NaN"
    return "the output is infinite" if bool(output.isinf().any()) else ""


def _lacks(block_id: int, index: int, positions: Sequence[int]) -> str:
    return f"{block_in_words(block_id, index)} lacks {positions_in_words(positions)}"


def _latent_truth(
    facts: LayerFacts, query: Tensor, kept: tuple[Tensor, Tensor], ends: tuple[Tensor, Tensor]
) -> tuple[Budget, Tensor]:
    """Return the same as :meth:`Judge._truth` for a latent layer."""
    weights, dtype, params = facts.up_projections, query.dtype, facts.params
    assert weights is not None
    cached = CacheRows(*(each.double().reshape(len(each), 1, -1) for each in kept))
    keys, values = weights.keys(cached.latent, cached.rotary), weights.values(cached.latent)
    rows = UnpagedAttention(query.double(), keys, values, *ends)
    out, lse, weighted = rows.attend_weighted(params)
    absorbed = absorbed_rows(weights, cached, rows)
    latent = AttentionParams(
        params.num_heads, 1, absorbed.keys.shape[-1], absorbed.values.shape[-1], scale=params.softmax_scale
    )
    kernel = Precision.kernel(dtype)
    honest = latent_answers(weights, cached, rows, (params, latent), dtype, lambda some, how: some.attend(how, kernel))
    budget = budget_of(rows, params, dtype, out, lse, weighted, honest, ((absorbed, latent),), LATENT_ROUNDINGS)
    return budget, out


def _of_equal_settings(pending: Sequence[JudgedCall]) -> Iterable[list[JudgedCall]]:
    """Return the layers that can be judged as heads of one; each latent or coded layer is alone."""
    bundles: dict[object, list[JudgedCall]] = {}
    for each in pending:
        facts, params = each.facts, each.facts.params
        shape = replace(params, sinks=params.sinks and (0.0,) * params.num_heads, alibi_slopes=params.alibi_slopes)
        alone = each.layer if facts.up_projections is not None or facts.code is not None else None
        key = (each.group, shape, each.query.dtype, each.query.device, alone)
        bundles.setdefault(key, []).append(each)
    return bundles.values()


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


def _starts(requests: Sequence[StepRows]) -> Iterator[tuple[int, StepRows]]:
    """Yield the requests, each with the place of its first row among all of theirs."""
    at = 0
    for request in requests:
        yield at, request
        at += request.num_rows


def _ends(counts: Sequence[int]) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0)
