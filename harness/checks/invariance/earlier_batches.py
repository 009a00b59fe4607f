"""Batches that a model runner may have passed to an impl and a builder before a case's own.

Each is derived from the case's requests, for the same layer and cache. Their outputs are not judged.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from attncheck.cases.consistency import implied_path
from attncheck.cases.model import Case
from attncheck.cases.outline import batch_of
from attncheck.reference.spec import AttentionType, BatchSpec, PaddingSpec, RequestSpec

_FIXED_ROWS = ("spec_decode", "tree", "fast_prefill")
_CUT_BATCHES = ("cascade", "split_kv", "dcp", "micro_batch")

_MANY_KEYS = 600
"""Keys of one request with few rows. Kernels split the keys of such a step among their thread blocks."""

_PROMPT, _CONTEXT = 64, 128
"""Tokens of the longest prompt, and of the longest context if there are many requests."""

Lengths = list[tuple[RequestSpec, int, int]]
"""(request, query length, context length): requests with replaced lengths."""


@dataclass(frozen=True)
class EarlierBatch:
    """A batch before a case's own. ``kind``: how it differs, in words."""

    kind: str
    case: Case

    @property
    def in_words(self) -> str:
        """The batch in words, for a message."""
        return f"{self.kind} ({batch_of(self.case.batch)})"


def alike(case: Case) -> EarlierBatch:
    """Return a batch of the same shape, with other pages and contexts one token shorter."""
    lengths = [(r, r.query_len, r.context_len - 1) for r in case.batch]
    return _of_lengths(case, "a batch of the same shape", lengths, padding=case.batch.padding)


def half(case: Case) -> EarlierBatch:
    """Return a batch of half the lengths, in reverse order."""
    lengths = [(r, _rows(case, -(-r.query_len // 2), r), r.context_len // 2) for r in case.batch]
    return _of_lengths(case, "a batch of half the lengths", lengths[::-1], encoder_factor=0.5)


def fewer(case: Case) -> EarlierBatch | None:
    """Return a batch of the last request alone, or None if there is no other."""
    lengths = [(r, r.query_len, r.context_len - 2) for r in case.batch][-1:]
    return None if case.batch.num_requests == 1 else _of_lengths(case, "a batch of fewer requests", lengths)


def decodes(case: Case) -> EarlierBatch | None:
    """Return a batch with one new token per request, or None if the case is one or its path fixes the rows."""
    if case.batch.max_query_len == 1 or _has_fixed_rows(case):
        return None
    return _of_lengths(case, "a batch of decodes", [(r, 1, r.context_len) for r in case.batch])


def longer(case: Case) -> EarlierBatch | None:
    """Return a batch with longer contexts, up to twice as long plus a page; for encoder layers, with more rows."""
    if case.layer.attn_type in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY):
        lengths = [(r, r.query_len + min(r.query_len, _PROMPT), 0) for r in case.batch]
    else:
        size = case.cache.block_size
        lengths = [(r, r.query_len, r.context_len + min(max(0, r.context_len), _PROMPT) + size) for r in case.batch]
    return _of_lengths(case, "a batch of longer requests", lengths, encoder_factor=2)


def more(case: Case) -> EarlierBatch | None:
    """Return a batch of twice as many requests plus one."""
    requests = [*case.batch, *reversed(list(case.batch)), *list(case.batch)[:1]]
    lengths = [(r, r.query_len, min(r.context_len - 1, _CONTEXT)) for r in requests]
    return _of_lengths(case, "a batch of more requests", lengths)


def prompts(case: Case) -> EarlierBatch | None:
    """Return a batch of prompts, or None if the case is one or its path fixes the rows."""
    if all(r.context_len <= 0 for r in case.batch) or _has_fixed_rows(case):
        return None
    fresh = [RequestSpec(query_len=max(1, min(r.total_len, _PROMPT)), encoder_len=r.encoder_len) for r in case.batch]
    lengths = [(r, r.query_len, 0) for r in fresh]
    return _of_lengths(case, "a batch of prompts", lengths)


def many_keys(case: Case) -> EarlierBatch | None:
    """Return a batch of one request with many keys and few rows.

    Return None if the layer has no cache, or if every request has more than ``_PROMPT`` rows.
    """
    request = min(case.batch, key=lambda r: r.query_len)
    if not case.layer.has_cache or request.query_len > _PROMPT:
        return None
    lengths = [(request, _rows(case, 1, request), _MANY_KEYS)]
    encoder_factor = _MANY_KEYS / max(1, request.encoder_len or 1)
    return _of_lengths(case, "a batch of one request with many keys", lengths, encoder_factor=encoder_factor)


LARGER: tuple[Callable[[Case], EarlierBatch | None], ...] = (longer, more, prompts, many_keys)
SMALLER: tuple[Callable[[Case], EarlierBatch | None], ...] = (alike, half, fewer, decodes)


def earlier_batches(case: Case) -> tuple[EarlierBatch, EarlierBatch]:
    """Return two earlier batches, one larger and one smaller. The case's hash selects them and their order."""
    number = int(case.hash, 16)
    large = [batch for make in LARGER if (batch := make(case)) is not None]
    small = [batch for make in SMALLER if (batch := make(case)) is not None]
    first, second = large[number % len(large)], small[number // 16 % len(small)]
    return (first, second) if number // 256 % 2 else (second, first)


def named_batches(case: Case) -> tuple[EarlierBatch, ...]:
    """Return the batches that the case itself names."""
    named = (f"after-{number}" for number in range(len(case.after)))
    return tuple(
        EarlierBatch("the batch", _with(case, name, batch)) for name, batch in zip(named, case.after, strict=True)
    )


def _has_fixed_rows(case: Case) -> bool:
    return case.batch.path.name in _FIXED_ROWS


def _rows(case: Case, query_len: int, request: RequestSpec) -> int:
    """Return ``query_len``, or the request's own if the path fixes it."""
    return request.query_len if _has_fixed_rows(case) else query_len


def _of_lengths(
    case: Case,
    kind: str,
    lengths: Lengths,
    *,
    padding: PaddingSpec = PaddingSpec(),  # noqa: B008 (frozen)
    encoder_factor: float = 1,
) -> EarlierBatch:
    """Return a batch of these requests without shared prefixes.

    A request with a context keeps at least one token of it. Paths that only cut a batch in parts are replaced by an
    ordinary step, as in a model runner.
    """
    requests = []
    for request, query_len, context_len in lengths:
        least = 1 if request.context_len > 0 else 0
        seq_len = query_len + max(least, context_len)
        encoder_len = None if request.encoder_len is None else int(request.encoder_len * encoder_factor)
        requests.append(RequestSpec(query_len=query_len, seq_len=seq_len, encoder_len=encoder_len))
    batch = replace(case.batch, requests=tuple(requests), padding=padding)
    return EarlierBatch(kind, _with(case, kind.removeprefix("a batch of ").replace(" ", "-"), batch))


def _with(case: Case, name: str, batch: BatchSpec) -> Case:
    path = implied_path(case.layer) if batch.path.name in _CUT_BATCHES else batch.path
    cache = replace(case.cache, num_blocks=None, first_block=None)
    return replace(case, id=f"{case.id}.{name}", batch=replace(batch, path=path), cache=cache, tolerance=None)
