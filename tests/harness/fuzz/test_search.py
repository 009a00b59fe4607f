"""Cases that fuzzing draws: every key and path, pairs of values, declared ones, the same for the same seed."""

import os
import subprocess
import sys
from dataclasses import fields
from itertools import combinations, islice
from math import prod
from random import Random
from typing import get_args

import pytest

from attncheck.backends.candidates.torch_state import TorchStateBackend
from attncheck.cases.loader import load_file
from attncheck.cases.model import Case
from attncheck.cases.yaml_text import case_yaml
from attncheck.harness.fuzz.search import (
    NOT_DRAWN,
    RECURRENCES,
    VALUES,
    DeclaredAxes,
    Lengths,
    PairwiseCover,
    all_axes,
    constants_of,
    declared_axes,
    draw_case,
    few_and_small,
    plain,
    questions,
    sources_of,
)
from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import PATHS, BatchSpec, CacheSpec, PaddingSpec, RecurrenceRule, RequestSpec

SPECS = {
    "layer.": LayerSpec,
    "cache.": CacheSpec,
    "padding.": PaddingSpec,
    "batch.": BatchSpec,
    "batch.requests.": RequestSpec,
    "": Case,
}
NAMES = {"suite", "id", "description", "notes", "origin", "layer", "cache", "batch"}
"""Fields without an effect on the question, and those that have entries of their own here."""


@pytest.mark.parametrize("prefix", SPECS)
def test_every_field_is_drawn_or_has_a_reason(prefix):
    own = {f"{prefix}{field.name}" for field in fields(SPECS[prefix])} - NAMES
    assert own <= all_axes().keys() | NOT_DRAWN.keys()


def test_every_path_is_drawn_or_implied_by_the_layer():
    drawn = {path.name for path in VALUES["path"] if path is not None}
    left_out = {"ranks", "indexer"}  # the first starts processes for each case, and few backends have the second
    drawn |= {path.name for path in RECURRENCES}
    assert drawn | {"paged", "encoder_only", "cross", "mla"} == set(PATHS) - left_out


def test_no_value_is_drawn_twice():
    for key, values in (all_axes() | VALUES).items():
        assert len(set(values)) == len(values), key


def test_numbers_of_the_code_come_with_their_neighbours_where_they_can_be_a_size():
    sizes = all_axes([48, 2000])["cache.block_size"]
    assert {47, 48, 49} <= set(sizes)
    assert not {1999, 2000, 2001} & set(sizes)
    assert {1999, 2000, 2001} <= set(all_axes([2000])["layer.sliding_window"])


def test_interpreted_kernels_get_small_sizes_and_what_they_cannot_do_without():
    small = few_and_small(
        {"layer.head_size": (128, 64, 256), "batch.contexts": ("mixed", "long"), "cache.layout": ("NHD",)}
    )
    assert small == {"layer.head_size": (128, 64), "batch.contexts": ("mixed",), "cache.layout": ("NHD",)}


# The numbers of a backend's code are read, and nothing of it runs.


CODE = '''\
"""A docstring with 777 in it, and in text: 888."""
raise RuntimeError("imported")
TILE = 96
def attend(keys, splits=7):
    if keys % 48 == 1 or keys > 2 ** 30:
        return keys[1:5000]
'''


def test_numbers_of_comparisons_names_and_defaults_are_found(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(CODE)
    assert set(constants_of(f"{file}:attend")) == {96, 7, 48, 30}


def test_a_package_of_its_own_is_read_whole():
    names = {path.name for path in sources_of("triton_unified")}
    assert {"backend.py", "tiling.py", "attention.py"} <= names
    assert [path.name for path in sources_of("torch_sdpa")] == ["torch_sdpa.py"]


def test_what_has_no_source_has_no_numbers(tmp_path):
    assert constants_of(str(tmp_path / "missing.py")) == ()
    assert constants_of("no.such.module:Mine") == ()
    (tmp_path / "broken.py").write_text("def (")
    assert constants_of(str(tmp_path / "broken.py")) == ()


# Drawn cases are cases that a file could hold, and contradictions are repaired.


AXES = all_axes([48])


def drawn(choice, seed=0):
    found = draw_case(AXES, choice, Lengths((48,)), seed, "case-1")
    assert found is not None
    return found


def test_a_case_file_holds_what_is_drawn(tmp_path):
    random, file = Random(1), tmp_path / "case.yaml"
    for seed in range(90):
        choice = {key: random.choice(values) for key, values in AXES.items() if random.random() < 0.4} | {
            "after": seed % 3 == 0
        }
        case = drawn(choice, seed).case
        file.write_text(case_yaml(case), encoding="utf-8")
        (read,) = load_file(file).cases
        assert read.hash == case.hash


def test_requested_values_are_kept():
    found = drawn({"layer.sliding_window": 17, "cache.layout": "HND", "padding.tokens": 5, "batch.requests": 3})
    assert (found.case.layer.sliding_window, found.case.cache.layout) == (17, "HND")
    assert found.case.batch.padding.tokens == 5
    assert found.kept.keys() == {"layer.sliding_window", "cache.layout", "padding.tokens", "batch.requests"}


def test_of_a_contradiction_one_key_is_left():
    found = drawn({"layer.attn_type": "encoder_only", "layer.causal": True})
    assert found.case.layer.is_causal == ("layer.causal" in found.kept)
    assert len(found.kept) == 1


def test_the_same_seed_draws_the_same_case():
    choice = {"batch.requests": 5, "path": AXES["path"][-3]}
    assert drawn(choice, 7).case == drawn(choice, 7).case
    assert drawn(choice, 7).case != drawn(choice, 8).case


def test_lengths_lie_at_the_edges_of_the_code():
    choice = {"batch.requests": 1, "batch.queries": "one", "batch.contexts": "edges", "cache.block_size": 1}
    lengths = {drawn(choice, seed).case.batch.max_seq_len % 48 for seed in range(40)}
    assert {47, 0, 1} <= lengths


def test_limits_of_integers_are_drawn():
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
def test_every_path_is_drawn(path):
    choice = {"path": path, "batch.contexts": "long", "layer.attn_chunk_size": 16 if path.name == "local" else None}
    found = [drawn(choice, seed).case.batch.path.name for seed in range(10)]
    assert path.name in found


# All pairs of values occur, in few rows, the same ones for the same seed.


PAIRED = {"a": (1, 2, 3), "b": ("x", "y"), "c": (None, True, False), "d": (0.5, 1.5), "e": (7, 8, 9)}


def rows_of(seed):
    cover, rows = PairwiseCover(PAIRED, seed), []
    for row in cover.rows():
        cover.cover(row)
        rows.append(dict(row))
    return rows


def test_every_two_values_of_two_keys_meet_in_few_rows():
    rows = rows_of(0)
    met = {frozenset(pair) for row in rows for pair in combinations(row.items(), 2)}
    wanted = {frozenset(((a, x), (b, y))) for a, b in combinations(PAIRED, 2) for x in PAIRED[a] for y in PAIRED[b]}
    assert wanted <= met
    assert len(rows) < prod(map(len, PAIRED.values())) / 5


def test_a_pair_that_never_goes_together_is_tried_alone_and_given_up():
    cover, tried = PairwiseCover(PAIRED, 0), []
    for row in cover.rows():
        tried.append(dict(row))
        if row.get("a") == 1 and row.get("b") == "x":
            continue
        cover.cover(row)
    assert {"a": 1, "b": "x"} in tried
    assert not len(cover)


def test_rows_do_not_depend_on_the_hashes_of_texts():
    code = (
        "from attncheck.harness.fuzz.search import PairwiseCover\n"
        f"print([list(row.items()) for row in PairwiseCover({PAIRED!r}, 3).rows()])"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(printed) == 1


# Which values a backend declares, and the order of questions.


def narrow(cases):
    """The declarations of a backend of float16 alone, without sinks, of head sizes 80 and 96."""

    def reasons(case):
        layer = case.layer
        is_declared = layer.dtype == "float16" and layer.head_size in (80, 96) and not layer.sinks and layer.mla is None
        return () if is_declared else ("undeclared",)

    return [reasons(case) for case in cases]


@pytest.fixture(scope="module")
def axes():
    return declared_axes(narrow, ())


def few_questions(axes, seed, count, checks=None):
    return list(islice(questions(axes, narrow, Lengths(), seed, checks), count))


def test_the_values_that_are_declared_are_found(axes):
    assert axes.declared["layer.dtype"] == ("float16",)
    assert axes.declared["layer.sinks"] == (False,)
    assert set(axes.declared["layer.head_size"]) == {80, 96}
    assert axes.declared["layer.mla"] == (None,)
    assert set(axes.undeclared["layer.dtype"]) == {"bfloat16", "float32"}
    assert "cache.layout" not in axes.undeclared


def test_every_value_is_declared_if_no_case_is_undeclared():
    found = declared_axes(lambda cases: [("no",)] * len(cases), ())
    assert len(found.declared["layer.dtype"]) == 3
    assert not found.undeclared


def test_a_backend_of_layers_with_a_state_gets_such_layers_of_every_rule():
    def of_state(cases):
        reasons = [TorchStateBackend.unsupported_reasons(each.layer, each.cache, each.batch) for each in cases]
        has_state = [each.batch.path.name == "recurrence" for each in cases]
        return [tuple(each) if held else ("no state",) for each, held in zip(reasons, has_state, strict=True)]

    axes = declared_axes(of_state, ())
    assert axes.declared["path"] == RECURRENCES
    found = [each.case for each in islice(questions(axes, of_state, Lengths(), 0, ("numerics",)), 120)]
    drawn_options = [case.batch.path.options for case in found]
    assert {options.rule for options in drawn_options} == set(get_args(RecurrenceRule))
    assert {options.mamba_cache_mode for options in drawn_options} == {"none", "all"}
    assert {case.layer.head_size_v for case in found if case.batch.path.options.rule == "mamba1"} == {1}


@pytest.fixture(scope="module")
def found(axes):
    return few_questions(axes, 0, 300)


def test_most_questions_are_declared_and_the_others_require_a_refusal(found):
    undeclared = [each for each in found if narrow([each.case])[0]]
    assert 0 < len(undeclared) < 60
    assert {each.checks for each in undeclared} == {("refusals",)}
    assert all("numerics" in each.checks for each in found if each not in undeclared)


def test_graphs_are_examined_now_and_then_unless_they_are_selected(axes, found):
    assert 0 < sum("cudagraph" in each.checks for each in found if "numerics" in each.checks) < 40
    assert {each.checks for each in few_questions(axes, 0, 5, ("cudagraph",))} == {("cudagraph",)}


def test_the_same_seed_draws_the_same_questions(axes, found):
    first = [each.case.hash for each in found[:40]]
    again, other = ([each.case.hash for each in few_questions(axes, seed, 40)] for seed in (0, 1))
    assert first == again
    assert first != other


def test_behind_the_pairs_cases_are_drawn_by_chance_without_end():
    fixed = {key: (value,) for key, value in plain(all_axes()).items()}
    few = DeclaredAxes(fixed | {"layer.dtype": ("float16", "float32")}, {})
    found = list(islice(questions(few, lambda cases: [()] * len(cases), Lengths(), 0, ("numerics",)), 80))
    assert len({each.case.id for each in found}) == 80
    assert len({each.case.hash for each in found}) > 20
