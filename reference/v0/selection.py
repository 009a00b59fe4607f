"""The fields of first-generation metadata that each attention type reads, and checks that they are set.

The behaviour is vLLM's. Metadata is any object with the attributes named here; it is not modified.
"""

from typing import Any

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.spec import AttentionType


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
