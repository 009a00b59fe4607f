"""Drawn cases are cases that a file could hold, and contradictions are repaired."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from attncheck.cases.loader import load_file
from attncheck.cases.yaml_text import case_yaml
from attncheck.harness.fuzz.search import Lengths, all_axes, draw_case

AXES = all_axes([48])


def drawn(choice: dict[str, Any], seed: int = 0) -> Any:
    found = draw_case(AXES, choice, Lengths((48,)), seed, "case-1")
    assert found is not None
    return found


def test_a_case_file_holds_what_is_drawn(tmp_path: Path) -> None:
    random, file = Random(1), tmp_path / "case.yaml"
    for seed in range(90):
        choice = {key: random.choice(values) for key, values in AXES.items() if random.random() < 0.4} | {
            "after": seed % 3 == 0
        }
        case = drawn(choice, seed).case
        file.write_text(case_yaml(case), encoding="utf-8")
        (read,) = load_file(file).cases
        assert read.hash == case.hash


def test_requested_values_are_kept() -> None:
    found = drawn({"layer.sliding_window": 17, "cache.layout": "HND", "padding.tokens": 5, "batch.requests": 3})
    assert (found.case.layer.sliding_window, found.case.cache.layout) == (17, "HND")
    assert found.case.batch.padding.tokens == 5
    assert found.kept.keys() == {"layer.sliding_window", "cache.layout", "padding.tokens", "batch.requests"}


def test_of_a_contradiction_one_key_is_left() -> None:
    found = drawn({"layer.attn_type": "encoder_only", "layer.causal": True})
    assert found.case.layer.is_causal == ("layer.causal" in found.kept)
    assert len(found.kept) == 1


def test_the_same_seed_draws_the_same_case() -> None:
    choice = {"batch.requests": 5, "path": AXES["path"][-3]}
    assert drawn(choice, 7).case == drawn(choice, 7).case
    assert drawn(choice, 7).case != drawn(choice, 8).case


def test_lengths_lie_at_the_edges_of_the_code() -> None:
    choice = {"batch.requests": 1, "batch.queries": "one", "batch.contexts": "edges", "cache.block_size": 1}
    lengths = {drawn(choice, seed).case.batch.max_seq_len % 48 for seed in range(40)}
    assert {47, 0, 1} <= lengths


def test_limits_of_integers_are_drawn() -> None:
    for seed in range(8):
        narrow = drawn({"batch.contexts": "beyond 16 bits", "batch.queries": "prompts"}, seed)
        assert narrow.kept["batch.contexts"] == "beyond 16 bits"
        assert narrow.case.batch.max_seq_len > 2**15
    wide = drawn({"layer.head_size": 256, "batch.contexts": "beyond 16 bits"})
    assert wide.kept.keys() == {"layer.head_size"}
    last = AXES["cache.first_block"][-1]
    case = drawn({"cache.first_block": last, "cache.block_size": 12, "layer.num_kv_heads": 3}).case
    elements = 12 * 3 * case.layer.head_size
    assert case.cache.first_block * elements < 2**31 <= (case.cache.first_block + 2) * elements


@pytest.mark.parametrize("path", [path for path in AXES["path"] if path is not None], ids=lambda path: path.name)
def test_every_path_is_drawn(path: Any) -> None:
    choice = {"path": path, "batch.contexts": "long", "layer.attn_chunk_size": 16 if path.name == "local" else None}
    found = [drawn(choice, seed).case.batch.path.name for seed in range(10)]
    assert path.name in found


def test_a_modifier_that_needs_keys_gets_them() -> None:
    choice = {"layer.sliding_window": 100, "batch.queries": "one", "batch.contexts": "none"}
    assert all(drawn(choice, seed).case.batch.max_seq_len > 100 for seed in range(10))
