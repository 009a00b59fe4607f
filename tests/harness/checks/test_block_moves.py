"""Functions on pages: their arguments and caches, and the findings about wrong ones."""

from typing import Any

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.backends.candidates.reference import ReferenceBackend
from attncheck.errors import ReferenceArgumentError
from attncheck.harness.checks.cache_write import check_block_moves
from attncheck.harness.checks.findings import Broken, Finding, Holds, NotExamined
from attncheck.harness.problem.problem import build_problem
from attncheck.reference import copy_blocks, reshape_and_cache, swap_blocks

CPU = torch.device("cpu")
FIRST = Holds({"slots_written": 3})


def judge(case: Any, first: Finding = FIRST, **functions: Any) -> Finding:
    backend = type("Mine", (ReferenceBackend,), {"functions": staticmethod(lambda: functions)})
    return check_block_moves(build_problem(case, 0), backend, CPU, first)


RIGHT = {"reshape_and_cache": reshape_and_cache, "copy_blocks": copy_blocks, "swap_blocks": swap_blocks}


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("block_size", [1, 16])
def test_the_reference_is_right(make_case: Any, layout: str, dtype: str, block_size: int) -> None:
    case = make_case(cache={"layout": layout, "block_size": block_size}, dtype=dtype, head_size_v=32)
    assert judge(case, **RIGHT) is FIRST


def test_what_was_found_before_stays(make_case: Any) -> None:
    skipped = NotExamined(("no writer",))
    assert judge(make_case(), skipped, **RIGHT) is skipped
    assert judge(make_case(), skipped) is skipped


def test_functions_get_arguments_that_reveal_faults(make_case: Any) -> None:
    seen: dict[str, Any] = {}

    def copy(caches: Any, mapping: Any) -> None:
        seen["copy"] = ([cache.clone() for cache in caches], mapping.tolist())
        copy_blocks(caches, mapping)

    def write(key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any, **scales: Any) -> None:
        seen["write"] = (key.shape, key_cache.stride(), slots.tolist(), scales)
        reshape_and_cache(key, value, key_cache, value_cache, slots, **scales)

    assert judge(make_case(head_size_v=32), copy_blocks=copy, reshape_and_cache=write) is FIRST
    (key_cache, value_cache), pairs = seen["copy"]
    assert key_cache.shape[1:] == (16, 2, 64)
    assert value_cache.shape[1:] == (16, 2, 32)
    sources, destinations = [s for s, _ in pairs], [d for _, d in pairs]
    assert len(set(sources)) < len(sources)
    assert len(set(destinations)) == len(destinations)
    assert not set(sources) & set(destinations)
    rows, strides, slots, scales = seen["write"]
    assert rows[0] > len(slots) > slots.count(-1) > 1
    assert strides[0] > 16 * 2 * 64  # space between pages
    assert scales["k_scale"] != scales["v_scale"]


def test_without_views_pages_lie_side_by_side(make_case: Any) -> None:
    seen: list[Any] = []

    def copy(caches: Any, mapping: Any) -> None:
        seen.extend(caches)
        copy_blocks(caches, mapping)

    judge(make_case(inputs=("needles",)), copy_blocks=copy)
    assert all(cache.is_contiguous() for cache in seen)


def test_codes_of_an_fp8_cache_are_written_with_its_scales(make_case: Any) -> None:
    case = make_case(cache={"kv_cache_dtype": "fp8_e5m2", "k_scale": 0.3})
    dtypes: set[Any] = set()

    def write(key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any, **scales: Any) -> None:
        dtypes.add(key_cache.dtype)
        reshape_and_cache(key, value, key_cache, value_cache, slots, **scales)

    def forget(key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any, **scales: Any) -> None:
        reshape_and_cache(key, value, key_cache, value_cache, slots)

    assert judge(case, **RIGHT) is FIRST
    assert judge(case, reshape_and_cache=write) is FIRST
    assert dtypes == {torch.float8_e5m2}
    found = judge(case, reshape_and_cache=forget)
    assert isinstance(found, Broken)
    assert found.summary.startswith("reshape_and_cache: ")
    assert found.summary == snapshot("reshape_and_cache: 10 of 13 pages of key_cache are wrong, the first is page 0")
    assert "key_cache" in found.summary


def test_memory_between_pages_is_compared(make_case: Any) -> None:
    def copy(caches: Any, mapping: Any) -> None:
        copy_blocks(caches, mapping)
        page = caches[0][0].numel()
        caches[0].as_strided((1,), (1,), page).fill_(9)

    found = judge(make_case(), copy_blocks=copy)
    assert found == Broken("copy_blocks wrote between the pages of key_cache")


def test_a_changed_source_is_named(make_case: Any) -> None:
    def swap(src: Any, dst: Any, mapping: Any) -> None:
        swap_blocks(src, dst, mapping)
        src[0] = 0

    assert judge(make_case(), swap_blocks=swap) == Broken("swap_blocks changed its argument src")


def test_pages_not_written_are_found(make_case: Any) -> None:
    found = judge(make_case(), swap_blocks=lambda src, dst, mapping: None)
    assert isinstance(found, Broken)
    assert found.summary == snapshot("swap_blocks: 5 of 13 pages of dst are wrong, the first is page 3")
    assert "swap_blocks" in found.summary
    assert "5 of 13" in found.summary
    assert found.meaning == snapshot("no page was written as block_mapping requires")


def test_a_question_is_one_the_reference_answers(make_case: Any) -> None:
    # Chains and destinations named twice are refused or undefined; a reference that refused would raise here.
    try:
        assert judge(make_case(cache={"block_size": 2}, num_kv_heads=1), **RIGHT) is FIRST
    except ReferenceArgumentError as error:
        pytest.fail(str(error))
