"""Shards of a run: together they are all of its cases, each once."""

from collections import defaultdict
from dataclasses import replace

import pytest
from inline_snapshot import snapshot

from attncheck.cases.loader import load_suite
from attncheck.errors import SelectionError
from attncheck.harness.run.selection import Shard, read_shard

CASES = load_suite("smoke").cases


def sizes(count, cases):
    """The number of cases in each shard."""
    numbers = list(Shard(1, count).numbers(cases).values())
    return [numbers.count(number) for number in range(1, count + 1)]


@pytest.mark.parametrize("count", [1, 2, 3, 7, len(CASES)])
def test_each_case_is_in_one_shard_and_no_shard_is_empty(count):
    assert all(sizes(count, CASES))
    assert Shard(1, count).numbers(CASES).keys() == {case.key for case in CASES}


def test_cases_of_one_layer_and_cache_are_in_one_shard():
    where = Shard(1, 5).numbers(CASES)
    shards = defaultdict(set)
    for case in CASES:
        shards[case.layer, replace(case.cache, num_blocks=None, first_block=None)].add(where[case.key])
    assert {len(numbers) for numbers in shards.values()} == {1}


def test_more_shards_than_layers_divide_the_cases():
    alike = [replace(CASES[0], id=f"case {number}") for number in range(4)]
    assert sizes(4, alike) == [1, 1, 1, 1]


def test_large_cases_are_spread():
    small = replace(CASES[0], cache=replace(CASES[0].cache, num_blocks=64))
    cases = []
    for number in range(6):
        blocks = 60_000 if number < 2 else 64
        layer = replace(small.layer, scale=0.1 + number / 100)
        cases.append(replace(small, id=f"{number}", layer=layer, cache=replace(small.cache, num_blocks=blocks)))
    assert sizes(2, cases) == [3, 3]
    numbers = Shard(1, 2).numbers(cases)
    assert numbers[f"{small.suite}/0"] != numbers[f"{small.suite}/1"]


def test_more_shards_than_cases_are_refused():
    with pytest.raises(SelectionError) as refused:
        Shard(1, 3).numbers(CASES[:2])
    assert str(refused.value) == snapshot("--shard 1/3: 2 cases are selected; give at most as many shards")


def test_an_option_names_a_shard():
    assert read_shard("2/7") == Shard(2, 7)
    assert str(Shard(2, 7)) == "2/7"


@pytest.mark.parametrize("text", ["", "2", "0/7", "8/7", "2/0", "a/b", "2/", "/7", "-1/7", "1/2/3"])
def test_what_names_no_shard_is_refused(text):
    with pytest.raises(SelectionError, match="as 2/7"):
        read_shard(text)
