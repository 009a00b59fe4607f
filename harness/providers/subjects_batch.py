"""Subjects of batches: their order, their splits into ubatches, and their paths."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise, permutations, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attncheck.harness.providers.batches import ALWAYS, ProviderBatch
from attncheck.harness.providers.provider import Subject, SubjectCall, SubjectSetting, are_apart, subject_call
from attncheck.reference import CommonAttentionMetadata, PrefillingMetadata, UBatchSlice
from attncheck.reference.utilities.batch_order import split_finished_prompts

# Questions about the order of a batch: where decodes end, and which requests move to the front.

HOST = torch.device("cpu")
THRESHOLDS = (1, 2, 4)

Numbers = tuple[int, ...]


def _boundaries(setting: SubjectSetting) -> Iterator[SubjectCall]:
    for batch in setting.batches:
        metadata = batch.metadata(setting.device)
        for threshold, uniform in product(THRESHOLDS, (False, True)):
            yield subject_call(
                batch, common_attn_metadata=metadata, decode_threshold=threshold, require_uniform=uniform
            )
        yield subject_call(
            f"{batch}, {BOUND}",
            common_attn_metadata=_with_bound(metadata),
            decode_threshold=1,
            require_uniform=False,
        )
        yield subject_call(batch, common_attn_metadata=metadata)
        yield from _flagged(batch, metadata)
    batch = setting.batches[0]
    metadata = batch.metadata(setting.device)
    yield subject_call(
        batch,
        "malformed",
        refused=True,
        common_attn_metadata=metadata,
        decode_threshold=-1,
        require_uniform=False,
    )


BOUND = "max_query_len 3 above the truth"


def _with_bound(metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
    return replace(metadata, max_query_len=metadata.max_query_len + 3)


def _flagged(batch: ProviderBatch, metadata: CommonAttentionMetadata) -> Iterator[SubjectCall]:
    """Yield questions that count short extends as prefills, with a few patterns of requests with unfinished prompts."""
    real = [tokens > 0 for tokens in batch.query_lens]
    fresh = [q == s > 0 for q, s in zip(batch.query_lens, batch.seq_lens, strict=True)]
    last = [place == sum(real) - 1 for place in range(len(real))]
    patterns = {
        "no prompt is": [False] * len(real),
        "prompts of first chunks are": fresh,
        "the last prompt is": last,
        "every second prompt is": [flag and place % 2 == 1 for place, flag in enumerate(real)],
    }
    shared = {each.name: getattr(metadata, each.name) for each in fields(metadata)}
    for text, flags in patterns.items():
        for threshold, uniform in product(THRESHOLDS, (False, True)):
            yield subject_call(
                f"{batch}, {text} unfinished",
                common_attn_metadata=PrefillingMetadata(**shared, is_prefilling=torch.tensor(flags)),
                decode_threshold=threshold,
                require_uniform=uniform,
                treat_short_extends_as_decodes=False,
            )


def _three_parts(setting: SubjectSetting) -> Iterator[SubjectCall]:
    for batch in setting.batches:
        metadata = batch.metadata(setting.device)
        for threshold in THRESHOLDS:
            tags = ["first chunks"] if _has_first_chunk(batch, threshold) else []
            yield subject_call(batch, *tags, common_attn_metadata=metadata, decode_threshold=threshold)
        tag = "decodes alone" if max(batch.query_lens) <= 1 else "first chunks" if _has_first_chunk(batch, 1) else ""
        yield subject_call(f"{batch}, {BOUND}", tag, common_attn_metadata=_with_bound(metadata))


def _has_first_chunk(batch: ProviderBatch, threshold: int) -> bool:
    return any(q == s > threshold for q, s in zip(batch.query_lens, batch.seq_lens, strict=True))


def _workspaces(setting: SubjectSetting) -> Iterator[SubjectCall]:
    for batch in setting.batches:
        lens = batch.metadata(HOST).seq_lens_cpu
        longest, together = max(batch.seq_lens), sum(batch.seq_lens)
        for size in dict.fromkeys((longest, longest + 1, 2 * longest, together)):
            yield subject_call(batch, seq_lens_cpu=lens, workspace_size=size, request_offset=size % 3)
        yield subject_call(batch, seq_lens_cpu=lens, workspace_size=longest)
    lens = torch.tensor([3, 9], dtype=torch.int32)
    yield subject_call("lengths 3 9", refused=True, seq_lens_cpu=lens, workspace_size=8)
    yield subject_call("no request", seq_lens_cpu=lens[:0], workspace_size=8)


@dataclass
class InputBatch:
    """A persistent batch with the fields that reordering reads: ids, computed tokens and prompt tokens."""

    req_ids: list[str]
    num_computed_tokens_cpu: npt.NDArray[np.int32]
    num_prompt_tokens: npt.NDArray[np.int32]

    @property
    def num_reqs(self) -> int:
        """The number of requests."""
        return len(self.req_ids)

    def swap_states(self, i1: int, i2: int) -> None:
        """Swap two requests."""
        for values in (self.req_ids, self.num_computed_tokens_cpu, self.num_prompt_tokens):
            values[i1], values[i2] = values[i2], values[i1]


def _reorder(target: Any, *, input_batch: InputBatch, scheduler_output: Any, **threshold: int) -> dict[str, Any]:
    """Return the result, and which requests are in front; the arguments contain the full order."""
    limit = threshold.get("decode_threshold", 1)
    moved = target(input_batch, scheduler_output, **threshold)
    counts = [scheduler_output.num_scheduled_tokens[name] for name in input_batch.req_ids]
    short = sum(count <= limit for count in counts)
    return {"moved": moved, "front": sorted(input_batch.req_ids[:short]), "behind": sorted(input_batch.req_ids[short:])}


REGIONS = {
    "decode": (1, 9, 5),
    "first decode": (1, 9, 9),
    "decode of drafts": (2, 9, 5),
    "short extend": (1, 3, 8),
    "extend of two tokens": (2, 3, 8),
    "long extend": (6, 3, 20),
    "long past its prompt": (6, 20, 20),
    "first chunk": (6, 0, 10),
    "short first chunk": (1, 0, 10),
    "whole prompt of one token": (1, 0, 1),
}
"""Scheduled tokens, computed tokens and prompt tokens of one request for every region, at every threshold."""


def _mixtures() -> Iterator[tuple[str, ...]]:
    """Yield every order of one request from each region, and longer mixtures."""
    yield from permutations(("decode", "short extend", "long extend", "first chunk"))
    yield from permutations(("first decode", "short first chunk", "extend of two tokens", "long past its prompt"))
    kinds = tuple(REGIONS)
    for step in (1, 2, 4, 5, 7, 8):
        for count in (3, 5, 9, 16):
            yield tuple(kinds[(place * step + place // len(kinds) + count) % len(kinds)] for place in range(count))


def _orders(setting: SubjectSetting) -> Iterator[SubjectCall]:
    for text, counts, computed, prompts in _persistent_batches(setting):
        names = [f"r{number}" for number in range(len(counts))]
        scheduled = dict(zip(names, counts, strict=True)) | {"another": 7}
        arguments: dict[str, Any] = {
            "input_batch": InputBatch(names, np.array(computed, np.int32), np.array(prompts, np.int32)),
            "scheduler_output": SimpleNamespace(num_scheduled_tokens=scheduled),
        }
        yield subject_call(text, **arguments)
        for threshold in THRESHOLDS:
            yield subject_call(text, **arguments, decode_threshold=threshold)
    yield subject_call(
        "a request that was not scheduled",
        refused=True,
        input_batch=InputBatch(["r0", "r1"], np.array([9, 9], np.int32), np.array([5, 5], np.int32)),
        scheduler_output=SimpleNamespace(num_scheduled_tokens={"r0": 3}),
    )


def _persistent_batches(setting: SubjectSetting) -> Iterator[tuple[str, Numbers, Numbers, Numbers]]:
    """Yield persistent batches: a text, and the scheduled, computed and prompt tokens of each request."""
    for batch in setting.batches:
        yield f"{batch}, all past their prompts", batch.query_lens, (9,) * batch.num_reqs, (5,) * batch.num_reqs
        computed = tuple(s - q for q, s in zip(batch.query_lens, batch.seq_lens, strict=True))
        yield f"{batch}, all in their prompts", batch.query_lens, computed, tuple(s + 1 for s in batch.seq_lens)
    yield "counts 5 1 7 1 1, all past their prompts", (5, 1, 7, 1, 1), (9,) * 5, (5,) * 5
    for mixture in _mixtures():
        counts, computed, prompts = zip(*(REGIONS[kind] for kind in mixture), strict=True)
        yield ", ".join(mixture), counts, computed, prompts
    yield "no request at all", (), (), ()


ORDER = (
    Subject(
        "split_decodes_and_prefills",
        _boundaries,
        newer=frozenset({"treat_short_extends_as_decodes"}),
        ours=split_finished_prompts,
    ),
    Subject("split_decodes_prefills_and_extends", _three_parts),
    Subject("split_prefill_chunks", _workspaces),
    Subject("reorder_batch_to_split_decodes_and_prefills", _orders, _reorder),
)


# Questions about cutting a batch: start locations and micro-batches.

MIXED = next(batch for batch in ALWAYS if batch.name == "mixed")

Cut = tuple[int, int, int, int]
"""First request, end of the requests, first token, end of the tokens; the ends are exclusive."""


def _slices(setting: SubjectSetting) -> Iterator[SubjectCall]:
    def call(text: object, starts: torch.Tensor, first: int, stop: int, *tags: str, refused: bool = False) -> Any:
        requests = slice(first, stop)
        return subject_call(
            text, *tags, refused=refused, query_start_loc=starts.to(setting.device), request_slice=requests
        )

    for batch in setting.batches:
        half, last = batch.num_reqs // 2, batch.num_reqs
        for first, stop in dict.fromkeys([(0, last), (0, half), (half, last), (half, half)]):
            yield call(batch, batch.offsets(), first, stop)
    yield call("start locations 5 8 10", torch.tensor([5, 8, 10]), 0, 2)
    five = torch.tensor([0, 3, 5, 9, 10])
    yield call("start locations 0 3 5 9 10", five, 3, 9, "beyond the batch", refused=True)
    yield call("start locations 0 3 5 9 10", five, 7, 7, refused=True)


def _slice_facts(target: Any, *, request_slice: slice, token_slice: slice) -> dict[str, Any]:
    one, twin = (target(request_slice, token_slice) for _ in range(2))
    return {
        "request_slice": one.request_slice,
        "token_slice": one.token_slice,
        "is_empty": one.is_empty(),
        "num_tokens": one.num_tokens,
        "equal to its twin": one == twin,
        "equal to another": one == target(request_slice, slice(0, 99)),
        "by keyword": target(token_slice=token_slice, request_slice=request_slice),
    }


def _slice_questions(_: SubjectSetting) -> Iterator[SubjectCall]:
    for requests, tokens in (((0, 2), (0, 5)), ((1, 1), (0, 5)), ((0, 2), (4, 4)), ((0, 2), (3, 8))):
        yield subject_call("made from", request_slice=slice(*requests), token_slice=slice(*tokens))


def _cut_at(batch: ProviderBatch, first: int, stop: int) -> Cut:
    """Return the cut with these tokens; requests after the last token are left out."""
    return (bisect_right(batch.starts, first) - 1, bisect_right(batch.starts, stop - 1), first, stop)


def _whole(batch: ProviderBatch) -> Cut:
    return (0, batch.num_reqs, 0, batch.num_tokens + batch.padding_tokens)


def _pieces(batch: ProviderBatch, count: int) -> list[Cut]:
    """Return the batch as ``count`` pieces of about equal length; the last one contains the padding."""
    edges = [batch.num_tokens * piece // count for piece in range(count + 1)]
    pieces = [_cut_at(batch, first, stop) for first, stop in pairwise(edges)]
    _, last_request, _, last_token = _whole(batch)
    return [*pieces[:-1], (pieces[-1][0], last_request, pieces[-1][2], last_token)]


def _ubatch(cut: Cut) -> UBatchSlice:
    return UBatchSlice(slice(cut[0], cut[1]), slice(cut[2], cut[3]))


def _format(cut: Cut) -> str:
    return f"requests {cut[0]}:{cut[1]}, tokens {cut[2]}:{cut[3]}"


def _tags(batch: ProviderBatch) -> list[str]:
    return [] if batch.causal else ["not causal"]


MEANINGLESS: tuple[tuple[Cut, str], ...] = (
    ((1, 1, 3, 5), "empty"),
    ((0, 2, 3, 7), "wrong start"),
    ((0, 1, 0, 5), "wrong end"),
    ((0, 2, 0, 3), "wrong end"),
)
"""Cuts of the batch ``mixed``: empty, starting after request 0, ending inside request 1, ending before request 1."""


def _one_piece(setting: SubjectSetting) -> Iterator[SubjectCall]:
    for batch in setting.batches:
        metadata = batch.metadata(setting.device)
        third = batch.num_tokens // 3
        half = batch.num_tokens // 2
        end = batch.num_tokens
        edges = [(0, end), (0, half), (half, end), (third, end - third), (half, half + 1)]
        cuts = [_cut_at(batch, first, stop) for first, stop in edges if first < stop <= end]
        for cut in dict.fromkeys([*cuts, _whole(batch), *_pieces(batch, min(2, end))]):
            text = f"{batch}: {_format(cut)}"
            yield subject_call(text, *_tags(batch), ubatch_slice=_ubatch(cut), attn_metadata=metadata)
    metadata = MIXED.metadata(setting.device)
    for cut, tag in MEANINGLESS:
        text = f"{MIXED}: {_format(cut)}"
        yield subject_call(text, tag, refused=True, ubatch_slice=_ubatch(cut), attn_metadata=metadata)
    zeros = torch.zeros_like(metadata.query_start_loc_cpu)
    dummy = replace(metadata, query_start_loc=zeros.to(setting.device, copy=True), query_start_loc_cpu=zeros)
    whole = _ubatch((0, 3, 0, 12))
    yield subject_call("start locations all 0, whole", refused=True, ubatch_slice=whole, attn_metadata=dummy)


def _many_pieces(setting: SubjectSetting) -> Iterator[SubjectCall]:
    def call(batch: ProviderBatch, cuts: list[Cut], *tags: str, refused: bool = False) -> SubjectCall:
        return subject_call(
            f"{batch}: {'; '.join(map(_format, cuts)) or 'no piece'}",
            *tags,
            *_tags(batch),
            refused=refused,
            ubatch_slices=[_ubatch(cut) for cut in cuts],
            common_attn_metadata=batch.metadata(setting.device),
        )

    for batch in setting.batches:
        for count in range(1, min(3, batch.num_tokens) + 1):
            yield call(batch, _pieces(batch, count))
    yield call(MIXED, [])
    yield call(MIXED, [(0, 2, 0, 7), (1, 1, 3, 5)], "empty", refused=True)
    yield call(MIXED, [(0, 2, 0, 7), (0, 1, 0, 5)], "wrong end", refused=True)


def _plans(setting: SubjectSetting) -> Iterator[SubjectCall]:
    for batch in setting.batches:
        counts = np.array([tokens for tokens in batch.query_lens if tokens], dtype=np.int32)
        for count, spare, size in _divisions(batch.num_tokens):
            yield subject_call(
                batch,
                "cut",
                should_ubatch=True,
                num_scheduled_tokens=counts,
                num_tokens_padded=batch.num_tokens + spare,
                num_reqs_padded=batch.num_reqs + spare,
                num_ubatches=count,
                split_point=size,
            )
    by_default: dict[str, Any] = {
        "num_scheduled_tokens": np.array([3, 4]),
        "num_tokens_padded": 7,
        "num_reqs_padded": 2,
        "num_ubatches": 2,
    }
    yield subject_call("two requests", should_ubatch=False, **by_default)
    yield subject_call("two requests", "cut", should_ubatch=True, **by_default)


def _divisions(num_tokens: int) -> Iterator[tuple[int, int, int | None]]:
    """Yield a number of micro-batches, padding tokens, and the tokens of a micro-batch (None: equal parts)."""
    for count, spare in ((1, 0), (1, 3), (2, 0), (2, 1), (3, 2)):
        size = (num_tokens + spare) // count
        if size and size * (count - 1) < num_tokens:
            yield count, spare, None
    if num_tokens > 2:
        yield 2, 3, num_tokens - 1
        yield 3, 0, 1


def _emptiness(_: SubjectSetting) -> Iterator[SubjectCall]:
    for real, padded, count in product((1, 7, 8, 9, 11, 12, 13, 16), (8, 12, 16, 17, 24), (1, 2, 3, 4)):
        yield subject_call("tokens", orig_num_tokens=real, padded_num_tokens=padded, num_ubatches=count)


UBATCHES = (
    Subject("slice_query_start_locs", _slices),
    Subject("UBatchSlice", _slice_questions, _slice_facts, is_function=False),
    Subject("_make_metadata_with_slice", _one_piece),
    Subject("split_attn_metadata", _many_pieces),
    Subject("is_last_ubatch_empty", _emptiness),
    Subject("maybe_create_ubatch_slices", _plans),
)


# Questions about batches rewritten for an execution path: chunked local attention, fast prefill with shared K/V.

TWO = ProviderBatch("two prompts", (6, 4), (6, 9), block_size=4)
DECODES = ProviderBatch("two decodes", (1, 1), (6, 9), block_size=4)
STORAGE = "where the device is the host"


def _chunks(setting: SubjectSetting) -> Iterator[SubjectCall]:
    def call(text: object, metadata: Any, chunk: int, block_size: int, *tags: str, **options: Any) -> SubjectCall:
        return subject_call(
            text, *tags, common_attn_metadata=metadata, attn_chunk_size=chunk, block_size=block_size, **options
        )

    for batch in setting.batches:
        metadata, page = batch.metadata(setting.device), batch.block_size
        beyond = -(-(max(batch.seq_lens) + 1) // page) * page
        tags = ["padding requests"] if batch.has_padding_requests else []
        for chunk in dict.fromkeys((page, 2 * page, 4 * page, beyond)):
            yield call(batch, metadata, chunk, page, *tags)
    yield call(f"{TWO}, {STORAGE}", TWO.metadata(HOST), 4, 4, "storage", storage=True)
    yield call(TWO, TWO.metadata(setting.device), 4, 3, refused=True)
    yield call(TWO, TWO.metadata(setting.device), 4, 0, refused=True)
    yield call("5 new tokens of 3", _shortened(setting.device), 4, 2, "malformed", refused=True)


def _virtual(target: Any, *, storage: bool = False, **arguments: Any) -> dict[str, Any]:
    """Return the virtual batch, and separately its rows with queries, which padding requests do not affect."""
    metadata = target(**arguments)
    if storage:
        return _twins_are_apart(metadata)
    real = metadata.query_start_loc_cpu.diff() > 0
    return {
        "metadata": metadata,
        "with queries": {
            "seq_lens": metadata.seq_lens.cpu()[real],
            "num_computed_tokens_cpu": metadata.num_computed_tokens_cpu[real],
            "block_table_tensor": metadata.block_table_tensor.cpu()[real],
        },
    }


def _twins_are_apart(metadata: CommonAttentionMetadata) -> dict[str, bool]:
    """Return whether host and device tensors share no storage, also if the device is the host."""
    return {
        name: are_apart(getattr(metadata, name), getattr(metadata, f"{name}_cpu"))
        for name in ("query_start_loc", "seq_lens")
    }


def _shortened(device: torch.device) -> CommonAttentionMetadata:
    metadata = ProviderBatch("", (5,), (5,), block_size=2).metadata(device)
    lens = torch.tensor([3], dtype=torch.int32)
    return replace(metadata, seq_lens=lens.to(device, copy=True), seq_lens_cpu=lens, max_seq_len=3)


def _armed(
    batch: ProviderBatch, device: torch.device, indices: list[int] | None, spare: int
) -> CommonAttentionMetadata:
    """Return the batch with these logits indices and ``spare`` padding entries; None for no indices."""
    metadata = batch.metadata(device)
    if indices is None:
        return metadata
    padded = torch.tensor([*indices, *[0] * spare], dtype=torch.int32, device=device)
    return replace(metadata, logits_indices_padded=padded, num_logits_indices=len(indices))


def _last_tokens(batch: ProviderBatch, count: int) -> list[int]:
    """Return the last ``count`` tokens of every request, or all of its tokens if it has fewer."""
    spans = zip(batch.starts, batch.starts[1:], strict=False)
    return [token for start, stop in spans for token in range(max(start, stop - count), stop)]


def _reduce(target: Any, *, common_attn_metadata: CommonAttentionMetadata, storage: bool = False) -> Any:
    reduced = target(common_attn_metadata)
    return _twins_are_apart(reduced) if storage else reduced


def _reductions(setting: SubjectSetting) -> Iterator[SubjectCall]:
    def call(batch: ProviderBatch, what: str, indices: list[int] | None, *tags: str, **options: Any) -> SubjectCall:
        metadata = _armed(batch, options.pop("device", setting.device), indices, options.pop("spare", 0))
        return subject_call(f"{batch}, {what}", *tags, common_attn_metadata=metadata, **options)

    for batch in setting.batches:
        yield call(batch, "the last token of each request", _last_tokens(batch, 1), spare=2)
        yield call(batch, "the last two tokens of each request", _last_tokens(batch, 2))
        yield call(batch, "every token", list(range(batch.num_tokens)))
        yield call(batch, "no token", [], spare=1)
    yield call(TWO, STORAGE, [5, 9], "storage", device=HOST, storage=True)
    yield call(DECODES, "not armed, all decodes", None)
    yield call(TWO, "not armed", None, "not armed", refused=True)
    yield call(TWO, "token 10 of 10", [10], refused=True)
    for what, indices in [("unsorted", [9, 5]), ("repeated", [5, 5]), ("not the last tokens", [0, 9])]:
        yield call(TWO, f"indices {what}", indices, "indices that are no tail", refused=True)


@dataclass
class UnderlyingMetadata:
    """The metadata of :class:`UnderlyingBuilder`."""

    query_start_loc: torch.Tensor
    num_actual_tokens: int
    common_prefix_len: int
    fast_build: bool


class UnderlyingBuilder:
    """A minimal underlying builder."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> UnderlyingMetadata:
        """Return start locations and token count of the batch, and the other arguments."""
        starts, tokens = common_attn_metadata.query_start_loc, common_attn_metadata.num_actual_tokens
        return UnderlyingMetadata(starts, tokens, common_prefix_len, fast_build)


class UnderlyingBackend:
    """A minimal underlying backend."""

    @staticmethod
    def get_builder_cls() -> type[UnderlyingBuilder]:
        """Return :class:`UnderlyingBuilder`."""
        return UnderlyingBuilder


def _build(target: Any, *, metadata: CommonAttentionMetadata) -> dict[str, Any]:
    """Build by a backend derived from :class:`UnderlyingBackend`."""
    backend = target("FastPrefill", UnderlyingBackend)
    builder = backend.get_builder_cls()()
    built = builder.build(0, metadata)
    fast = builder.build(5, metadata, True)
    return {
        "name": backend.__name__,
        "derives from the backend": issubclass(backend, UnderlyingBackend),
        "builder derives from the builder": issubclass(backend.get_builder_cls(), UnderlyingBuilder),
        "builder of the underlying backend": UnderlyingBackend.get_builder_cls(),
        "derives from the metadata": isinstance(built, UnderlyingMetadata),
        "fields": {field.name: getattr(built, field.name) for field in fields(UnderlyingMetadata)},
        "other arguments": [fast.common_prefix_len, fast.fast_build],
        "logits_indices_padded": built.logits_indices_padded,
        "indices are the same tensor": built.logits_indices_padded is metadata.logits_indices_padded,
        "num_logits_indices": built.num_logits_indices,
    }


def _backends(setting: SubjectSetting) -> Iterator[SubjectCall]:
    armed = [(batch, "the last token of each request", _last_tokens(batch, 1)) for batch in ALWAYS]
    for batch, what, indices in [*armed, (DECODES, "all decodes", [0, 1])]:
        yield subject_call(f"{batch}, {what}", metadata=_armed(batch, setting.device, indices, 1))
    for batch in (DECODES, TWO):
        yield subject_call(f"{batch}, not armed", "not armed", refused=True, metadata=batch.metadata(setting.device))


PATHS = (
    Subject("make_local_attention_virtual_batches", _chunks, _virtual),
    Subject("make_kv_sharing_fast_prefill_common_attn_metadata", _reductions, _reduce),
    Subject("create_fast_prefill_custom_backend", _backends, _build),
)
