"""The constants, types and enums beside the functions."""

from types import SimpleNamespace
from typing import TypeVar, get_args

import pytest
import torch

from attncheck import reference
from attncheck.reference import AttentionCGSupport, CommonAttentionMetadata, PerLayerParameters


def test_constants():
    assert get_args(reference.KVCacheLayoutType) == ("NHD", "HND")
    assert reference.PAD_SLOT_ID == -1
    assert type(reference.PAD_SLOT_ID) is int
    assert isinstance(reference.M, TypeVar)
    assert reference.M.__name__ == "M"
    assert reference._KV_CACHE_LAYOUT_OVERRIDE is None
    reference.logger.info("a word about %s", "nothing")


def test_fast_prefill_fields_are_two_triples():
    (first, second) = reference.KV_SHARING_FAST_PREFILL_METADATA_FIELDS
    assert first == ("logits_indices_padded", torch.Tensor | None, None)
    assert second == ("num_logits_indices", int, 0)


def test_graph_support_has_four_unordered_levels():
    assert {level.name: level.value for level in AttentionCGSupport} == {
        "NEVER": 0,
        "UNIFORM_SINGLE_TOKEN_DECODE": 1,
        "UNIFORM_BATCH": 2,
        "ALWAYS": 3,
    }
    assert AttentionCGSupport(2) is AttentionCGSupport.UNIFORM_BATCH
    with pytest.raises(TypeError):
        _ = AttentionCGSupport.NEVER < AttentionCGSupport.ALWAYS
    with pytest.raises(ValueError, match="4"):
        AttentionCGSupport(4)


def test_a_dummy_batch_with_inconsistent_numbers_can_be_made(batch_a):
    dummy = CommonAttentionMetadata(*[torch.zeros(1)] * 5, 7, -3, 0, 0, "no table", None)
    assert (dummy.num_reqs, dummy.num_actual_tokens, dummy.block_table_tensor) == (7, -3, "no table")
    assert batch_a.causal is True


def test_verdicts_are_no_part_of_equality():
    assert PerLayerParameters(1, None, 0.5, False, True, True) == PerLayerParameters(1, None, 0.5)
    assert PerLayerParameters(1, None, 0.5) != PerLayerParameters(1, 0.0, 0.5)
    assert PerLayerParameters(1, None, 0.5) != PerLayerParameters(1, None, 0.5, has_sinks=True)
    changed = PerLayerParameters(1, None, 0.5)
    changed.window_left = 2
    assert changed.window_left == 2


def test_fast_prefill_metadata_is_known_by_its_attributes():
    protocol = reference.KVSharingFastPrefillMetadata
    assert isinstance(SimpleNamespace(logits_indices_padded=None, num_logits_indices=None), protocol)
    assert not isinstance(SimpleNamespace(num_logits_indices=1), protocol)
    assert not isinstance(SimpleNamespace(logits_indices_padded=None), protocol)
