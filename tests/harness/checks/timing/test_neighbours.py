"""A batch against others of nearly its shape, by samples made by hand."""

from itertools import cycle

import pytest

from attncheck.harness.checks.timing.neighbours import GLANCE, LOOK, compare


def compared(own, neighbour):
    """The comparison, and how many samples each side gave."""
    sides = [cycle(own), cycle(neighbour)]
    taken = [0, 0]

    def taker(side):
        def take():
            taken[side] += 1
            return next(sides[side])

        return take

    found = compare(1, taker(0), taker(1))
    assert taken[0] == taken[1]
    return found, taken[0]


@pytest.mark.parametrize("neighbour", [[500], [1000], [1200], [900, 1100]])
def test_as_long_is_seen_at_a_glance(neighbour):
    found, taken = compared([1000], neighbour)
    assert taken == GLANCE
    assert not found.is_notable
    assert not found.is_suspect


def test_far_longer_is_suspect():
    found, taken = compared([1000, 1050, 980], [4000, 4100, 3900])
    assert taken == GLANCE + LOOK
    assert found.is_suspect
    assert found.ratio == pytest.approx(4, rel=0.1)


def test_somewhat_longer_is_notable_only():
    found, _ = compared([1000, 1010], [1500, 1510])
    assert found.is_notable
    assert not found.is_suspect


def test_what_noise_may_have_made_is_not_even_notable():
    found, taken = compared([1000, 1000, 4000, 4000, 1000], [4500, 900, 4500, 4500, 1000])
    assert taken == GLANCE + LOOK
    assert not found.is_notable
