"""Writes counted batches as a case file: a case with a weight for each, and a description of the recording."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from attncheck.cases.consistency import check_meaning, implied_path
from attncheck.cases.model import Case
from attncheck.cases.yaml_text import suite_yaml
from attncheck.errors import SpecError
from attncheck.harness.recording.traffic import BUCKETS_PER_OCTAVE, Batch, Counted, Traffic, iter_lengths
from attncheck.reference.spec import (
    BatchSpec,
    BlockTableSpec,
    CacheSpec,
    LayerSpec,
    PaddingSpec,
    PathSpec,
    RequestSpec,
    SpecDecodeOptions,
)

_SPARE_COLUMNS = 2
"""Columns that a case's block table has by default after those of the longest request."""


@dataclass(frozen=True)
class RecordedFile:
    """The text of a case file, and the number of its cases."""

    text: str
    cases: int


def recorded_file(name: str, traffic: Traffic, most_cases: int, about: str) -> RecordedFile:
    """Return the case file of the counted batches; ``about``: the origin of the recording, for the description.

    A distinct batch that no case can express is left out, and the description gives the reason.
    """
    widening, counted = traffic.counted(most_cases)
    left_out = dict(traffic.left_out)
    cases: list[Case] = []
    for each in counted[:most_cases]:
        found = _case(name, len(cases) + 1, each)
        if isinstance(found, Case):
            cases.append(found)
        else:
            left_out[found] = left_out.get(found, 0) + each.calls
    if beyond := sum(each.calls for each in counted[most_cases:]):
        left_out["beyond the maximum of cases"] = beyond
    calls = sum(each.calls for each in counted) + sum(traffic.left_out.values())
    description = " ".join([about, *_sentences(calls, len(cases), widening, left_out)])
    return RecordedFile(suite_yaml(name, description, cases) if cases else "", len(cases))


def _sentences(calls: int, cases: int, widening: int, left_out: dict[str, int]) -> Iterator[str]:
    per_octave = BUCKETS_PER_OCTAVE / 2**widening
    width = f"1/{per_octave:g} of an octave" if per_octave > 1 else f"{1 / per_octave:g} octaves"
    yield f"{calls} calls of forward, {cases} distinct batches; weight: how many calls a case represents."
    yield f"Lengths within {width.replace('1 octaves', 'an octave')} of each other count as the same;"
    yield "each case is one of the real batches that it counts."
    if left_out:
        reasons = "; ".join(f"{count} calls: {reason}" for reason, count in left_out.items())
        yield f"Not in this file: {reasons}."


def _case(suite: str, number: int, counted: Counted) -> Case | str:
    """Return the case of a distinct batch, or the reason why it has none."""
    layer, cache, batch = counted.kind.layer, counted.kind.cache, counted.batch
    if not batch.causal and layer.is_causal:
        layer = replace(layer, causal=False)
    reason = ""
    for path in _paths(layer, batch):
        try:
            spec = _batch_spec(layer, cache, batch, path)
            check_meaning(layer, cache, spec)
        except SpecError as error:
            reason = reason or f"{error.field}: {error.reason}"
            continue
        return Case(
            suite=suite,
            id=f"{_kind_of_step(batch)}-{number:03d}",
            layer=layer,
            cache=cache,
            batch=spec,
            weight=counted.calls,
            description=f"graph mode {batch.graph_mode}" if batch.graph_mode else "",
        )
    return reason


def _paths(layer: LayerSpec, batch: Batch) -> Iterator[PathSpec]:
    """Yield the paths by which a case could run the batch, the most specific first."""
    if batch.cascade:
        yield PathSpec(name="cascade")
    if batch.drafts:
        drafts = SpecDecodeOptions(num_speculative_tokens=batch.drafts)
        yield PathSpec(name="spec_decode", options=drafts)
    yield implied_path(layer)


def _kind_of_step(batch: Batch) -> str:
    if (batch.query_lens == 1).all():
        return "decode"
    if batch.drafts and (batch.query_lens <= 1 + batch.drafts).all():
        return "verify"
    return "mixed" if (batch.query_lens == 1).any() else "prefill"


def _batch_spec(layer: LayerSpec, cache: CacheSpec, batch: Batch, path: PathSpec) -> BatchSpec:
    """Return the batch for a case; equal neighbouring requests become one entry with a count.

    Raises:
        SpecError: no case can express the batch.
    """
    requests: list[RequestSpec] = []
    is_cascade = path.name == "cascade"
    for query, total, prefix in iter_lengths(batch):
        shared = batch.cascade if is_cascade else prefix
        request = RequestSpec(query_len=query, seq_len=total, shared_prefix=shared if layer.has_cache else 0)
        if requests and replace(requests[-1], count=1) == request:
            requests[-1] = replace(requests[-1], count=requests[-1].count + 1)
        else:
            requests.append(request)
    longest = -(-int(batch.seq_lens.max()) // cache.block_size)
    table = BlockTableSpec(
        extra_columns=max(0, batch.table_width - longest - _SPARE_COLUMNS),
        row_gap=max(0, batch.table_stride - batch.table_width),
        null_pages=batch.has_null_pages and (layer.sliding_window or layer.attn_chunk_size) is not None,
    )
    return BatchSpec(
        requests=tuple(requests),
        padding=PaddingSpec(requests=batch.padding_requests, tokens=batch.padding_tokens),
        block_table=table if layer.has_cache and not is_cascade else BlockTableSpec(),
        path=path,
    )
