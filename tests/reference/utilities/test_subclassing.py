"""Classes made from a backend and from its metadata."""

from dataclasses import dataclass, fields, is_dataclass

import pytest

from attncheck.errors import ReferenceArgumentError
from attncheck.reference import (
    KV_SHARING_FAST_PREFILL_METADATA_FIELDS,
    subclass_attention_backend,
    subclass_attention_metadata,
)


class Bk:
    word = "inherited"

    @staticmethod
    def get_builder_cls():
        return int


@dataclass
class Meta:
    a: int
    b: int = 3


@dataclass
class AllDefaults:
    a: int = 1


def test_a_backend_with_another_builder():
    local = subclass_attention_backend("Local", Bk, str)
    assert (local.__name__, local.__bases__) == ("LocalBk", (Bk,))
    assert local.get_builder_cls() is local().get_builder_cls() is str
    assert Bk.get_builder_cls() is int
    assert local.word == "inherited"
    assert local.__module__ == __name__
    assert subclass_attention_backend("Local", Bk, str) is not local


def test_a_result_can_be_subclassed_again():
    local = subclass_attention_backend("Local", Bk, str)
    cross = subclass_attention_backend("Cross_", local, float)
    assert [kind.__name__ for kind in cross.__mro__] == ["Cross_LocalBk", "LocalBk", "Bk", "object"]
    assert (cross.get_builder_cls(), local.get_builder_cls()) == (float, str)


def test_metadata_with_more_fields():
    given = list(KV_SHARING_FAST_PREFILL_METADATA_FIELDS)
    fast = subclass_attention_metadata("Fast", Meta, KV_SHARING_FAST_PREFILL_METADATA_FIELDS)
    assert given == KV_SHARING_FAST_PREFILL_METADATA_FIELDS
    assert (fast.__name__, fast.__bases__, fast.__module__) == ("FastMeta", (Meta,), __name__)
    assert [field.name for field in fields(fast)] == ["a", "b", "logits_indices_padded", "num_logits_indices"]
    values = [
        (m.a, m.b, m.logits_indices_padded, m.num_logits_indices)
        for m in (fast(1), fast(1, 2, num_logits_indices=4), fast(1, 2, "x", 5))
    ]
    assert values == [(1, 3, None, 0), (1, 2, None, 4), (1, 2, "x", 5)]
    assert fast(1) == fast(1, 3)
    assert [field.name for field in fields(Meta)] == ["a", "b"]


def test_metadata_without_more_fields_is_another_class():
    same = subclass_attention_metadata("", Meta, [])
    assert same.__name__ == "Meta"
    assert issubclass(same, Meta)
    assert same is not Meta
    assert is_dataclass(same)
    made = same(5)
    assert (made.a, made.b) == (5, 3)
    assert made != Meta(5)


def test_a_field_of_the_base_keeps_its_place_and_gets_the_default():
    subclass = subclass_attention_metadata("New", AllDefaults, [("z", int, 0), ("a", int, 7)])
    assert [(field.name, field.default) for field in fields(subclass)] == [("a", 7), ("z", 0)]
    assert (subclass().a, AllDefaults().a) == (7, 1)


@pytest.mark.parametrize("kind", [int, Meta(1), None])
def test_what_is_no_dataclass_is_refused(kind):
    with pytest.raises(ReferenceArgumentError, match="metadata_cls"):
        subclass_attention_metadata("Fast", kind, [])


def test_a_field_without_default_cannot_follow():
    with pytest.raises(TypeError):
        subclass_attention_metadata("Fast", Meta, [("c", int)])
