"""Keeps the keys and values of followed rows, and judges outputs and pages of a step."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attncheck.harness.engine.causes import RequestCall, WrongRows
from attncheck.harness.engine.events import CheckKind, LayerFacts, LayerRows, ObserverResult
from attncheck.harness.engine.history import (
    ZERO_ROW,
    EngineHistory,
    FollowedRequest,
    Numbers,
    block_in_words,
    first_seen,
    positions_in_words,
)
from attncheck.harness.engine.pages import lacking as lacking_keys
from attncheck.harness.truth.faults import LATENT_ROUNDINGS, CacheRows, absorbed_rows, latent_answers
from attncheck.harness.truth.unpaged import Budget, UnpagedAttention, budget_of, share_of_budget
from attncheck.reference import AttentionParams, Precision
from attncheck.reports.analysis.phrases import plural

# Truth and budget are those of attncheck's cases.

_JUDGED_BYTES = 2**27
"""Bytes of float64 keys and values that are judged at once."""

_UNSEEN = "layers whose keys were not seen"
"""Why a layer is not judged."""

_MOST_SCORES = {"cpu": 2**26, "cuda": 2**30}
"""Scores of rows and keys, in all heads and layers, that one step is judged with: about 10 s of one CPU core."""

_TOO_LONG = "rows that see too many keys to be judged within a step"  # the engine waits for the judge
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Judge:
    """Keeps keys and values of each layer by row number, and judges the followed rows of an engine step by step."""

    def __init__(self, history: EngineHistory, result: ObserverResult, max_explained: int) -> None:
        self._history, self._result, self._max_explained = history, result, max_explained
        known = ((layer, index) for index, group in enumerate(history.groups) for layer in group.layers)
        self._layers = {layer: (history.layers[layer], index) for layer, index in known if layer in history.layers}
        self._keys: dict[str, tuple[Tensor, Tensor]] = {}
        self._never_judged: dict[str, str] = {}

    def judge(self, followed: Sequence[FollowedRequest], layers: Sequence[LayerRows], *, is_judged: bool) -> None:
        """Keep the keys and values of a step, and in a judged step judge its outputs and pages.

        ``layers``: what each computes in the step; without query and output if the step is not judged.
        """
        if not followed:
            return
        num_rows = sum(len(request.step_tokens) for request in followed)
        judged: list[list[RequestCall]] = []
        for layer in dict.fromkeys([*(tensors.layer for tensors in layers), *self._layers]):
            own = [tensors for tensors in layers if tensors.layer == layer]
            why_not = self._why_not_judged(layer, own)
            if why_not is None:
                self._keep(own[0], followed)
            if is_judged and why_not is None:
                judged.append(self._calls(own[0], followed))
            elif is_judged:
                self._result.not_compared["output", str(why_not)] += num_rows * max(1, len(own))
        for calls in judged:
            self._compare_pages(calls)
        affordable = [call for calls in judged for call in self._affordable(calls, len(judged))]
        for together in _together(affordable):
            self._compare_outputs(together)

    def _why_not_judged(self, layer: str, calls: Sequence[LayerRows]) -> str | None:
        """Return why a layer is not judged in a step, or None. If some of its keys are not known, it never is again."""
        if layer not in self._layers:
            return "layers without a followed KV-cache group"
        facts, group = self._layers[layer]
        key_layer = facts.kv_sharing_target or layer
        incomplete = _why_incomplete(facts, calls)
        if incomplete is None and key_layer != layer and key_layer not in self._keys:
            incomplete = _UNSEEN
        if incomplete is not None and facts.row_size:
            self._never_judged.setdefault(layer, incomplete)
        not_followed = facts.not_judged or self._history.groups[group].not_followed
        return not_followed or incomplete or self._never_judged.get(key_layer)

    def _keep(self, tensors: LayerRows, followed: Sequence[FollowedRequest]) -> None:
        """Keep the keys and values of a step, if the layer has its own."""
        key, value, layer = tensors.key, tensors.value, tensors.layer
        if key is None or value is None or not self._layers[layer][0].row_size:
            return
        if layer not in self._keys:  # on a CPU, memory is taken only where it is written
            kept_key, kept_value = (each.new_empty(self._history.capacity, *each.shape[1:]) for each in (key, value))
            kept_key[ZERO_ROW], kept_value[ZERO_ROW] = 0, 0
            self._keys[layer] = kept_key, kept_value
        numbers = np.concatenate([request.numbers[0][request.done :] for request in followed])
        for kept, new in zip(self._keys[layer], (key, value), strict=True):
            kept[torch.from_numpy(numbers).to(new.device)] = torch.cat([new[each.step_rows] for each in followed])

    def _calls(self, tensors: LayerRows, followed: Sequence[FollowedRequest]) -> list[RequestCall]:
        facts, group = self._layers[tensors.layer]
        keys, size = self._keys[facts.kv_sharing_target or tensors.layer], self._history.groups[group].block_size
        return [RequestCall(tensors, facts, group, size, request, keys) for request in followed]

    # Outputs.

    def _affordable(self, calls: Sequence[RequestCall], num_layers: int) -> Iterator[RequestCall]:
        """Yield the calls of a layer that it is judged for, and count the rows of others."""
        left = _MOST_SCORES.get(calls[0].tensors.query.device.type, _MOST_SCORES["cuda"]) // num_layers
        for call in calls:
            num_rows = len(call.request.step_tokens)
            scores = call.facts.params.num_heads * num_rows * len(call.seen)
            if scores <= left:
                left -= scores
                yield call
            else:
                self._result.not_compared["output", _TOO_LONG] += num_rows

    def _compare_outputs(self, calls: Sequence[RequestCall]) -> None:
        """Compare the outputs of requests with the truth, in layers of equal settings."""
        size, counts = calls[0].facts.params.value_head_size, [len(call.request.step_tokens) for call in calls]
        query = torch.cat([call.tensors.query[call.request.step_rows] for call in calls])
        output = torch.cat([call.tensors.output[call.request.step_rows].flatten(1) for call in calls])
        output = output.double().unflatten(1, (-1, size))
        truth, budget = _truth(calls, query, counts)
        overflows = ~(truth.isfinite().all(dim=2) & budget.norm.isfinite()).all(dim=1)
        worst = share_of_budget(output - truth, budget).amax(dim=1).masked_fill(overflows, 0.0)
        self._result.checks["output"] += int((~overflows).sum())
        self._result.not_compared["output", "rows for which a good kernel overflows"] += int(overflows.sum())
        self._result.worst_share = max(self._result.worst_share, float(worst.max()))
        shares, end = worst.cpu().numpy(), 0
        for call, count in zip(calls, counts, strict=True):
            first, end = end, end + count
            own = shares[first:end]
            worst_first = np.argsort(-own)[: int((own > 1).sum())]
            if len(worst_first):
                rows = torch.from_numpy(first + worst_first).to(query.device)
                positions = call.request.done + worst_first
                of_rows = query[rows], output[rows], budget.of_rows(rows)
                self._find_output(WrongRows(call, self._history, positions, *of_rows), float(own.max()))

    def _find_output(self, wrong: WrongRows, share: float) -> None:
        """Report wrong rows, with what the pages lack and a wrong reading that gives the same output, if one does."""
        call, notes, cause, index = wrong.call, [_not_finite(wrong.output)], None, None
        is_sought = self._result.counts["explained findings"] < self._max_explained
        if is_sought:
            self._result.counts["explained findings"] += 1
            lacking = self._compare_pages([call], whole=True)
            cause, index = replace(wrong, lacking=lacking).cause() or (None, None)
            if lacking is not None:
                notes.append(_words_of_pages(call, lacking))
            if index is None and lacking is not None and len(lacking):
                index = int(lacking[0]) // call.block_size
        else:
            notes.append(f"its cause was not sought, only those of {plural(self._max_explained, 'finding')} before it")
        note = "; ".join(filter(None, notes))
        details = {"num_rows": len(wrong.positions), "budget_share": share, "cause": cause, "note": note}
        self._find("output", call, int(wrong.positions.min()), index, is_sought=is_sought, **details)

    def _find(self, kind: CheckKind, call: RequestCall, position: int, index: int | None, **more: Any) -> None:
        """Report what is wrong. ``index``: the number of the block in the request's table."""
        block_id = None if index is None else call.table[index]
        place = {"layer": call.tensors.layer, "group": call.group, "block_id": block_id, "block_index": index}
        self._result.find(kind, call.request.request_id, position, **place, **more)

    # Pages.

    def _compare_pages(self, calls: Sequence[RequestCall], *, whole: bool = False) -> Numbers | None:
        """Compare pages of a layer that the rows of this step read; report and return the positions that they lack.

        These are the pages that the step wrote to, and one other page of each request, in turn; ``whole``: all pages.
        Return None if pages cannot be compared.
        """
        facts, cache, page_size = calls[0].facts, calls[0].tensors.kv_cache, calls[0].page_size
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
            self._result.not_compared["write", str(why_not)] += len(calls)
            return None
        positions = [_compared(call, None if whole else self._result.steps) for call in calls]
        slots = np.concatenate([call.slots(own) for call, own in zip(calls, positions, strict=True)])
        numbers = np.concatenate([call.numbers[own] for call, own in zip(calls, positions, strict=True)])
        is_lacking = lacking_keys(facts.write, page_size, slots, calls[0].kept(numbers), cache)
        ends = np.cumsum([len(own) for own in positions])
        for call, own, lacks in zip(calls, positions, np.split(is_lacking, ends[:-1]), strict=True):
            self._result.checks["write"] += len(np.unique(own // page_size))
            self._find_lacking(call, own[lacks])
        lacking: Numbers = np.concatenate(positions)[is_lacking]
        return lacking

    def _find_lacking(self, call: RequestCall, positions: Numbers) -> None:
        """Report each block that lacks positions which were not reported before."""
        reported = call.request.reported
        for index, of_block in _by_block(positions, call.block_size):
            places = [(call.tensors.layer, call.table[index], position) for position in of_block]
            new = [place[-1] for place in places if place not in reported]
            reported.update(places)
            if new:
                pages = {position // call.page_size for position in new}
                self._find("write", call, new[0], index, num_rows=len(pages), note=_lacks(call, index, new))


def _truth(calls: Sequence[RequestCall], query: Tensor, counts: Sequence[int]) -> tuple[Tensor, Budget]:
    """Return the right output, float64 ``[T, H, Dv]``, and the budget around it. ``counts``: the rows of each call."""
    facts, dtype, seen = calls[0].facts, query.dtype, [call.seen for call in calls]
    params, weights, kernel = facts.params, facts.up_projections, Precision.kernel(dtype)
    by_call = [call.kept(numbers) for call, numbers in zip(calls, seen, strict=True)]
    kept = [torch.cat(parts) for parts in zip(*by_call, strict=True)]
    key, value = facts.attended(*kept)
    of_rows, of_keys = (torch.tensor([0, *sizes], device=query.device).cumsum(0) for sizes in (counts, map(len, seen)))
    rows = UnpagedAttention(query if weights is None else query.double(), key, value, of_rows, of_keys)
    out, lse, weighted = rows.attend_weighted(params)
    if weights is None:
        honest: list[tuple[Tensor, Tensor]] = []
        if facts.code is not None:  # kernels read codes exactly, or rounded to their dtype
            rounded = replace(rows, keys=key.to(dtype), values=value.to(dtype))
            honest = [each.attend(params, kernel) for each in (rows, rounded)]
        return out, budget_of(rows, params, dtype, out, lse, weighted, honest)
    cached = CacheRows(*(each.double().reshape(len(each), 1, -1) for each in kept))
    absorbed = absorbed_rows(weights, cached, rows)
    sizes = 1, absorbed.keys.shape[-1], absorbed.values.shape[-1]  # KV heads, and columns of keys and values
    latent = AttentionParams(params.num_heads, *sizes, scale=params.softmax_scale)
    runs = latent_answers(weights, cached, rows, (params, latent), dtype, lambda some, how: some.attend(how, kernel))
    return out, budget_of(rows, params, dtype, out, lse, weighted, runs, [(absorbed, latent)], LATENT_ROUNDINGS)


def _together(calls: Iterable[RequestCall]) -> Iterable[list[RequestCall]]:
    """Return the calls that are judged together: of layers with equal settings, and with ``_JUDGED_BYTES`` of keys."""
    together: dict[object, list[RequestCall]] = {}
    num_bytes: Counter[object] = Counter()  # of float64 keys, values and absolute values
    for call in calls:
        facts, params, query = call.facts, call.facts.params, call.tensors.query
        is_alone = facts.up_projections is not None or facts.code is not None
        settings = call.tensors.layer if is_alone else (params, query.dtype, query.device)
        num_bytes[settings] += (
            8 * params.num_kv_heads * (params.head_size + 2 * params.value_head_size) * len(call.seen)
        )
        together.setdefault((settings, num_bytes[settings] // _JUDGED_BYTES), []).append(call)
    return together.values()


def _why_incomplete(facts: LayerFacts, calls: Sequence[LayerRows]) -> str | None:
    """Return why the calls of a layer in a step do not have what is judged of all of its rows, or None."""
    if not calls:
        return "layers that are not called in each step, such as those of a drafter"
    if len(calls) > 1:
        return "layers that are called more than once in a step"
    tensors = calls[0]
    if tensors.is_part:
        return "layers that compute a part of the rows"
    if tensors.query.dtype not in _DTYPES or tensors.output.dtype not in _DTYPES:
        return f"queries of {tensors.query.dtype} with outputs of {tensors.output.dtype}"
    has_keys = tensors.key is not None and tensors.value is not None
    return _UNSEEN if facts.row_size and not has_keys else None


def _compared(call: RequestCall, step: int | None) -> Numbers:
    """Return the positions of a request whose keys are compared with pages; ``step``: which chooses the other page."""
    size, begin = call.block_size, call.request.done
    first = first_seen(call.facts.params, begin)
    positions = np.arange(first, call.request.step_end)
    num_other = begin // size - first // size
    if step is None or num_other <= 0:
        return positions
    turn = first // size + step % num_other
    seen: Numbers = positions[(positions // size == turn) | (positions // size >= begin // size)]
    return seen


def _not_finite(output: Tensor) -> str:
    if bool(output.isnan().any()):
        return "the output is NaN"
    return "the output is infinite" if bool(output.isinf().any()) else ""


def _words_of_pages(call: RequestCall, lacking: Numbers) -> str:
    """Return what the pages of a wrong output lack, or that they are right."""
    if not len(lacking) and call.facts.code is not None:
        return "the pages hold the codes that the layer itself writes: they are wrong codes, or are read wrongly"
    if not len(lacking):
        return "the pages hold the right keys and values, but are read wrongly or the attention is wrong"
    parts = [_lacks(call, index, positions) for index, positions in _by_block(lacking, call.block_size)]
    return "; ".join(parts[:3])


def _lacks(call: RequestCall, index: int, positions: Sequence[int]) -> str:
    return f"{block_in_words(call.table[index], index)} lacks {positions_in_words(positions)}"


def _by_block(positions: Numbers, size: int) -> Iterator[tuple[int, list[int]]]:
    for index, of_block in groupby(positions.tolist(), key=lambda position: position // size):
        yield index, list(of_block)
