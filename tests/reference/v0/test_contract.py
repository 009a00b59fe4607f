"""The classes of a first-generation backend: what they demand, and what they return."""

from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attncheck.reference.v0 import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionState,
    CommonAttentionState,
    CommonMetadataBuilder,
    MLAAttentionImpl,
)

ABSTRACT = {
    AttentionBackend: "get_name get_impl_cls get_metadata_cls get_builder_cls get_state_cls get_kv_cache_shape "
    "swap_blocks copy_blocks",
    AttentionImpl: "__init__ forward",
    MLAAttentionImpl: "__init__ forward",
    AttentionMetadata: "prefill_metadata decode_metadata",
    AttentionMetadataBuilder: "__init__ prepare build",
    AttentionState: "__init__ graph_capture graph_clone graph_capture_get_metadata_for_batch get_graph_input_buffers "
    "prepare_graph_input_buffers begin_forward",
    CommonAttentionState: "",
    CommonMetadataBuilder: "",
}


@pytest.mark.parametrize("kind", ABSTRACT)
def test_what_a_subclass_must_bring(kind):
    assert kind.__abstractmethods__ == set(ABSTRACT[kind].split())


@dataclass
class Batch(AttentionMetadata):
    a: int = 1
    b: Any = None
    _kept: Any = None

    @property
    def prefill_metadata(self):
        return None

    @cached_property
    def decode_metadata(self):
        return SimpleNamespace()


BASE = [
    "num_prefills",
    "num_prefill_tokens",
    "num_decode_tokens",
    "slot_mapping",
    "multi_modal_placeholder_index_maps",
    "enable_kv_scales_calculation",
]


class Backend(AttentionBackend):
    get_name = get_impl_cls = get_builder_cls = get_state_cls = staticmethod(lambda: None)
    get_kv_cache_shape = swap_blocks = copy_blocks = staticmethod(lambda *args: None)

    @staticmethod
    def get_metadata_cls():
        return Batch


def test_a_backends_defaults():
    assert Backend.accept_output_buffer is False
    assert Backend.full_cls_name() == (__name__, "Backend")
    with pytest.raises(NotImplementedError):
        Backend.get_kv_cache_stride_order()
    assert Backend.make_metadata(1, 2, 3, None, None, True, b=7) == Batch(1, 2, 3, None, None, True, b=7)
    assert AttentionImpl.fused_output_quant_supported(None, quant_key=(torch.float8_e4m3fn, True)) is False


def test_asdict_copies_nothing_and_skips_what_is_named():
    slots, nested = torch.arange(3), [Batch(0, 0, 0, None, None, False)]
    batch = Batch(1, 2, 3, slots, None, True, b=nested)
    batch.handle = object()
    assert batch.decode_metadata is batch.decode_metadata
    found = batch.asdict_zerocopy()
    assert list(found) == [*BASE, "a", "b", "_kept"]
    assert found["slot_mapping"] is slots
    assert found["b"] is nested
    skipped = {"a", "unknown", "_kept", *BASE}
    assert batch.asdict_zerocopy(skipped) == {"b": nested}
    assert skipped == {"a", "unknown", "_kept", *BASE}
