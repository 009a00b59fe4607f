"""Placeholder maps: appended as their tensors are, flattened, refused where the sides differ."""

import pytest

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.v0 import IndexMap, MultiModalPlaceholderMap


def test_a_new_map_is_empty():
    collected = MultiModalPlaceholderMap()
    assert (collected.src_ranges, collected.src_len, collected.dest_ranges, collected.dest_len) == ([], 0, [], 0)
    assert collected.index_map() == IndexMap([], [])


def test_extending_concatenates_both_sides(image):
    collected = MultiModalPlaceholderMap()
    first, second = image(range(2), 2, range(1, 3), 5), image(range(1, 4), 4, range(3), 3)
    collected.extend(first)
    collected.extend(second)
    assert collected.src_ranges == [range(2), range(3, 6)]
    assert collected.dest_ranges == [range(1, 3), range(5, 8)]
    assert collected.index_map() == ([0, 1, 3, 4, 5], [1, 2, 5, 6, 7])
    assert (collected.src_len, collected.dest_len) == (6, 8)
    assert vars(second) == vars(image(range(1, 4), 4, range(3), 3))


def test_a_map_can_be_extended_by_itself(image):
    collected = MultiModalPlaceholderMap()
    collected.extend(image(range(1), 2, range(2, 3), 5))
    collected.extend(collected)
    assert collected.index_map() == ([0, 2], [2, 7])
    assert (collected.src_len, collected.dest_len) == (4, 10)


def test_maps_share_nothing():
    full, empty = MultiModalPlaceholderMap(), MultiModalPlaceholderMap()
    full.src_ranges.append(range(3))
    assert empty.src_ranges == []


def test_sides_of_different_length_are_refused_with_both_numbers(image):
    collected = MultiModalPlaceholderMap()
    collected.extend(image(range(2), 2, range(3), 3))
    with pytest.raises(ReferenceArgumentError, match=r"2 rows.*3"):
        collected.index_map()
