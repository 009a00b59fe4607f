"""Questions about batches rewritten for an execution path: chunked local attention, fast prefill with shared K/V."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from attncheck.harness.providers.batches import ALWAYS, ProviderBatch
from attncheck.harness.providers.questions import Subject, SubjectCall, SubjectSetting, are_apart, subject_call
from attncheck.reference import CommonAttentionMetadata

TWO = ProviderBatch("two prompts", (6, 4), (6, 9), block_size=4)
HOST = torch.device("cpu")
DECODES = ProviderBatch("two decodes", (1, 1), (6, 9), block_size=4)


def _chunks(setting: SubjectSetting) -> Iterator[SubjectCall]:
    def call(batch: ProviderBatch, chunk: int, block_size: int, *tags: str, refused: bool = False) -> SubjectCall:
        tags = (*tags, "padding requests") if batch.has_padding_requests else tags
        return subject_call(
            f"{batch}: chunks of {chunk}, pages of {block_size}",
            *tags,
            refused=refused,
            attn_chunk_size=chunk,
            common_attn_metadata=batch.metadata(setting.device),
            block_size=block_size,
        )

    for batch in setting.batches:
        page = batch.block_size
        beyond = -(-(max(batch.seq_lens) + 1) // page) * page
        for chunk in dict.fromkeys((page, 2 * page, 4 * page, beyond)):
            yield call(batch, chunk, page)
    yield subject_call(
        f"{TWO}: whose storage, where the device is the host",
        "storage",
        attn_chunk_size=4,
        common_attn_metadata=TWO.metadata(HOST),
        block_size=4,
        storage=True,
    )
    yield call(TWO, 4, 3, refused=True)
    yield call(TWO, 4, 0, refused=True)
    yield subject_call(
        "5 new tokens of 3",
        "malformed",
        refused=True,
        attn_chunk_size=4,
        common_attn_metadata=_shortened(setting.device),
        block_size=2,
    )


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


def _reduce(target: Any, *, common_attn_metadata: CommonAttentionMetadata, storage: bool = False) -> dict[str, Any]:
    reduced = target(common_attn_metadata)
    if storage:
        return _twins_are_apart(reduced)
    return {"the same object": reduced is common_attn_metadata, "metadata": reduced}


def _reductions(setting: SubjectSetting) -> Iterator[SubjectCall]:
    def call(batch: ProviderBatch, what: str, indices: list[int] | None, *tags: str, **options: Any) -> SubjectCall:
        spare = options.pop("spare", 0)
        metadata = _armed(batch, setting.device, indices, spare)
        return subject_call(f"{batch}: {what}", *tags, common_attn_metadata=metadata, **options)

    for batch in setting.batches:
        yield call(batch, "the last token of each request", _last_tokens(batch, 1), spare=2)
        yield call(batch, "the last two tokens of each request", _last_tokens(batch, 2))
        yield call(batch, "every token", list(range(batch.num_tokens)))
        yield call(batch, "no token", [], spare=1)
    yield subject_call(
        f"{TWO}: whose storage, where the device is the host",
        "storage",
        common_attn_metadata=_armed(TWO, HOST, [5, 9], 0),
        storage=True,
    )
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


def _build(
    target: Any, *, prefix: str, underlying_attn_backend: type[UnderlyingBackend], metadata: CommonAttentionMetadata
) -> dict[str, Any]:
    backend = target(prefix, underlying_attn_backend)
    builder = backend.get_builder_cls()()
    built, fast = builder.build(0, metadata), builder.build(5, metadata, True)
    return {
        "name": backend.__name__,
        "derives from the backend": issubclass(backend, underlying_attn_backend),
        "builder derives from the builder": issubclass(backend.get_builder_cls(), UnderlyingBuilder),
        "builder of the underlying backend": underlying_attn_backend.get_builder_cls(),
        "derives from the metadata": isinstance(built, UnderlyingMetadata),
        "fields": {field.name: getattr(built, field.name) for field in fields(UnderlyingMetadata)},
        "other arguments": [fast.common_prefix_len, fast.fast_build],
        "logits_indices_padded": built.logits_indices_padded,
        "indices are the same tensor": built.logits_indices_padded is metadata.logits_indices_padded,
        "num_logits_indices": built.num_logits_indices,
    }


def _backends(setting: SubjectSetting) -> Iterator[SubjectCall]:
    def call(
        batch: ProviderBatch, what: str, indices: list[int] | None, *tags: str, refused: bool = False
    ) -> SubjectCall:
        return subject_call(
            f"{batch}: {what}",
            *tags,
            refused=refused,
            prefix="FastPrefill",
            underlying_attn_backend=UnderlyingBackend,
            metadata=_armed(batch, setting.device, indices, 1),
        )

    for batch in ALWAYS:
        yield call(batch, "the last token of each request", _last_tokens(batch, 1))
    yield call(DECODES, "all decodes, armed", [0, 1])
    yield call(DECODES, "all decodes, not armed", None, "not armed", refused=True)
    yield call(TWO, "not armed", None, "not armed", refused=True)


SUBJECTS = (
    Subject("make_local_attention_virtual_batches", _chunks, _virtual),
    Subject("make_kv_sharing_fast_prefill_common_attn_metadata", _reductions, _reduce),
    Subject("create_fast_prefill_custom_backend", _backends, _build),
)
