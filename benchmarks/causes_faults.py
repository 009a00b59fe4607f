"""Wrong paged attention in plain torch: 16 pairs of known faults, and 44 faults that attncheck has no hypothesis for.

``FAULTS`` lists them. Each is also a backend class of this module: ``causes_faults.py:value_pages_exchanged``. A fault
changes one or two stages of :func:`attend`, which is right without them (``RIGHT``). Random choices are seeded.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attncheck import kernel_backend

Stage = Callable[["Step", Any], Any]
"""Changes the value of a stage for one request."""

_FEATURES = ("sliding_window", "logits_soft_cap", "alibi", "sinks", "non_causal", "lse")
UNWRITTEN = "never written"
"""Words that hold of no fault here: each writes all of the output."""
_AFTER_WEIGHTS = {"out", "values", "value_slots", "value_heads"}
"""Stages that leave the weights of the keys as they are."""
_PARTS = 3
"""Runs of keys that are computed apart and merged, if a fault changes partial results."""


@dataclass
class Step:
    """One request of a batch: rows ``start`` to ``start + rows - 1``, and ``n`` keys, the last ones of its rows.

    ``kept``: values that a fault keeps from one request of the batch to the next.
    """

    index: int
    start: int
    rows: int
    n: int
    page: int
    table: Tensor
    params: Any
    kept: dict[str, Any]

    @property
    def first(self) -> int:
        """Position of the first row."""
        return self.n - self.rows

    @property
    def positions(self) -> Tensor:
        """Positions of the rows, ``[rows, 1]``."""
        return self.first + torch.arange(self.rows)[:, None]


@dataclass(frozen=True)
class Fault:
    """A fault and the words that state it.

    ``truth``: what is wrong, in one line. ``right``: regular expressions of words that a right cause has, all of them;
    a cause with some of them is partly right. ``partly``: an expression of words of further causes that are partly
    right. ``untrue``: an expression of words that do not hold of this fault; if it is empty, words that hold of no
    fault here are used. ``cases``: two cases of ``smoke`` that show the fault.
    """

    name: str
    kind: str
    truth: str
    right: tuple[str, ...]
    partly: str = "$^"
    untrue: str = ""
    cases: tuple[str, ...] = ("decode.float16", "extend")
    stages: dict[str, Stage] = field(default_factory=dict)
    writer: Callable[..., object] | None = None

    def __post_init__(self) -> None:
        keeps_weights = self.writer is None and self.stages.keys() <= _AFTER_WEIGHTS
        words = self.untrue or "|".join((UNWRITTEN, "NaN", "Inf", *(["weigh too"] if keeps_weights else [])))
        object.__setattr__(self, "untrue", words)


def attend(stages: dict[str, Stage], query, key_cache, value_cache, metadata, params, out, output_lse=None) -> None:
    """Compute paged attention request by request in float32, with the changes of ``stages``."""
    starts = metadata.query_start_loc.tolist()
    table, page, kept = metadata.block_table_tensor, key_cache.shape[1], {"table": metadata.block_table_tensor}
    kept |= {"blocks": len(key_cache), "lens": metadata.seq_lens.tolist(), "requests": len(starts) - 1}
    for index, n in enumerate(kept["lens"][: len(starts) - 1]):
        start, rows = starts[index], starts[index + 1] - starts[index]
        if not rows:
            continue
        step = Step(index, start, rows, n, page, table[index].long(), params, kept)
        step.n = _changed(stages, "length", step, n)
        done, lse = _one(stages, step, query[start : start + rows].float(), key_cache, value_cache)
        out[start : start + rows] = done.to(out.dtype)
        if output_lse is not None:
            output_lse[start : start + rows] = lse
    for change in (stages[name] for name in stages if name == "finish"):
        change(kept, out)


def _changed(stages: dict[str, Stage], stage: str, step: Step, value: Any) -> Any:
    return stages[stage](step, value) if stage in stages else value


def _one(stages, step, query, key_cache, value_cache) -> tuple[Tensor, Tensor]:
    """Return the output ``[rows, H, D]`` and the LSE ``[rows, H]`` of one request."""
    params, keys_at = step.params, torch.arange(step.n)
    pages, offsets = step.table[keys_at // step.page], keys_at % step.page
    key_pages, key_offsets = _changed(stages, "key_slots", step, (pages, offsets))
    value_pages, value_offsets = _changed(stages, "value_slots", step, (pages, offsets))
    keys = _changed(stages, "keys", step, key_cache[key_pages, key_offsets].float())
    values = _changed(stages, "values", step, value_cache[value_pages, value_offsets].float())
    query = _changed(stages, "query", step, query)
    heads = torch.arange(params.num_heads) // params.group_size
    keys = keys[:, _changed(stages, "key_heads", step, heads)]
    values = values[:, _changed(stages, "value_heads", step, heads)]
    if "values_for_keys" in stages:
        keys = values
    scores = torch.einsum("rhd,nhd->rhn", query, keys) * _changed(stages, "scale", step, params.softmax_scale)
    if params.soft_cap:
        bent = params.soft_cap * torch.tanh(scores / params.soft_cap)
        scores = _changed(stages, "cap", step, scores) if "cap" in stages else bent
    apart = keys_at[None] - step.positions
    if params.alibi_slopes is not None:
        slopes = _changed(stages, "slopes", step, torch.tensor(params.alibi_slopes))
        scores = scores + slopes[:, None] * _changed(stages, "distance", step, apart)[:, None].float()
    scores = _changed(stages, "scores", step, scores)
    seen = torch.ones_like(apart, dtype=torch.bool)
    left, right = params.window
    left = _changed(stages, "window", step, left)
    seen = seen & (apart <= 0) if params.causal else seen
    seen = seen & (apart >= -left) if left >= 0 else seen
    seen = seen & (apart <= right) if right >= 0 else seen
    seen = _changed(stages, "seen", step, seen)
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    out, lse = _softmax(stages, step, scores, values)
    if params.sinks is not None:
        sinks = _changed(stages, "sinks", step, torch.tensor(params.sinks))
        total = torch.logaddexp(lse, sinks.expand_as(lse))
        out, lse = out * (lse - total).exp()[..., None], total
    lse = _changed(stages, "lse", step, lse)
    return _changed(stages, "out", step, out), lse


def _softmax(stages, step, scores, values) -> tuple[Tensor, Tensor]:
    if "partials" not in stages:
        return _part(stages, step, scores, values)
    size = max(1, -(-step.n // _PARTS))
    bounds = [(at, min(at + size, step.n)) for at in range(0, step.n, size)]
    parts = [_part(stages, step, scores[..., lo:hi], values[lo:hi]) for lo, hi in bounds]
    parts = stages["partials"](step, parts)
    lses = torch.stack([lse for _, lse in parts])
    weights = torch.softmax(lses.nan_to_num(neginf=-1e30), 0)
    merged = sum(part * weight[..., None] for (part, _), weight in zip(parts, weights, strict=True))
    return merged, torch.logsumexp(lses, 0)


def _part(stages, step, scores, values) -> tuple[Tensor, Tensor]:
    top = scores.amax(-1, keepdim=True)
    finite = torch.where(top == -math.inf, 0.0, top)
    exponentials = _changed(stages, "exponentials", step, torch.exp(scores - finite))
    total = _changed(stages, "total", step, exponentials.sum(-1))
    weights = _changed(stages, "weights", step, exponentials)
    out = _changed(stages, "summed", step, torch.einsum("rhn,nhd->rhd", weights, values))
    out = torch.where(total[..., None] > 0, out / total[..., None], 0.0)
    return out, finite[..., 0] + total.log()


# Faults that have a hypothesis. Each pair joins two of them. A row: name, fault, words of its cause, changes by stage.


def _query_of_the_row_before(_step: Step, query: Tensor) -> Tensor:
    return query.roll(1, 0)


def _halves(_step: Step, out: Tensor) -> Tensor:
    return out.roll(out.shape[-1] // 2, -1)


def _table_before(step: Step, slots: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    pages = step.kept["table"][max(step.index - 1, 0)].long()[torch.arange(step.n) // step.page]
    return pages.clamp(0, step.kept["blocks"] - 1), slots[1]


_KNOWN: dict[str, tuple[str, str, dict[str, Stage]]] = {
    "window": (
        "the window is one key too long",
        r"window.*(one key too long|ignored)|window begins (1|one) key too early",
        {"window": lambda _, left: left + 1 if left >= 0 else left},
    ),
    "cap": ("the soft cap is ignored", "soft.?cap.*ignored", {"cap": lambda _, scores: scores}),
    "sinks": ("the sinks are ignored", "sinks.*ignored", {"sinks": lambda _, sinks: sinks - math.inf}),
    "alibi": ("the ALiBi bias is missing", "alibi.*(missing|ignored)", {"slopes": lambda _, slopes: slopes * 0}),
    "scale": ("the scores are doubled", r"scores?.*(2|twice|doubled)|scale", {"scale": lambda _, scale: 2 * scale}),
    "last": (
        "the last key is missing",
        "(last|own|row itself).*missing",
        {"seen": lambda step, seen: seen & (torch.arange(step.n) < step.n - 1)},
    ),
    "first": (
        "the first key is missing",
        r"(first key|position 0).*missing",
        {"seen": lambda step, seen: seen & (torch.arange(step.n) > 0)},
    ),
    "tiled": (
        "query head h reads KV head h % num_kv_heads",
        "h % num_kv_heads|reads? KV head",
        {
            stage: lambda step, heads: torch.arange(len(heads)) % step.params.num_kv_heads
            for stage in ("key_heads", "value_heads")
        },
    ),
    "halves": ("the halves of the output's channels are exchanged", r"channels?.*exchanged|halves", {"out": _halves}),
    "table": (
        "the block table is that of the request before",
        "(block table|request).*before",
        {"key_slots": _table_before, "value_slots": _table_before},
    ),
    "query": (
        "the query of a row is that of the row before",
        "query of a row is that of the row before",
        {"query": _query_of_the_row_before},
    ),
    "factor": (
        "the output is multiplied by 1.5",
        r"times 1\.5|multiplied by 1\.5|factor",
        {"out": lambda _, out: out * 1.5},
    ),
    "keys": (
        "values are read instead of keys",
        "values.*instead of keys|exchanged",
        {"values_for_keys": lambda _, x: x},
    ),
    "top-left": (
        "the causal mask is aligned to the first key",
        "top.left|aligned to the first",
        {"seen": lambda step, _: torch.arange(step.n)[None] <= step.positions - step.first},
    ),
    "causal": (
        "the causal mask is missing",
        "causal mask is missing|later keys|hidden from their rows",
        {"seen": lambda _, seen: torch.ones_like(seen)},
    ),
}

_PAIRS = (
    ("window", "cap", "combined-sinks", "combined-alibi"),
    ("window", "sinks", "combined-sinks", "decode.float16"),
    ("cap", "alibi", "combined-alibi", "alibi"),
    ("window", "tiled", "window-extend", "window-decode"),
    ("sinks", "last", "sinks", "sinks-float16"),
    ("sinks", "scale", "sinks", "sinks-float16"),
    ("alibi", "first", "alibi", "alibi-float32"),
    ("alibi", "halves", "alibi", "alibi-float32"),
    ("scale", "last", "decode.float16", "groups.8"),
    ("tiled", "first", "decode.float16", "groups.8"),
    ("table", "last", "decode.float16", "extend"),
    ("causal", "halves", "extend", "groups.8"),
    ("top-left", "tiled", "extend", "groups.8"),
    ("query", "factor", "extend", "groups.8"),
    ("cap", "factor", "soft-cap.5.0", "soft-cap-float16"),
    ("keys", "query", "extend", "groups.8"),
)


def _pairs() -> Iterator[Fault]:
    for one, other, *cases in _PAIRS:
        (truth, words, stages), (also, more, others) = _KNOWN[one], _KNOWN[other]
        yield Fault(
            f"pair_{one}_{other}".replace("-", "_"),
            "pair",
            f"{truth}, and {also}",
            (words, more),
            cases=tuple(cases),
            stages=stages | others,
        )


# Indices: block table entries, heads, channels, positions.

_SEED = 38


def _random(*shape: int, below: int, salt: int) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(_SEED + salt))


def _shuffled(count: int, salt: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(_SEED + salt))


def _value_pages_exchanged(step: Step, slots):
    pages, offsets = slots
    at = torch.arange(step.n)
    moved = torch.where(at < 2 * step.page, at ^ step.page, at)
    return (pages, offsets) if step.n < 2 * step.page else (pages[moved], offsets)


def _second_page_plus_one(step: Step, slots):
    pages, offsets = slots
    is_second = torch.arange(step.n) // step.page == 1
    return torch.where(is_second, (pages + 1) % step.kept["blocks"], pages), offsets


def _first_page_of_the_next(step: Step, slots):
    pages, offsets = slots
    other = step.kept["table"][(step.index + 1) % step.kept["requests"], 0].long()
    return torch.where(torch.arange(step.n) < step.page, other, pages), offsets


def _offset_flipped_on_odd_pages(step: Step, slots):
    pages, offsets = slots
    at = torch.arange(step.n)
    is_odd = (at // step.page % 2 == 1) & ((at | 1) < step.n)
    return pages, torch.where(is_odd, offsets ^ 1, offsets)


def _last_page_backwards(step: Step, slots):
    pages, offsets = slots
    at = torch.arange(step.n)
    last = (step.n - 1) // step.page * step.page
    return pages, torch.where(at >= last, (step.n - 1 - at), offsets)


def _third_column_skipped(step: Step, slots):
    column = torch.arange(step.n) // step.page
    most = (step.n - 1) // step.page
    return step.table[torch.where((column >= 2) & (column < most), column + 1, column)], slots[1]


def _heads_two_and_five(_step: Step, query):
    order = torch.arange(query.shape[1])
    order[2], order[5] = 5, 2
    return query[:, order]


def _random_value_heads(step: Step, heads):
    wrong = _random(2, below=len(heads), salt=7)
    heads = heads.clone()
    heads[wrong] = (heads[wrong] + 1) % step.params.num_kv_heads
    return heads


def _key_head_of_the_last_in_group(step: Step, heads):
    is_last = torch.arange(len(heads)) % step.params.group_size == step.params.group_size - 1
    return torch.where(is_last, (heads + 1) % step.params.num_kv_heads, heads)


def _head_three_averaged(_step: Step, out):
    out = out.clone()
    out[:, 3] = (out[:, 3] + out[:, 4]) / 2
    return out


def _slopes_exchanged(_step: Step, slopes):
    slopes = slopes.clone()
    slopes[[1, 2]] = slopes[[2, 1]]
    return slopes


def _key_channels_exchanged(_step: Step, keys):
    keys = keys.clone()
    keys[..., [3, 40]] = keys[..., [40, 3]]
    return keys


def _value_channels_turned(_step: Step, values):
    values = values.clone()
    values[:, 1:] = values[:, 1:].roll(5, -1)
    return values


def _query_channels_negated(_step: Step, query):
    query = query.clone()
    query[..., 8:16] *= -1
    return query


def _random_channels_lost(_step: Step, query):
    query = query.clone()
    query[..., _shuffled(query.shape[-1], 3)[:5]] = 0
    return query


def _odd_value_channels_copied(_step: Step, values):
    values = values.clone()
    values[..., 49::2] = values[..., 48::2]
    return values


def _random_key_hidden(step: Step, seen):
    seen = seen.clone()
    hidden = (7 * torch.arange(step.rows) + 3) % step.n
    seen[torch.arange(step.rows), hidden] = False
    seen[torch.arange(step.rows), step.first + torch.arange(step.rows)] = True
    return seen


def _fifth_key_twice(_step: Step, scores):
    scores = scores.clone()
    scores[..., 4:5] += math.log(2)
    return scores


def _distance_one_more(_step: Step, apart):
    return apart - 1


def _every_third_row_ahead(step: Step, seen):
    at, key = step.positions, torch.arange(step.n)[None]
    return torch.where(torch.arange(step.rows)[:, None] % 3 == 2, key <= at + 1, seen)


def _second_page_seen(step: Step, seen):
    return seen | (torch.arange(step.n) // step.page == 1)[None]


# Order: of keys, pages, rows and strides.


def _second_request_backwards(step: Step, values):
    return values.flip(0) if step.index == 1 else values


def _value_stride(step: Step, slots):
    pages, offsets = slots
    whole = torch.arange(step.n) < step.n // step.page * step.page
    return pages, torch.where(whole, offsets * 3 % step.page, offsets)


def _query_interleaved(_step: Step, query):
    quarter = query.shape[-1] // 4
    return query.unflatten(-1, (4, quarter)).transpose(-1, -2).flatten(-2)


def _pages_last_to_first(step: Step, slots):
    count = -(-step.n // step.page)
    pages = step.table[:count].flip(0)[torch.arange(step.n) // step.page]
    return pages, slots[1]


# Dtype: one part rounded or approximated.


def _values_in_e4m3(_step: Step, values):
    return values.to(torch.float8_e4m3fn).float()


def _last_query_head_in_e5m2(_step: Step, query):
    query = query.clone()
    query[:, -1] = query[:, -1].to(torch.float8_e5m2).float()
    return query


def _weights_in_eight_bits(_step: Step, weights):
    return torch.round(weights * 255) / 255


def _slopes_in_e4m3(_step: Step, slopes):
    return slopes.to(torch.float8_e4m3fn).float()


def _softsign(step: Step, scores):
    cap = step.params.soft_cap
    return scores / (1 + scores.abs() / cap)


def _short_exponential(_step: Step, exponentials):
    powers = exponentials.clamp(min=1e-30).log2()
    whole = powers.floor()
    rest = powers - whole
    return torch.where(exponentials > 0, torch.exp2(whole) * (1 + rest), 0.0)


# Lengths.


def _six_at_a_time(step: Step, seen):
    at = torch.arange(step.n)[None]
    return seen & (at < max(step.n // 6 * 6, 1))


def _two_ahead_in_request_one(step: Step, seen):
    if step.index != 1:
        return seen
    return torch.arange(step.n)[None] <= (step.positions - 2).clamp(min=0)


def _hole_in_the_longest(step: Step, seen):
    if step.n != max(step.kept["lens"]):
        return seen
    at = torch.arange(step.n)
    return seen & ((at < step.n // 3) | (at >= step.n // 3 + 5))[None]


def _window_and_rows(step: Step, left):
    return left + step.rows + 1 if left >= 0 else left


# Partial results: stale, overwritten, merged by other numbers.


def _first_part_overwritten(_step: Step, parts):
    return [(parts[1][0], parts[0][1]), *parts[1:]] if len(parts) > 1 else parts


def _lse_of_the_request_before(step: Step, parts):
    own = parts[0][1]
    before = step.kept.get("lse")
    step.kept["lse"] = own
    if before is None:
        return parts
    stale = before[-1:].expand_as(own)
    return [(parts[0][0], torch.where(own == -math.inf, own, stale)), *parts[1:]]


def _head_of_its_neighbour(_step: Step, parts):
    if len(parts) < 2:
        return parts
    out = parts[1][0].clone()
    out[:, 0] = out[:, 1]
    return [parts[0], (out, parts[1][1]), *parts[2:]]


def _not_cleared(step: Step, out):
    before = step.kept.get("out")
    step.kept["out"] = out[-1]
    if before is None:
        return out
    out = out.clone()
    out[0] += 0.5 * before
    return out


def _second_row_stale(step: Step, out):
    before = step.kept.get("out")
    step.kept["out"] = out[-1]
    if before is None or step.rows == 1:
        return out
    out = out.clone()
    out[1] = before
    return out


def _sum_of_the_row_before(_step: Step, total):
    total = total.clone()
    total[1::2] = total[::2][: len(total[1::2])]
    return total


# Writers of the cache.


def _write(key, value, key_cache, value_cache, slot_mapping) -> None:
    live = slot_mapping >= 0
    slots = slot_mapping[live].long()
    for rows, cache in ((key, key_cache), (value, value_cache)):
        size = cache.shape[1]
        cache[slots // size, slots % size] = rows[: len(slot_mapping)][live].to(cache.dtype)


def _write_odd_slots_turned(key, value, key_cache, value_cache, slot_mapping) -> None:
    is_odd = (slot_mapping % 2 == 1)[:, None, None]
    key = key[: len(slot_mapping)]
    _write(torch.where(is_odd, key.roll(3, -1), key), value, key_cache, value_cache, slot_mapping)


def _write_every_fourth_lost(key, value, key_cache, value_cache, slot_mapping) -> None:
    at = torch.arange(len(slot_mapping))
    kept = torch.where(at % 4 == 3, torch.full_like(slot_mapping, -1), slot_mapping)
    _write(key, value, key_cache, value_cache, kept)


def _write_late_keys_negated(key, value, key_cache, value_cache, slot_mapping) -> None:
    late = (torch.arange(len(key)) >= 4)[:, None, None]
    _write(torch.where(late, -key, key), value, key_cache, value_cache, slot_mapping)


_PAGES = r"(page|block table|column|entr)"
_ALIBI, _SINKS, _CAP = ("alibi", "alibi-float32"), ("sinks", "sinks-float16"), ("soft-cap.5.0", "soft-cap-float16")
_ROWS, _WINDOW = ("extend", "verify"), ("window-extend", "window-decode")
_BOTH = ("key_slots", "value_slots")

_OTHERS = (
    Fault(
        "value_pages_exchanged",
        "index",
        "values of the first two pages are exchanged, keys are not",
        (rf"{_PAGES}.*values",),
        # Values in another order beside keys in theirs are the same as keys in another order beside values in theirs.
        partly="pages 0 and 1 of the block table are exchanged, for keys alone",
        stages={"value_slots": _value_pages_exchanged},
    ),
    Fault(
        "second_page_plus_one",
        "index",
        "entry 1 of the block table is read as the page number behind it",
        (rf"(entry|column|page) 1.*|second {_PAGES}",),
        partly=r"keys at positions (from )?16",
        stages=dict.fromkeys(_BOTH, _second_page_plus_one),
    ),
    Fault(
        "first_page_of_the_next",
        "index",
        "the first page is that of the next request",
        (r"first page.*(next|other) request",),
        partly="page.*of (the next|another) request",
        stages=dict.fromkeys(_BOTH, _first_page_of_the_next),
    ),
    Fault(
        "offset_flipped_on_odd_pages",
        "index",
        "offsets of values are XORed with 1 on every second page",
        (r"values.*(offset|slot)",),
        stages={"value_slots": _offset_flipped_on_odd_pages},
    ),
    Fault(
        "last_page_backwards",
        "index",
        "keys of the last page are read from its end to its start, values are not",
        (r"keys.*last page.*(revers|order)",),
        stages={"key_slots": _last_page_backwards},
    ),
    Fault(
        "third_column_skipped",
        "index",
        "from column 2 on, the block table is read one column too far",
        (r"column 2|block table.*(column|entry).*(far|late|skip)",),
        stages=dict.fromkeys(_BOTH, _third_column_skipped),
    ),
    Fault(
        "heads_two_and_five",
        "index",
        "the queries of heads 2 and 5 are exchanged",
        (r"head (2|5).*quer|quer.*head (2|5)",),
        partly="query of head .*only heads 2, 5",
        cases=("decode.float16", "groups.8"),
        stages={"query": _heads_two_and_five},
    ),
    Fault(
        "random_value_heads",
        "index",
        "two query heads read values of the next KV head, and keys of their own",
        (r"values.*KV head|KV head.*values",),
        cases=("decode.float16", "groups.8"),
        stages={"value_heads": _random_value_heads},
    ),
    Fault(
        "key_head_of_the_last_in_group",
        "index",
        "the last query head of each group reads keys of the next KV head",
        (r"keys.*KV head|KV head.*keys",),
        cases=("decode.float16", "groups.8"),
        stages={"key_heads": _key_head_of_the_last_in_group},
    ),
    Fault(
        "head_three_averaged",
        "index",
        "the output of head 3 is the mean of heads 3 and 4",
        (r"head 3.*(mean|average)",),
        cases=("decode.float16", "groups.8"),
        stages={"out": _head_three_averaged},
    ),
    Fault(
        "slopes_exchanged",
        "index",
        "the ALiBi slopes of heads 1 and 2 are exchanged",
        (r"slope.*(another|other|exchanged|head 1)",),
        cases=_ALIBI,
        stages={"slopes": _slopes_exchanged},
    ),
    Fault(
        "key_channels_exchanged",
        "index",
        "channels 3 and 40 of the keys are exchanged",
        (r"channels? (of )?.*\b3\b.*\b40\b",),
        partly="channels of query and key do not match$",
        stages={"keys": _key_channels_exchanged},
    ),
    Fault(
        "value_channels_turned",
        "index",
        "channels of values are turned by 5, except those of KV head 0",
        (r"channels?.*(5|turned|rotated)|channel \d+ holds channel",),
        stages={"values": _value_channels_turned},
    ),
    Fault(
        "query_channels_negated",
        "index",
        "channels 8 to 15 of the query have the wrong sign",
        (r"channels 8 to 15|sign",),
        stages={"query": _query_channels_negated},
    ),
    Fault(
        "random_channels_lost",
        "index",
        "five channels of the query do not count in the scores",
        (r"channels? .*(5|missing|lost)",),
        stages={"query": _random_channels_lost},
    ),
    Fault(
        "odd_value_channels_copied",
        "index",
        "from channel 48 on, odd channels of the output hold the channel before",
        (r"channel 49 holds channel 48",),
        stages={"values": _odd_value_channels_copied},
    ),
    Fault(
        "random_key_hidden",
        "index",
        "each row loses one key, at (7 i + 3) modulo the length",
        (r"one key of (each|every) row",),
        cases=("extend", "groups.8"),
        stages={"seen": _random_key_hidden},
    ),
    Fault(
        "fifth_key_twice",
        "index",
        "the key at position 4 counts twice",
        (r"(key|position) (at position )?4 .*twice",),
        partly="weighs? too much",
        stages={"scores": _fifth_key_twice},
    ),
    Fault(
        "distance_one_more",
        "index",
        "ALiBi's distance is one too large: the LSE is wrong, the output is right",
        (r"(ALiBi|bias).*(distance|position|point|counted)",),
        cases=_ALIBI,
        stages={"distance": _distance_one_more},
    ),
    Fault(
        "every_third_row_ahead",
        "index",
        "every third row of a request sees one key ahead",
        (r"third row|multiple of 3|modulo 3",),
        partly=r"key ahead|keys after the last visible one are seen, up to 1|1 key too late|next row",
        cases=_ROWS,
        stages={"seen": _every_third_row_ahead},
    ),
    Fault(
        "second_page_seen",
        "index",
        "rows see all keys of the second page, also those ahead of them",
        (r"second page|page 1\b|positions 16 to 31",),
        partly="ahead|hidden from their rows",
        cases=("chunked-prefill", "groups.8"),
        stages={"seen": _second_page_seen},
    ),
    Fault(
        "second_request_backwards",
        "order",
        "values of request 1 are read in reversed order",
        (r"values.*revers",),
        stages={"values": _second_request_backwards},
    ),
    Fault(
        "value_stride",
        "order",
        "values of whole pages are read with a stride of 3 slots",
        (r"values.*(stride|slot|order)",),
        stages={"value_slots": _value_stride},
    ),
    Fault(
        "query_interleaved",
        "order",
        "channels of the query are interleaved in four parts, those of keys are not",
        (r"channels of query and key do not match: .*(four|quarter)",),
        partly="channels of query and key do not match",
        stages={"query": _query_interleaved},
    ),
    Fault(
        "pages_last_to_first",
        "order",
        "pages are read from the last to the first",
        (r"pages.*(revers|last to (the )?first|backward)",),
        stages=dict.fromkeys(_BOTH, _pages_last_to_first),
    ),
    Fault(
        "values_in_e4m3",
        "dtype",
        "values are rounded to e4m3",
        (r"values.*(e4m3|fp8|float8)",),
        partly="precision is too low",
        cases=("decode.float16", "decode.float32"),
        stages={"values": _values_in_e4m3},
    ),
    Fault(
        "last_query_head_in_e5m2",
        "dtype",
        "the query of the last head is rounded to e5m2",
        (r"query.*(e5m2|float8)",),
        partly="precision is too low",
        cases=("decode.float16", "groups.8"),
        stages={"query": _last_query_head_in_e5m2},
    ),
    Fault(
        "weights_in_eight_bits",
        "dtype",
        "softmax weights are rounded to 255 steps",
        (r"weights.*(8|eight|bits|255)",),
        partly="precision is too low",
        cases=("decode.float16", "decode.float32"),
        stages={"weights": _weights_in_eight_bits},
    ),
    Fault(
        "slopes_in_e4m3",
        "dtype",
        "the slopes of ALiBi are rounded to e4m3",
        (r"slope.*(round|e4m3|float8|precision)",),
        partly="precision is too low|slope",
        cases=_ALIBI,
        stages={"slopes": _slopes_in_e4m3},
    ),
    Fault(
        "softsign",
        "dtype",
        "the soft cap bends by x / (1 + |x|) instead of tanh",
        (r"cap.*(tanh|softsign|x / )",),
        cases=_CAP,
        stages={"cap": _softsign},
    ),
    Fault(
        "short_exponential",
        "dtype",
        "exponentials are approximated by a straight line between powers of two",
        (r"exponential|exp2|powers? of two",),
        partly="precision is too low",
        cases=("decode.float16", "decode.float32"),
        stages={"exponentials": _short_exponential},
    ),
    Fault(
        "six_at_a_time",
        "length",
        "keys behind the last whole run of six are lost",
        (r"run of (6|six)|multiple of 6",),
        partly="keys? end|ends? .*early|last visible keys are missing, up to 4",
        stages={"seen": _six_at_a_time},
    ),
    Fault(
        "two_ahead_in_request_one",
        "length",
        "rows of request 1 do not see their own key and the one before",
        (r"request 1\b.*(2|two)|(2|two) (keys|of them).*request 1\b",),
        partly="(end|sees?|missing).*2 ",
        stages={"seen": _two_ahead_in_request_one},
    ),
    Fault(
        "hole_in_the_longest",
        "length",
        "the longest request loses five keys, a third of its length from the start",
        (r"(5|five) keys",),
        stages={"seen": _hole_in_the_longest},
    ),
    Fault(
        "window_and_rows",
        "length",
        "the window is longer by the rows of the request plus one",
        (r"window.*(too long|too early|longer)",),
        partly="window",
        cases=_WINDOW,
        stages={"window": _window_and_rows},
    ),
    Fault(
        "first_part_overwritten",
        "partials",
        "the second part's output overwrites that of the first",
        (r"(output|result) of part|overwrit",),
        stages={"partials": _first_part_overwritten},
    ),
    Fault(
        "lse_of_the_request_before",
        "partials",
        "the first of three parts is merged by the LSE of the request before",
        (r"(wrong weights|LSE).*(part|split|merge)|(part|split|merge).*(wrong weights|LSE)",),
        stages={"partials": _lse_of_the_request_before},
    ),
    Fault(
        "head_of_its_neighbour",
        "partials",
        "in the second of three parts, head 0 has the output of head 1",
        (r"part.*head 1|head 1.*part",),
        stages={"partials": _head_of_its_neighbour},
    ),
    Fault(
        "not_cleared",
        "partials",
        "half of the last row of the request before is added to the first row",
        (r"added|not cleared|accumulat",),
        stages={"out": _not_cleared},
    ),
    Fault(
        "second_row_stale",
        "partials",
        "the second row of a request holds the last row of the request before",
        (r"outputs are those of other rows|stale",),
        cases=_ROWS,
        stages={"out": _second_row_stale},
    ),
    Fault(
        "sum_of_the_row_before",
        "partials",
        "odd rows are divided by the sum of the row before",
        (r"(sum|denominator).*row before",),
        partly="sum of the weights",
        cases=_ROWS,
        stages={"total": _sum_of_the_row_before},
    ),
    Fault(
        "odd_slots_turned",
        "writer",
        "keys at odd slots are written with channels turned by 3",
        (r"odd slot.*channel|channel.*odd slot",),
        partly=r"channels of keys",
        cases=_ROWS,
        writer=_write_odd_slots_turned,
    ),
    Fault(
        "every_fourth_lost",
        "writer",
        "every fourth row of the step is not written",
        (r"(fourth|3 modulo 4|multiple of 4).*not written|not written.*(fourth|3 modulo 4)",),
        cases=_ROWS,
        untrue="$^",
        writer=_write_every_fourth_lost,
    ),
    Fault(
        "late_keys_negated",
        "writer",
        "from row 4 of the step on, keys are written with the wrong sign",
        (r"sign|negat",),
        cases=_ROWS,
        writer=_write_late_keys_negated,
    ),
)

FAULTS = (*_pairs(), *_OTHERS)


def _backend(name: str, stages: dict[str, Stage], writer: Callable[..., object] | None) -> type:
    def kernel(query, key_cache, value_cache, metadata, params, out, output_lse=None) -> None:
        attend(stages, query, key_cache, value_cache, metadata, params, out, output_lse)

    layouts = ("NHD", "HND")
    return kernel_backend(kernel, name=name, features=_FEATURES, writer=writer or _write, supported_layouts=layouts)


RIGHT = _backend("right", {}, None)
globals().update({fault.name: _backend(fault.name, fault.stages, fault.writer) for fault in FAULTS})
