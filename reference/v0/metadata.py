"""First-generation metadata: the fields with which every backend's metadata starts, and those an attention type reads.

The behaviour is vLLM's, also the fields and their order. Functions take metadata of any class with the attributes named
here, and do not modify it.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.spec import AttentionType


class MultiModalPlaceholderMap:
    """Ranges of embedding rows (source) and token rows (destination), matched in order.

    A new map is empty. ``src_len`` and ``dest_len`` are the row counts of the whole source and destination tensors,
    which the ranges need not cover.

    >>> from types import SimpleNamespace
    >>> image = SimpleNamespace(src_ranges=[range(2)], src_len=2, dest_ranges=[range(1, 3)], dest_len=5)
    >>> collected = MultiModalPlaceholderMap()
    >>> collected.extend(image)
    >>> collected.extend(image)
    >>> collected.index_map()
    IndexMap(src=[0, 1, 2, 3], dest=[1, 2, 6, 7])
    """

    class IndexMap(NamedTuple):
        """Flat indices: row ``src[i]`` of the embeddings goes to row ``dest[i]`` of the batch."""

        src: list[int]
        dest: list[int]

    src_ranges: list[range]
    src_len: int
    dest_ranges: list[range]
    dest_len: int

    def __init__(self) -> None:
        self.src_ranges, self.src_len = [], 0
        self.dest_ranges, self.dest_len = [], 0

    def extend(self, other: Any) -> None:
        """Append ``other`` as if its tensors followed this map's: its ranges are shifted by the current lengths.

        other: any object with the four attributes; it is not modified.
        """
        self.src_ranges.extend([_moved(rows, self.src_len) for rows in other.src_ranges])
        self.dest_ranges.extend([_moved(rows, self.dest_len) for rows in other.dest_ranges])
        self.src_len += other.src_len
        self.dest_len += other.dest_len

    def index_map(self) -> IndexMap:
        """Return the flattened ranges; raise ReferenceArgumentError if the two sides differ in the number of rows."""
        src = [row for rows in self.src_ranges for row in rows]
        dest = [row for rows in self.dest_ranges for row in rows]
        if len(src) != len(dest):
            raise ReferenceArgumentError("src_ranges", f"{len(src)} rows", f"as many as dest_ranges has: {len(dest)}")
        return self.IndexMap(src, dest)


IndexMap = MultiModalPlaceholderMap.IndexMap


def _moved(rows: range, offset: int) -> range:
    return range(rows.start + offset, rows.stop + offset, rows.step)


@dataclass
class AttentionMetadata(ABC):
    """One step's batch: prompts first, then decodes of one token each, in every row and every token field.

    A backend's metadata class is a dataclass that adds its own fields after these. They include the keywords that
    :class:`~attncheck.reference.v0.builder.CommonMetadataBuilder` and
    :class:`~attncheck.reference.v0.state.CommonAttentionState` pass.
    """

    num_prefills: int
    """Prompt sequences of the batch."""
    num_prefill_tokens: int
    """New tokens of the prompts."""
    num_decode_tokens: int
    """New tokens of the decodes, equal to the number of decode sequences."""
    slot_mapping: Tensor
    """``[tokens]`` int64: the cache slot of every new token; -1 if it is not stored."""
    multi_modal_placeholder_index_maps: dict[str, IndexMap] | None
    """Per modality, which embedding row replaces which token; None in metadata for a capture."""
    enable_kv_scales_calculation: bool
    """Whether the cache's scales may be computed in this step; False if they must not change, as in a capture."""

    @property
    @abstractmethod
    def prefill_metadata(self) -> "AttentionMetadata | None":
        """The prompts alone, or None if the batch has none.

        Rows and tokens are sliced, lengths and maxima recomputed, and start locations begin at 0. The result is cached
        on this object; code that changes the batch in place must clear it.
        """
        raise NotImplementedError

    @property
    @abstractmethod
    def decode_metadata(self) -> "AttentionMetadata | None":
        """The decodes alone, or None if the batch has none; otherwise like ``prefill_metadata``."""
        raise NotImplementedError

    def asdict_zerocopy(self, skip_fields: set[str] | None = None) -> dict[str, Any]:
        """Return the dataclass fields as a dict of the field values themselves, without copies and without recursion.

        ``skip_fields`` names fields to leave out, such as handles that cannot be sent to another rank; unknown names
        are ignored. Properties and attributes that are not dataclass fields are not included.
        """
        skipped = skip_fields or ()
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in skipped}


TAttentionMetadata = TypeVar("TAttentionMetadata", bound=AttentionMetadata)
"""The metadata class of one backend."""


def get_num_prefill_decode_query_kv_tokens(attn_metadata: Any, attn_type: str) -> tuple[int, int, int]:
    """Return the numbers of prefill query tokens, of prefill key and value tokens, and of decode query tokens.

    ======================  ======================  ======================  =====================
    attn_type               prefill queries         prefill keys, values    decode queries
    ======================  ======================  ======================  =====================
    encoder                 ``num_encoder_tokens``  ``num_encoder_tokens``  0
    encoder_decoder         ``num_prefill_tokens``  ``num_encoder_tokens``  ``num_decode_tokens``
    decoder, encoder_only   ``num_prefill_tokens``  ``num_prefill_tokens``  ``num_decode_tokens``
    ======================  ======================  ======================  =====================

    Raise :class:`~attncheck.errors.ReferenceArgumentError` for another type, or if ``num_encoder_tokens`` is needed but
    None. If it is not needed, it may be missing.
    """
    if attn_type == AttentionType.ENCODER:
        encoder_tokens = _num_encoder_tokens(attn_metadata, attn_type)
        return encoder_tokens, encoder_tokens, 0
    if attn_type == AttentionType.ENCODER_DECODER:
        encoder_tokens = _num_encoder_tokens(attn_metadata, attn_type)
        return attn_metadata.num_prefill_tokens, encoder_tokens, attn_metadata.num_decode_tokens
    if attn_type in (AttentionType.DECODER, AttentionType.ENCODER_ONLY):
        prefill_tokens = attn_metadata.num_prefill_tokens
        return prefill_tokens, prefill_tokens, attn_metadata.num_decode_tokens
    raise ReferenceArgumentError("attn_type", attn_type, f"one of {', '.join(AttentionType)}")


def get_seq_len_block_table_args(attn_metadata: Any, is_prompt: bool, attn_type: str) -> tuple[Any, Any, Any]:
    """Return key lengths, longest length and block tables: the metadata's own objects, None included.

    ===============  ===========================  =======================  ======================
    attn_type        lengths                      longest                  tables
    ===============  ===========================  =======================  ======================
    decoder, prompt  ``seq_lens_tensor``          ``max_prefill_seq_len``  ``block_tables``
    decoder, decode  ``seq_lens_tensor``          ``max_decode_seq_len``   ``block_tables``
    encoder_decoder  ``encoder_seq_lens_tensor``  ``max_encoder_seq_len``  ``cross_block_tables``
    encoder          ``encoder_seq_lens_tensor``  ``max_encoder_seq_len``  None
    ===============  ===========================  =======================  ======================

    ``is_prompt`` selects one of the two maxima of a decoder and is otherwise ignored. Raise ``AttributeError`` with the
    name of the type for any other type: ``encoder_only`` has no cache.
    """
    if attn_type == AttentionType.DECODER:
        longest = attn_metadata.max_prefill_seq_len if is_prompt else attn_metadata.max_decode_seq_len
        return attn_metadata.seq_lens_tensor, longest, attn_metadata.block_tables
    if attn_type == AttentionType.ENCODER_DECODER:
        tables = attn_metadata.cross_block_tables
        return attn_metadata.encoder_seq_lens_tensor, attn_metadata.max_encoder_seq_len, tables
    if attn_type == AttentionType.ENCODER:
        return attn_metadata.encoder_seq_lens_tensor, attn_metadata.max_encoder_seq_len, None
    raise AttributeError(f"attention of type {str(attn_type)!r} has no lengths and block tables in the metadata")


def is_all_encoder_attn_metadata_set(attn_metadata: Any) -> bool:
    """Return whether no field that encoder attention needs is None; empty values and 0 count as set."""
    return (
        attn_metadata.encoder_seq_lens is not None
        and attn_metadata.encoder_seq_lens_tensor is not None
        and attn_metadata.max_encoder_seq_len is not None
    )


def is_all_cross_attn_metadata_set(attn_metadata: Any) -> bool:
    """Return whether no field that cross attention needs is None.

    The encoder fields are checked by the metadata's own property ``is_all_encoder_attn_metadata_set``, so that a
    metadata class may require more or fewer than the function of that name.
    """
    return (
        bool(attn_metadata.is_all_encoder_attn_metadata_set)
        and attn_metadata.cross_slot_mapping is not None
        and attn_metadata.cross_block_tables is not None
    )


def _num_encoder_tokens(attn_metadata: Any, attn_type: str) -> int:
    tokens: int | None = attn_metadata.num_encoder_tokens
    if tokens is None:
        raise ReferenceArgumentError("num_encoder_tokens", None, f"a number for attention of type {str(attn_type)!r}")
    return tokens


@dataclass(frozen=True)
class MLADims:
    """Widths of the projections and of the latent cache row."""

    q_lora_rank: int | None
    """Width of the query's latent; None if the query is projected directly."""
    kv_lora_rank: int
    """Width of the latent part of a cache row."""
    qk_nope_head_dim: int
    """Width of q and k without rotary embedding."""
    qk_rope_head_dim: int
    """Width of q and k with rotary embedding."""
    v_head_dim: int
    """Width of a value head."""


def get_mla_dims(model_config: Any) -> MLADims:
    """Return the sizes in ``model_config.hf_text_config``, whose ``q_lora_rank`` may be absent or None.

    ``hf_config`` is not read, because a multi-modal model has its language model's sizes in the text config. Raise
    ``AttributeError`` with the name of the first of the other four sizes that is missing.

    >>> from types import SimpleNamespace
    >>> sizes = SimpleNamespace(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    >>> get_mla_dims(SimpleNamespace(hf_text_config=sizes))
    MLADims(q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    """
    config = model_config.hf_text_config
    return MLADims(
        q_lora_rank=getattr(config, "q_lora_rank", None),
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
    )
