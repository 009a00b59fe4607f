"""The first generation of vLLM's attention utilities and contract classes, known as v0.

Metadata is made of Python lists, prompts stand before decodes in a batch, a decode has one new token, and a state
object owns what CUDA graphs read. Kept apart, because ``compute_slot_mapping``, ``AttentionMetadataBuilder`` and
``AttentionMetadata`` are names of other things in the second generation.

Everything public is importable from here and loaded on first use (PEP 562). Must not know: backends, the harness.

>>> from attncheck.reference.v0 import CommonMetadataBuilder, compute_slot_mapping
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attncheck.reference.spec import AttentionType
    from attncheck.reference.v0.builder import CommonMetadataBuilder
    from attncheck.reference.v0.contract import AttentionBackend, AttentionMetadataBuilder, AttentionState
    from attncheck.reference.v0.impl import AttentionImpl, AttentionLayer, MLAAttentionImpl
    from attncheck.reference.v0.metadata import AttentionMetadata, TAttentionMetadata
    from attncheck.reference.v0.mla import MLADims, get_mla_dims
    from attncheck.reference.v0.placeholders import IndexMap, MultiModalPlaceholderMap
    from attncheck.reference.v0.selection import (
        get_num_prefill_decode_query_kv_tokens,
        get_seq_len_block_table_args,
        is_all_cross_attn_metadata_set,
        is_all_encoder_attn_metadata_set,
    )
    from attncheck.reference.v0.slots import (
        PAD_SLOT_ID,
        _compute_slot_mapping_numpy,
        _compute_slot_mapping_python,
        compute_slot_mapping,
        compute_slot_mapping_start_idx,
        is_block_tables_empty,
    )
    from attncheck.reference.v0.state import STR_NOT_IMPL_ENC_DEC_ROCM_HIP, CommonAttentionState

_HOME = {
    "AttentionBackend": "v0.contract",
    "AttentionImpl": "v0.impl",
    "AttentionLayer": "v0.impl",
    "AttentionMetadata": "v0.metadata",
    "AttentionMetadataBuilder": "v0.contract",
    "AttentionState": "v0.contract",
    "AttentionType": "spec",
    "CommonAttentionState": "v0.state",
    "CommonMetadataBuilder": "v0.builder",
    "IndexMap": "v0.placeholders",
    "MLAAttentionImpl": "v0.impl",
    "MLADims": "v0.mla",
    "MultiModalPlaceholderMap": "v0.placeholders",
    "PAD_SLOT_ID": "v0.slots",
    "STR_NOT_IMPL_ENC_DEC_ROCM_HIP": "v0.state",
    "TAttentionMetadata": "v0.metadata",
    "_compute_slot_mapping_numpy": "v0.slots",
    "_compute_slot_mapping_python": "v0.slots",
    "compute_slot_mapping": "v0.slots",
    "compute_slot_mapping_start_idx": "v0.slots",
    "get_mla_dims": "v0.mla",
    "get_num_prefill_decode_query_kv_tokens": "v0.selection",
    "get_seq_len_block_table_args": "v0.selection",
    "is_all_cross_attn_metadata_set": "v0.selection",
    "is_all_encoder_attn_metadata_set": "v0.selection",
    "is_block_tables_empty": "v0.slots",
}
"""Where each name lives in ``attncheck.reference``. A test holds table, imports and modules together.

The two names with an underscore are vLLM's for the halves of ``compute_slot_mapping``, which a provider may have too.
"""

__all__ = [
    "PAD_SLOT_ID",
    "STR_NOT_IMPL_ENC_DEC_ROCM_HIP",
    "AttentionBackend",
    "AttentionImpl",
    "AttentionLayer",
    "AttentionMetadata",
    "AttentionMetadataBuilder",
    "AttentionState",
    "AttentionType",
    "CommonAttentionState",
    "CommonMetadataBuilder",
    "IndexMap",
    "MLAAttentionImpl",
    "MLADims",
    "MultiModalPlaceholderMap",
    "TAttentionMetadata",
    "_compute_slot_mapping_numpy",
    "_compute_slot_mapping_python",
    "compute_slot_mapping",
    "compute_slot_mapping_start_idx",
    "get_mla_dims",
    "get_num_prefill_decode_query_kv_tokens",
    "get_seq_len_block_table_args",
    "is_all_cross_attn_metadata_set",
    "is_all_encoder_attn_metadata_set",
    "is_block_tables_empty",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"attncheck.reference.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
