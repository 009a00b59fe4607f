"""What ``attncheck.reference.v0`` exports, beside today's generation and not in its place."""

from importlib import import_module
from typing import TypeVar

import pytest

from attncheck import reference
from attncheck.reference import spec, v0
from attncheck.reference.lazy_exports import homes


def test_every_name_is_there_and_listed():
    home = homes(v0.__file__)
    halves = {"_compute_slot_mapping_numpy", "_compute_slot_mapping_python"}  # private in vLLM, which its callers use
    assert v0.__all__ == sorted(set(home) - halves)
    for name in home:
        assert getattr(v0, name) is getattr(import_module(home[name]), name)
    assert set(v0.__all__) <= set(dir(v0))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = v0.no_such_thing


def test_generations_differ_and_share_the_words():
    assert v0.compute_slot_mapping is not reference.compute_slot_mapping
    assert v0.AttentionMetadataBuilder is not reference.AttentionMetadataBuilder
    assert v0.AttentionType is spec.AttentionType


def test_constants():
    assert v0.PAD_SLOT_ID == -1
    assert "ROCm/HIP" in v0.STR_NOT_IMPL_ENC_DEC_ROCM_HIP
    assert isinstance(v0.TAttentionMetadata, TypeVar)
    assert v0.TAttentionMetadata.__bound__ is v0.AttentionMetadata
    assert v0.IndexMap is v0.MultiModalPlaceholderMap.IndexMap
