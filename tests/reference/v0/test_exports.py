"""What ``attncheck.reference.v0`` offers, and that it stands beside today's generation, not in its place."""

import ast
from importlib import import_module
from pathlib import Path
from typing import TypeVar

import pytest

from attncheck import reference
from attncheck.reference import spec, v0


def test_every_name_is_there_and_listed():
    assert set(v0._HOME) == set(v0.__all__)
    for name in v0.__all__:
        value = getattr(v0, name)
        assert value is getattr(import_module(f"attncheck.reference.{v0._HOME[name]}"), name)
        assert name in dir(v0)


def test_what_type_checkers_see_is_what_is_offered():
    tree = ast.parse(Path(v0.__file__).read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert seen == {name: f"attncheck.reference.{home}" for name, home in v0._HOME.items()}


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
