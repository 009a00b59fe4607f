"""Departures of vLLM's utilities from the reference, by subject."""

from collections.abc import Callable
from copy import copy
from dataclasses import MISSING, fields, make_dataclass, replace
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from attncheck.reference import CommonAttentionMetadata, PerLayerParameters, UBatchSlice

# Departures of vLLM's classes: the common metadata, the builder's base, the protocol of fast prefill.


def drop_host_fields(target: type[CommonAttentionMetadata]) -> type[Any]:
    """Return the dataclass with an upper bound of the lengths instead of two fields on the host."""
    gone = ("seq_lens_cpu", "num_computed_tokens_cpu")
    kept = [(each.name, Any, each) for each in fields(target) if each.name not in gone and each.default is MISSING]
    optional = [(each.name, Any, each.default) for each in fields(target) if each.default is not MISSING]
    return make_dataclass("CommonAttentionMetadata", [*kept, *optional, ("seq_lens_cpu_upper_bound", Any, None)])


def _with_threshold(target: type[Any], change: Callable[[Any], None]) -> type[Any]:
    class Builder(target):  # type: ignore[misc]
        def _init_reorder_batch_threshold(self, *arguments: Any) -> None:
            super()._init_reorder_batch_threshold(*arguments)
            change(self)

    return Builder


def need_parallel_config(target: type[Any]) -> type[Any]:
    """Return a builder that reads the config's parallel part."""
    return _with_threshold(target, lambda builder: builder.vllm_config.parallel_config)


def single_token_under_dcp(target: type[Any]) -> type[Any]:
    """Return a builder whose threshold is 1 under decode context parallelism."""

    def change(builder: Any) -> None:
        if builder.vllm_config.parallel_config.decode_context_parallel_size > 1:
            builder.reorder_batch_threshold = 1

    return _with_threshold(target, change)


def widen_for_parallel_drafting(target: type[Any]) -> type[Any]:
    """Return a builder that counts every drafted token twice if it counts drafted tokens at all."""

    class Builder(target):  # type: ignore[misc]
        def _init_reorder_batch_threshold(self, reorder_batch_threshold: Any = 1, as_decode: bool = False) -> None:
            drafts = self.vllm_config.speculative_config.num_speculative_tokens
            super()._init_reorder_batch_threshold(reorder_batch_threshold, as_decode)
            if as_decode and reorder_batch_threshold is not None and drafts is not None:
                self.reorder_batch_threshold = max(reorder_batch_threshold, 1 + 2 * drafts)

    return Builder


def drop_cascade(target: type[Any]) -> type[Any]:
    """Return a builder without ``use_cascade_attention``."""

    def absent(_: Any) -> Any:
        raise AttributeError("use_cascade_attention")

    return type("Builder", (target,), {"use_cascade_attention": property(absent)})


def give_defaults(_: type[Any]) -> type[Any]:
    """Return a protocol whose attributes are None by default."""

    @runtime_checkable
    class KVSharingFastPrefillMetadata(Protocol):
        logits_indices_padded: Any = None
        num_logits_indices: Any = None

    return KVSharingFastPrefillMetadata


def lacks_cudagraph_support(builder: type[Any]) -> bool:
    """Return whether a builder lacks the attribute ``cudagraph_support``."""
    return not hasattr(builder, "cudagraph_support")


# Departures of vLLM in functions on layers, and in the classes derived for them.


def skip_unknown(target: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return a function that ignores names without a layer."""

    def parameters(vllm_config: Any, layer_names: list[str], cls_: type[Any]) -> dict[str, Any]:
        there = vllm_config.compilation_config.static_forward_context
        return target(vllm_config, [name for name in layer_names if name in there], cls_)

    return parameters


def write_into_first(target: Callable[..., PerLayerParameters]) -> Callable[..., PerLayerParameters]:
    """Return a function that writes its verdicts into the caller's first entry, and returns that."""

    def inferred(per_layer_params: dict[str, PerLayerParameters]) -> PerLayerParameters:
        verdicts = target(per_layer_params)
        first = next(iter(per_layer_params.values()))
        first.has_same_window_lefts = verdicts.has_same_window_lefts
        first.has_same_all_params = verdicts.has_same_all_params
        return first

    return inferred


def unbound_builder(target: Callable[..., type[Any]]) -> Callable[..., type[Any]]:
    """Return a function whose classes have a ``get_builder_cls`` that fails on an instance."""

    def derived(name_prefix: str, attention_backend_cls: type[Any], builder_cls: type[Any]) -> type[Any]:
        made = target(name_prefix, attention_backend_cls, builder_cls)
        made.get_builder_cls = lambda: builder_cls
        return made

    return derived


def skips_plain_layers(function: Any) -> bool:
    """Return whether a layer with an ``impl``, but without vLLM's base class, is ignored."""
    layers = {"layer": SimpleNamespace(impl=SimpleNamespace(scale=1.0))}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    return not function(config, ["layer"], SimpleNamespace)


# Departures of vLLM in the order of a batch.


def any_threshold(_: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for negative thresholds: every request is a prefill."""
    return lambda common_attn_metadata, **_: (
        *(0, common_attn_metadata.num_reqs),
        *(0, common_attn_metadata.num_actual_tokens),
    )


def tensor_counts(target: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose token counts of extends and of first chunks are tensors if there are first chunks."""

    def split(common_attn_metadata: CommonAttentionMetadata, **given: Any) -> tuple[Any, ...]:
        counts = target(common_attn_metadata, **given)
        if not counts[2]:
            return tuple(counts)
        dtype = common_attn_metadata.query_start_loc_cpu.dtype
        return (*counts[:4], *(torch.tensor(count, dtype=dtype) for count in counts[4:]))

    return split


def count_none(_: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that counts no request and no token in any part.

    vLLM does so if every request is a decode, and ``max_query_len`` is an upper bound above the threshold.
    """
    return lambda **_: (0,) * 6


def four_regions(_: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that sorts decodes, short extends, long extends, first chunks.

    Requests in a wrong region fill the gaps in the order of the regions.
    """

    def reorder(input_batch: Any, scheduler_output: Any, decode_threshold: int = 1) -> bool:
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

    return reorder


# Departures of vLLM in batches rewritten for an execution path, and in launch arguments of kernels.


def chunks_without_check(_: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that chunks requests of any lengths.

    No chunk is empty, and pages before the first one are counted from the right end of the table.
    """

    def virtual(attn_chunk_size: int, common_attn_metadata: CommonAttentionMetadata, block_size: int) -> Any:
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
        lengths, queries = torch.tensor(keys, dtype=torch.int32), torch.tensor(new, dtype=torch.int32)
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

    return virtual


def numpy_maximum(target: Callable[..., CommonAttentionMetadata]) -> Callable[..., CommonAttentionMetadata]:
    """Return a function whose metadata has a NumPy integer as ``max_query_len``."""

    def virtual(**given: Any) -> CommonAttentionMetadata:
        made = target(**given)
        longest: Any = np.int32(made.max_query_len)
        return replace(made, max_query_len=longest)

    return virtual


def one_storage(target: Callable[..., CommonAttentionMetadata]) -> Callable[..., CommonAttentionMetadata]:
    """Return a function whose device tensors of start locations and lengths are the host's."""

    def rewritten(**given: Any) -> CommonAttentionMetadata:
        made = target(**given)
        return replace(made, query_start_loc=made.query_start_loc_cpu, seq_lens=made.seq_lens_cpu)

    return rewritten


def one_storage_of_starts(target: Callable[..., CommonAttentionMetadata]) -> Callable[..., CommonAttentionMetadata]:
    """Return a function whose device tensor of start locations is the host's."""

    def reduced(common_attn_metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        made = target(common_attn_metadata)
        return replace(made, query_start_loc=made.query_start_loc_cpu)

    return reduced


def same_batch(_: Callable[..., CommonAttentionMetadata]) -> Callable[..., CommonAttentionMetadata]:
    """Return a function that returns the batch as it is."""
    return lambda common_attn_metadata: common_attn_metadata


def any_indices(_: Callable[..., CommonAttentionMetadata]) -> Callable[..., CommonAttentionMetadata]:
    """Return a function that keeps as many query rows of each request as it has indices, whichever these are."""

    def reduced(common_attn_metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        batch = common_attn_metadata
        indices, count = batch.logits_indices_padded, batch.num_logits_indices
        assert indices is not None
        assert count is not None
        starts = batch.query_start_loc_cpu.tolist()
        spans = list(pairwise(starts))
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

    return reduced


def unarmed_backend(_: Callable[..., type[Any]]) -> Callable[..., type[Any]]:
    """Return a function whose backend accepts a batch without logits indices."""

    def made(prefix: str, underlying_attn_backend: type[Any]) -> type[Any]:
        underlying: Any = underlying_attn_backend.get_builder_cls()

        class Builder(underlying):  # type: ignore[misc]
            def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
                built = copy(super().build(common_prefix_len, common_attn_metadata, fast_build))
                built.logits_indices_padded = common_attn_metadata.logits_indices_padded
                built.num_logits_indices = common_attn_metadata.num_logits_indices
                return built

        name = f"{prefix}{underlying_attn_backend.__name__}"
        return type(name, (underlying_attn_backend,), {"get_builder_cls": staticmethod(lambda: Builder)})

    return made


def accepting_decreasing_starts(target: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Return a function that counts decreasing start locations as requests without tokens, and none as no request."""
    return lambda query_start_loc_p: target(
        query_start_loc_p.cummax(0).values if len(query_start_loc_p) else query_start_loc_p.new_zeros(1)
    )


def any_rank(_: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the formula of local lengths, without a check of rank and length."""

    def local(seq_lens: Tensor, dcp_size: int, dcp_rank: Any, cp_kv_cache_interleave_size: int) -> Tensor:
        stripe = cp_kv_cache_interleave_size
        rank = torch.arange(dcp_size) if dcp_rank is None else dcp_rank
        lens = seq_lens.unsqueeze(-1) if dcp_rank is None else seq_lens
        whole = lens.div(stripe * dcp_size, rounding_mode="floor") * stripe
        return (whole + (lens - whole * dcp_size - rank * stripe).clamp(0, stripe)).to(torch.int32)

    return local


def returns_a_pair(function: Any) -> bool:
    """Return whether the function returns a pair of the metadata and another object."""
    return "tuple" in str(function.__annotations__.get("return"))


def wants_the_largest_count(function: Any) -> bool:
    """Return whether a batch with logits indices, but without ``max_logits_per_req``, is refused."""
    starts, lens = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
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


# Departures of vLLM in cutting a batch: start locations and micro-batches.


def clip_slice(_: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that returns the start locations of existing requests only."""

    def slice_query_start_locs(query_start_loc: Tensor, request_slice: slice) -> Tensor:
        return query_start_loc[request_slice.start : request_slice.stop + 1] - query_start_loc[request_slice.start]

    return slice_query_start_locs


Pieces = CommonAttentionMetadata | list[CommonAttentionMetadata]


def _of_each_piece(
    target: Callable[..., Pieces], change: Callable[[CommonAttentionMetadata, CommonAttentionMetadata], Any]
) -> Callable[..., Pieces]:
    """Return ``target`` with ``change(piece, batch)`` applied to every micro-batch that it returns."""

    def cut(**given: Any) -> Pieces:
        batch = next(value for value in given.values() if isinstance(value, CommonAttentionMetadata))
        made = target(**given)
        return [change(piece, batch) for piece in made] if isinstance(made, list) else change(made, batch)

    return _by_position(cut, ("ubatch_slice", "attn_metadata"))


def _by_position(call: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    return lambda *given, **named: call(**dict(zip(names, given, strict=False)), **named)


def causal_pieces(target: Callable[..., Pieces]) -> Callable[..., Pieces]:
    """Return a function whose micro-batches are always causal."""
    return _of_each_piece(target, lambda piece, _: replace(piece, causal=True))


def longest_of_the_batch(target: Callable[..., Pieces]) -> Callable[..., Pieces]:
    """Return a function whose micro-batches have a ``max_seq_len`` of at least the batch's."""
    return _of_each_piece(
        target, lambda piece, batch: replace(piece, max_seq_len=max(piece.max_seq_len, batch.max_seq_len))
    )


def any_end(_: Callable[..., Pieces]) -> Callable[..., Pieces]:
    """Return a function that accepts cuts whose tokens and requests end in different places."""

    def one(cut: UBatchSlice, batch: CommonAttentionMetadata) -> CommonAttentionMetadata:
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

    def cut(**given: Any) -> Pieces:
        if "ubatch_slices" in given:
            return [one(each, given["common_attn_metadata"]) for each in given["ubatch_slices"]]
        return one(given["ubatch_slice"], given["attn_metadata"])

    return _by_position(cut, ("ubatch_slice", "attn_metadata"))


def numpy_end(target: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose last micro-batch, before padding, ends at a NumPy integer."""

    def create(**given: Any) -> Any:
        pieces, padded = target(**given)
        last = pieces[-1]
        tokens = slice(last.token_slice.start, np.int32(last.token_slice.stop))
        return [*pieces[:-1], UBatchSlice(last.request_slice, tokens)], padded

    return create
