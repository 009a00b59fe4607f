"""Where vLLM's utilities depart from the reference: each row predicts vLLM's answer, and is verified by every run."""

from collections.abc import Callable
from copy import copy
from dataclasses import MISSING, fields, make_dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from attncheck.harness.providers.provider import ABSENT, Departure, Departures
from attncheck.reference import CommonAttentionMetadata, PerLayerParameters, UBatchSlice

# Changes turn the reference's object into one that answers as vLLM does. Most of them follow one of four forms.

Change = Callable[[Any], Any]


def _answers(answer: Callable[..., Any]) -> Change:
    """Return a change to a function that answers by ``answer`` alone."""
    return lambda _: answer


def _then(change: Callable[..., Any]) -> Change:
    """Return a change to a function that returns ``change(its result, arguments)``."""

    def changed(target: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *positional, **named: change(target(*positional, **named), *positional, **named)

    return changed


def _then_each_piece(change: Callable[[CommonAttentionMetadata, CommonAttentionMetadata], Any]) -> Change:
    """Return a change to a function that returns ``change(piece, batch)`` for every micro-batch that it makes."""

    def of_all(made: Any, *positional: Any, **named: Any) -> Any:
        given = (*positional, *named.values())
        batch = next(value for value in given if isinstance(value, CommonAttentionMetadata))
        return [change(piece, batch) for piece in made] if isinstance(made, list) else change(made, batch)

    return _then(of_all)


def _then_threshold(change: Callable[[Any, Any, bool], None]) -> Change:
    """Return a change to a builder that calls ``change(builder, threshold, as_decode)`` after its threshold is set."""

    def changed(target: type[Any]) -> type[Any]:
        class Builder(target):  # type: ignore[misc]
            def _init_reorder_batch_threshold(self, threshold: Any = 1, as_decode: bool = False) -> None:
                super()._init_reorder_batch_threshold(threshold, as_decode)
                change(self, threshold, as_decode)

        return Builder

    return changed


# The contract: the common metadata, the builder's base, the protocol of fast prefill.


def _without_host_fields(target: type[CommonAttentionMetadata]) -> type[Any]:
    gone = ("seq_lens_cpu", "num_computed_tokens_cpu")
    kept = [(each.name, Any, each) for each in fields(target) if each.name not in gone and each.default is MISSING]
    optional = [(each.name, Any, each.default) for each in fields(target) if each.default is not MISSING]
    return make_dataclass("CommonAttentionMetadata", [*kept, *optional, ("seq_lens_cpu_upper_bound", Any, None)])


def _without_cascade(target: type[Any]) -> type[Any]:
    def absent(_: Any) -> Any:
        raise AttributeError("use_cascade_attention")

    return type("Builder", (target,), {"use_cascade_attention": property(absent)})


def _single_token_under_dcp(builder: Any, _threshold: Any, _as_decode: bool) -> None:
    if builder.vllm_config.parallel_config.decode_context_parallel_size > 1:
        builder.reorder_batch_threshold = 1


def _wide_for_parallel_drafting(builder: Any, threshold: Any, as_decode: bool) -> None:
    drafts = builder.vllm_config.speculative_config.num_speculative_tokens
    if as_decode and threshold is not None and drafts is not None:
        builder.reorder_batch_threshold = max(threshold, 1 + 2 * drafts)


@runtime_checkable
class _FastPrefillWithDefaults(Protocol):
    logits_indices_padded: Any = None
    num_logits_indices: Any = None


# The cuts of a batch.


def _cut_anywhere(ubatch_slice: UBatchSlice, attn_metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """Return the micro-batch of a cut whose tokens and requests may end in different places."""
    cut, batch = ubatch_slice, attn_metadata
    requests, tokens = cut.request_slice, cut.token_slice
    if cut.is_empty():
        raise ValueError("an empty slice")
    starts = batch.query_start_loc_cpu[requests.start : requests.stop + 1].clamp(tokens.start, tokens.stop)
    hidden = (batch.query_start_loc_cpu[requests.stop] - tokens.stop).clamp(min=0)
    lens = batch.seq_lens_cpu[requests].clone()
    lens[-1] -= hidden
    new = starts.diff()
    return CommonAttentionMetadata(
        query_start_loc=(starts - tokens.start).to(batch.query_start_loc.device, copy=True),
        query_start_loc_cpu=starts - tokens.start,
        seq_lens=lens.to(batch.seq_lens.device, copy=True),
        seq_lens_cpu=lens,
        num_computed_tokens_cpu=lens - new,
        num_reqs=len(new),
        num_actual_tokens=cut.num_tokens,
        max_query_len=int(new.max()),
        max_seq_len=int(lens.max()),
        block_table_tensor=batch.block_table_tensor[requests],
        slot_mapping=batch.slot_mapping[tokens],
        causal=batch.causal,
    )


def _clipped_starts(query_start_loc: torch.Tensor, request_slice: slice) -> torch.Tensor:
    return query_start_loc[request_slice.start : request_slice.stop + 1] - query_start_loc[request_slice.start]


def _all_cut_anywhere(
    ubatch_slices: list[UBatchSlice], common_attn_metadata: CommonAttentionMetadata
) -> list[CommonAttentionMetadata]:
    return [_cut_anywhere(cut, common_attn_metadata) for cut in ubatch_slices]


def _numpy_end(made: tuple[list[UBatchSlice], Any], **_: Any) -> Any:
    pieces, padded = made
    last = pieces[-1]
    tokens = slice(last.token_slice.start, np.int32(last.token_slice.stop))
    return [*pieces[:-1], UBatchSlice(last.request_slice, tokens)], padded


# The order of a batch.


def _tensor_counts(counts: tuple[int, ...], common_attn_metadata: CommonAttentionMetadata, **_: Any) -> tuple[Any, ...]:
    if not counts[2]:
        return tuple(counts)
    dtype = common_attn_metadata.query_start_loc_cpu.dtype
    return (*counts[:4], *(torch.tensor(count, dtype=dtype) for count in counts[4:]))


def _four_regions(input_batch: Any, scheduler_output: Any, decode_threshold: int = 1) -> bool:
    counts = [scheduler_output.num_scheduled_tokens[name] for name in input_batch.req_ids]
    regions = [
        3 if computed == 0 else 2 if count > decode_threshold else int(computed < prompt)
        for count, computed, prompt in zip(
            counts, input_batch.num_computed_tokens_cpu, input_batch.num_prompt_tokens, strict=True
        )
    ]
    gaps = [place for place, wanted in enumerate(sorted(regions)) if regions[place] != wanted]
    order = list(range(len(regions)))
    for gap, moved in zip(gaps, sorted(gaps, key=regions.__getitem__), strict=True):
        order[gap] = moved
    input_batch.req_ids[:] = [input_batch.req_ids[place] for place in order]
    for numbers in (input_batch.num_computed_tokens_cpu, input_batch.num_prompt_tokens):
        numbers[:] = numbers[order]
    return bool(gaps)


# Batches rewritten for an execution path, and launch arguments of kernels.


def _chunks_without_check(attn_chunk_size: int, common_attn_metadata: CommonAttentionMetadata, block_size: int) -> Any:
    """Return the virtual batch of requests of any lengths.

    No chunk is empty, and pages before the first one are counted from the right end of the table.
    """
    batch, pages = common_attn_metadata, attn_chunk_size // block_size
    new, keys, rows = [], [], []
    lens = zip(batch.query_start_loc_cpu.diff().tolist(), batch.seq_lens_cpu.tolist(), strict=True)
    for table, (q, s) in zip(batch.block_table_tensor, lens, strict=True):
        first = min(q, attn_chunk_size - (s - q) % attn_chunk_size)
        later = q - first
        parts = [first, *(min(attn_chunk_size, later - done) for done in range(0, later, attn_chunk_size))]
        last = (s - 1) % attn_chunk_size + 1
        new += parts
        keys += [attn_chunk_size] * (len(parts) - 1) + [last]
        for behind in reversed(range(len(parts))):
            page = (s - last - behind * attn_chunk_size) // block_size
            rows.append(table[[min(page + step, len(table) - 1) for step in range(pages)]])
    lengths = torch.tensor(keys, dtype=torch.int32)
    queries = torch.tensor(new, dtype=torch.int32)
    starts = torch.tensor([0, *accumulate(new)], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(batch.query_start_loc.device, copy=True),
        query_start_loc_cpu=starts,
        seq_lens=lengths.to(batch.query_start_loc.device, copy=True),
        seq_lens_cpu=lengths,
        num_computed_tokens_cpu=lengths - queries,
        num_reqs=len(keys),
        num_actual_tokens=batch.num_actual_tokens,
        max_query_len=max(new),
        max_seq_len=max(keys),
        block_table_tensor=torch.stack(rows),
        slot_mapping=batch.slot_mapping,
    )


def _numpy_maximum(made: CommonAttentionMetadata, **_: Any) -> CommonAttentionMetadata:
    longest: Any = np.int32(made.max_query_len)
    return replace(made, max_query_len=longest)


def _any_indices(common_attn_metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """Return the batch with as many query rows of each request as it has indices, whichever these are."""
    batch = common_attn_metadata
    indices, count = batch.logits_indices_padded, batch.num_logits_indices
    assert indices is not None
    assert count is not None
    spans = list(pairwise(batch.query_start_loc_cpu.tolist()))
    wanted = [sum(first <= index < stop for index in indices[:count].tolist()) for first, stop in spans]
    offsets = torch.tensor([0, *accumulate(wanted)], dtype=batch.query_start_loc.dtype)
    return replace(
        batch,
        query_start_loc=offsets.to(batch.query_start_loc.device, copy=True),
        query_start_loc_cpu=offsets,
        num_computed_tokens_cpu=batch.seq_lens_cpu - offsets.diff(),
        num_actual_tokens=count,
        max_query_len=max(wanted),
        logits_indices_padded=None,
        num_logits_indices=None,
    )


def _unarmed_backend(prefix: str, underlying_attn_backend: type[Any]) -> type[Any]:
    underlying: Any = underlying_attn_backend.get_builder_cls()

    class Builder(underlying):  # type: ignore[misc]
        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            built = copy(super().build(common_prefix_len, common_attn_metadata, fast_build))
            built.logits_indices_padded = common_attn_metadata.logits_indices_padded
            built.num_logits_indices = common_attn_metadata.num_logits_indices
            return built

    name = f"{prefix}{underlying_attn_backend.__name__}"
    return type(name, (underlying_attn_backend,), {"get_builder_cls": staticmethod(lambda: Builder)})


def _accepting_decreasing_starts(target: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Return a function that counts decreasing start locations as requests without tokens, and none as no request."""
    return lambda query_start_loc_p: target(
        query_start_loc_p.cummax(0).values if len(query_start_loc_p) else query_start_loc_p.new_zeros(1)
    )


def _any_rank(seq_lens: Tensor, dcp_size: int, dcp_rank: Any, cp_kv_cache_interleave_size: int) -> Tensor:
    stripe = cp_kv_cache_interleave_size
    rank = torch.arange(dcp_size) if dcp_rank is None else dcp_rank
    lens = seq_lens.unsqueeze(-1) if dcp_rank is None else seq_lens
    whole = lens.div(stripe * dcp_size, rounding_mode="floor") * stripe
    return (whole + (lens - whole * dcp_size - rank * stripe).clamp(0, stripe)).to(torch.int32)


# Layers, and the classes derived for them.


def _skip_unknown(target: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    def parameters(vllm_config: Any, layer_names: list[str], cls_: type[Any]) -> dict[str, Any]:
        there = vllm_config.compilation_config.static_forward_context
        return target(vllm_config, [name for name in layer_names if name in there], cls_)

    return parameters


def _write_into_first(
    verdicts: PerLayerParameters, per_layer_params: dict[str, PerLayerParameters]
) -> PerLayerParameters:
    first = next(iter(per_layer_params.values()))
    first.has_same_window_lefts = verdicts.has_same_window_lefts
    first.has_same_all_params = verdicts.has_same_all_params
    return first


def _unbound_builder(made: Any, _prefix: str, _backend: type[Any], builder_cls: type[Any]) -> type[Any]:
    made.get_builder_cls = lambda: builder_cls
    return made  # type: ignore[no-any-return]


# Differences of form, which an adapter hides from the answers.


def _lacks_cudagraph_support(builder: type[Any]) -> bool:
    return not hasattr(builder, "cudagraph_support")


def _returns_a_pair(function: Any) -> bool:
    return "tuple" in str(function.__annotations__.get("return"))


def _wants_the_largest_count(function: Any) -> bool:
    """Return whether a batch with logits indices, but without ``max_logits_per_req``, is refused."""
    starts = torch.tensor([0, 3], dtype=torch.int32)
    lens = torch.tensor([5], dtype=torch.int32)
    batch = SimpleNamespace(
        max_query_len=3,
        logits_indices_padded=torch.tensor([2]),
        num_logits_indices=1,
        num_reqs=1,
        query_start_loc=starts,
        seq_lens=lens,
        max_logits_per_req=None,
    )
    try:
        function(batch)
    except AssertionError:
        return True
    except AttributeError:  # it went on to a field that this batch lacks
        return False
    return False


def _skips_plain_layers(function: Any) -> bool:
    """Return whether a layer with an ``impl``, but without vLLM's base class, is ignored."""
    layers = {"layer": SimpleNamespace(impl=SimpleNamespace(scale=1.0))}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    return not function(config, ["layer"], SimpleNamespace)


# The rows: what vLLM does, the change that predicts its answers, and the tag of the questions that show it (none: all).

_NO_CHECK = "takes without a check what the reference refuses: "
_ONE_STORAGE = "host and device tensors share storage where the device is the host; the reference keeps them apart"
_LAYOUTS = "layouts are resolved once in the engine, over six of them, and recorded in the cache config"
_BY_HAND = "fast prefill makes its metadata class by hand"


_drift, _judgement = partial(Departure, "drift"), partial(Departure, "judgement")


def _of_micro_batches(cut: Callable[..., Any]) -> tuple[Departure, ...]:
    """Return the departures of a function that makes micro-batches; ``cut``: what it does without a check."""
    return (
        _judgement(_NO_CHECK + "a cut whose tokens and requests end in different places", _answers(cut), "wrong end"),
        _judgement(
            "turns a batch that is not causal into causal micro-batches; the reference keeps it as it is",
            _then_each_piece(lambda piece, _: replace(piece, causal=True)),
            "not causal",
        ),
        _drift(
            "max_seq_len is never below the whole batch's: an upper bound",
            _then_each_piece(
                lambda piece, batch: replace(piece, max_seq_len=max(piece.max_seq_len, batch.max_seq_len))
            ),
        ),
    )


DEPARTURES = Departures(
    version="0.32.0",
    known={
        "CommonAttentionMetadata": (
            _drift(
                "has no seq_lens_cpu and no num_computed_tokens_cpu: an optional seq_lens_cpu_upper_bound and a method "
                "that derives the computed tokens replace them, and the fields behind them move up, so that it "
                "cannot be made by position as before",
                _without_host_fields,
            ),
        ),
        "AttentionMetadataBuilder": (
            _drift(
                "has no cudagraph_support: the attribute became private and is read through "
                "get_cudagraph_support(config, spec)",
                shows=_lacks_cudagraph_support,
            ),
            _drift(
                "has no use_cascade_attention: prefixes are no longer shared by cascade",
                _without_cascade,
                "use_cascade_attention",
            ),
            _drift(
                "the threshold is forced to 1, even from None, under decode context parallelism unless a third "
                "argument declares that the backend copes",
                _then_threshold(_single_token_under_dcp),
                "context parallelism",
            ),
            _drift(
                "reads the config's parallel part whatever the arguments, where the reference leaves the config alone",
                _then_threshold(lambda builder, *_: builder.vllm_config.parallel_config),
                "config not needed",
            ),
            _drift(
                "the threshold grows to 1 + 2k for k tokens drafted in parallel on the older model runner",
                _then_threshold(_wide_for_parallel_drafting),
                "parallel drafting",
            ),
        ),
        "KVSharingFastPrefillMetadata": (
            _drift(
                "gives both attributes a default of None, so that derived classes always have them",
                lambda _: _FastPrefillWithDefaults,
                "derived",
            ),
        ),
        "slice_query_start_locs": (
            _judgement(
                "clips a slice that ends beyond the batch and returns fewer entries; the reference refuses it",
                _answers(_clipped_starts),
                "beyond the batch",
            ),
        ),
        "_make_metadata_with_slice": _of_micro_batches(_cut_anywhere),
        "split_attn_metadata": _of_micro_batches(_all_cut_anywhere),
        "split_decodes_and_prefills": (
            _judgement(
                _NO_CHECK + "a negative threshold",
                _answers(
                    lambda common_attn_metadata, **_: (
                        0,
                        common_attn_metadata.num_reqs,
                        0,
                        common_attn_metadata.num_actual_tokens,
                    )
                ),
                "malformed",
            ),
        ),
        "split_decodes_prefills_and_extends": (
            _judgement(
                "returns the tokens of extends and of first chunks as tensors where there are first chunks",
                _then(_tensor_counts),
                "first chunks",
            ),
            _judgement(
                "counts no request and no token where all are decodes and max_query_len is a bound above the threshold",
                _answers(lambda **_: (0,) * 6),
                "decodes alone",
            ),
        ),
        "reorder_batch_to_split_decodes_and_prefills": (
            _drift(
                "makes four regions (decodes, short extends, long extends, first chunks): a request with no computed "
                "token goes last, however short; those in a wrong region fill the gaps in the order of the regions",
                _answers(_four_regions),
            ),
        ),
        "make_local_attention_virtual_batches": (
            _drift(
                "returns a pair: the metadata, and a function from block tables to virtual ones; the first is compared",
                shows=_returns_a_pair,
            ),
            _judgement(
                "gives a padding request a whole chunk of keys, whose pages are counted from the right end of the "
                "table (an IndexError where the table is narrower than a chunk); the reference gives it no key",
                _answers(_chunks_without_check),
                "padding requests",
            ),
            _judgement("max_query_len is an integer of numpy's", _then(_numpy_maximum)),
            _judgement(
                _ONE_STORAGE,
                _then(
                    lambda made, **_: replace(
                        made, query_start_loc=made.query_start_loc_cpu, seq_lens=made.seq_lens_cpu
                    )
                ),
                "storage",
            ),
            _judgement(_NO_CHECK + "more new tokens than tokens", _answers(_chunks_without_check), "malformed"),
        ),
        "make_kv_sharing_fast_prefill_common_attn_metadata": (
            _drift(
                "reads the largest count of a request from a further field, max_logits_per_req, which must be set",
                shows=_wants_the_largest_count,
            ),
            _drift(
                "returns a batch without logits indices as it is; the reference refuses it",
                _answers(lambda common_attn_metadata: common_attn_metadata),
                "not armed",
            ),
            _judgement(
                "computes another attention for indices that are unsorted, repeated or not the last tokens of their "
                "request; the reference refuses them",
                _answers(_any_indices),
                "indices that are no tail",
            ),
            _judgement(
                _ONE_STORAGE, _then(lambda made, *_: replace(made, query_start_loc=made.query_start_loc_cpu)), "storage"
            ),
        ),
        "create_fast_prefill_custom_backend": (
            _drift(
                "builds from a batch without logits indices, too; the reference refuses it",
                _answers(_unarmed_backend),
                "not armed",
            ),
        ),
        "maybe_create_ubatch_slices": (
            _judgement("the end of the last micro-batch is an integer of numpy's", _then(_numpy_end), "cut"),
        ),
        "compute_causal_conv1d_metadata": (
            _drift(
                "takes the start locations on the host, and the device of the results by keyword",
                parameters=(
                    ("parameters.query_start_loc_p", ABSENT),
                    ("parameters.query_start_loc_p_cpu", "parameter 1, required"),
                    ("parameters.device", "parameter 2, required, by keyword only"),
                ),
            ),
            _judgement(
                _NO_CHECK + "start locations that decrease a little, or none at all",
                _accepting_decreasing_starts,
                "malformed",
            ),
        ),
        "get_dcp_local_seq_lens": (
            _judgement(_NO_CHECK + "a rank outside the world, a negative length", _answers(_any_rank), "malformed"),
        ),
        "get_per_layer_parameters": (
            _drift(
                "recognises attention layers by their base class, and looks for the implementation among an "
                "impl's variants",
                shows=_skips_plain_layers,
            ),
            _judgement("skips a name that no layer has; the reference refuses it", _skip_unknown, "an unknown layer"),
        ),
        "infer_global_hyperparameters": (
            _judgement(
                "writes its verdicts into the caller's first entry and returns that; the reference returns a new "
                "object",
                _then(_write_into_first),
            ),
        ),
        "subclass_attention_backend": (
            _judgement(
                "get_builder_cls of the new class fails on an instance; the reference makes it static",
                _then(_unbound_builder),
            ),
        ),
    },
    gone=(
        ("v0.*", "the first generation was removed"),
        ("KVCacheLayoutType", _LAYOUTS),
        ("*_kv_cache_layout", _LAYOUTS),
        ("subclass_attention_metadata", _BY_HAND),
        ("KV_SHARING_FAST_PREFILL_METADATA_FIELDS", _BY_HAND),
    ),
)
