"""Caches of hybrid models: wrong backends are named by what they take for granted; right ones pass."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl
from attncheck.backends.candidates.torch_mla import TorchMLABackend
from attncheck.backends.conventions import Conventions
from attncheck.backends.impl import get_current_vllm_config
from attncheck.harness.checks.again import RightRows
from attncheck.harness.checks.findings import Broken, Holds
from attncheck.harness.checks.geometry import other_geometry
from attncheck.harness.driver.foreign_code import StageError
from attncheck.harness.driver.session import Session
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.truth.truth import truth_of
from attncheck.reference.spec import MLASpec
from attncheck.reference.step_spec import RequestSpec

UNTOUCHED = Conventions(padded_rows="untouched")


def first_page_stride(cache: torch.Tensor) -> torch.Tensor:
    """Return the cache as a kernel sees it that takes its pages to follow one another."""
    _, size, heads, width = cache.shape
    strides = (size * heads * width, *cache.stride()[1:])
    return cache.as_strided(cache.shape, strides)


def dense_heads(cache: torch.Tensor) -> torch.Tensor:
    """Return the cache as a kernel sees it that reads the stride of the blocks, and takes each page to be dense."""
    _, size, _, width = cache.shape
    return cache.as_strided(cache.shape, (cache.stride(0), width, size * width, 1))


def flat_copy(cache: torch.Tensor) -> torch.Tensor:
    """Return rows by slot: a view of a dense NHD cache, and a copy of any other."""
    return cache.reshape(-1, *cache.shape[2:]).unflatten(0, cache.shape[:2])


def flat_view(cache: torch.Tensor) -> torch.Tensor:
    return cache.view(-1, *cache.shape[2:]).unflatten(0, cache.shape[:2])


def made(read: Any, write: Any, **members: Any) -> Any:
    """Return the reference, whose impl sees the cache through ``read``, and writes it through ``write``."""

    class Impl(ReferenceImpl):
        def write(self, layer: Any, key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any) -> None:
            super().write(layer, key, value, write(key_cache), write(value_cache), slots)

        def attend(self, layer: Any, query: Any, key: Any, value: Any, caches: Any, *rest: Any) -> None:
            super().attend(layer, query, key, value, tuple(map(read, caches)), *rest)

    backend = type("Tried", (ReferenceBackend,), {"get_impl_cls": staticmethod(lambda: Impl)} | members)
    Impl.backend = backend  # type: ignore[assignment]
    return backend


def as_it_is(cache: torch.Tensor) -> torch.Tensor:
    return cache


APART = "keys are read or written elsewhere than the strides of kv_cache state"
CASES = [((1, 37), (5, 40), (33, 33), (1, 130 + more)) for more in range(12)]
"""Batches of different hashes, which select different pool orders."""


def orders_in(found: Any) -> set[str]:
    """Return the pool orders that a finding lists among its variations."""
    return {note.rpartition("cache.pool_order ")[2] for note in found.notes if "cache.pool_order" in note}


@pytest.mark.parametrize(
    ("read", "write"),
    [(first_page_stride, first_page_stride), (first_page_stride, as_it_is), (as_it_is, flat_copy)],
    ids=["both take pages to follow", "the reader does", "the writer writes a copy"],
)
def test_pages_that_are_taken_to_follow_one_another(judge: Any, make_case: Any, read: Any, write: Any) -> None:
    found = judge("invariance", made(read, write, packing="split_first", conventions=UNTOUCHED), make_case())
    assert isinstance(found, Broken)
    assert found.summary.startswith("right at first, wrong with cache.pool_order BL: ")
    assert (found.meaning or "").startswith(APART)
    assert 'or declare cache_strides="pages"' in (found.meaning or "")


def test_heads_that_are_taken_to_lie_within_their_page(judge: Any, make_case: Any) -> None:
    backend = made(dense_heads, dense_heads, packing="split_first", conventions=UNTOUCHED)
    wrong, right = set[str](), set[str]()
    for case in CASES:
        found = judge("invariance", backend, make_case(*case, cache={"layout": "HND"}))
        if isinstance(found, Broken):
            wrong.add(found.summary.partition(":")[0].removeprefix("right at first, wrong with cache."))
        else:
            right |= orders_in(found)
        if len(wrong) + len(right) == 3:
            break
    assert (wrong, right) == ({"pool_order BHL", "pool_order LHB"}, {"BL"})


def test_an_order_that_the_shape_cannot_have_is_not_tried(judge: Any, make_case: Any) -> None:
    shape = ReferenceBackend.get_kv_cache_shape

    def only_two_heads(cls: Any, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> Any:
        if num_kv_heads == 4:
            raise RuntimeError("two heads alone")
        return shape.__func__(cls, num_blocks, block_size, num_kv_heads, head_size)  # type: ignore[attr-defined]

    members = {"packing": "split_first", "get_kv_cache_shape": classmethod(only_two_heads)}
    seen = set[str]()
    for case in CASES[:6]:
        found = judge("invariance", made(as_it_is, as_it_is, **members), make_case(*case, cache={"layout": "HND"}))
        assert isinstance(found, Holds)
        seen |= orders_in(found)
    assert seen == {"BL"}


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("packing", ["split_first", "split_second", "content", "plane"])
def test_strides_that_are_read_are_right_in_every_pool(judge: Any, make_case: Any, packing: Any, layout: str) -> None:
    backend, seen = made(as_it_is, as_it_is, packing=packing), set[str]()
    wanted = {"BL"} if layout == "NHD" else {"BL", "BHL", "LHB"}
    for case in CASES:
        found = judge("invariance", backend, make_case(*case, cache={"layout": layout}))
        assert isinstance(found, Holds)
        seen |= orders_in(found)
        if seen == wanted:
            break
    assert seen == wanted


def test_a_latent_cache_lies_in_blocks_of_several_layers(judge: Any, make_case: Any) -> None:
    mla = MLASpec(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
    case = make_case(num_kv_heads=1, head_size=40, mla=mla, path="mla")
    found = judge("invariance", TorchMLABackend, case)
    assert isinstance(found, Holds)
    assert any("cache.pool_order BL" in note for note in found.notes)


def test_a_backend_may_raise_unless_it_declares_the_strides(judge: Any, make_case: Any) -> None:
    members = {"packing": "split_first", "conventions": UNTOUCHED}
    found = judge("invariance", made(flat_view, flat_view, **members), make_case())
    assert isinstance(found, Holds)
    assert any(
        note.startswith("not held against the backend: forward of the step with cache.pool") for note in found.notes
    )
    declared = replace(UNTOUCHED, cache_strides="blocks")
    with pytest.raises(StageError, match="pool_order BL"):
        judge("invariance", made(flat_view, flat_view, **members | {"conventions": declared}), make_case())


@pytest.mark.parametrize(
    "members",
    [
        {"conventions": replace(UNTOUCHED, cache_strides="pages")},
        {"conventions": UNTOUCHED, "indexes_kv_by_block_stride": classmethod(lambda _cls: False)},
    ],
    ids=["a convention", "vLLM's method"],
)
def test_a_backend_that_needs_dense_pages_gets_no_others(judge: Any, make_case: Any, members: Any) -> None:
    backend = made(first_page_stride, first_page_stride, packing="split_first", **members)
    found = judge("invariance", backend, make_case())
    assert isinstance(found, Holds)
    assert not any("pool_order" in note for note in found.notes)
    assert any("manager_block_size" in note for note in found.notes)


def test_memory_between_the_pages_belongs_to_another_layer(judge: Any, make_case: Any) -> None:
    def spoil(cache: torch.Tensor) -> torch.Tensor:
        if cache.stride(0) > 2 * cache[0].numel():
            cache.as_strided((8,), (1,), 0).zero_()  # in the first page of the other layer
        return cache

    found = judge("invariance", made(as_it_is, spoil, packing="split_second", conventions=UNTOUCHED), make_case())
    assert isinstance(found, Broken)
    assert "bytes between the slots of the pool were changed" in found.summary


def test_a_layout_that_is_learned_from_the_writer_lies_apart_too(judge: Any, make_case: Any) -> None:
    def reversed_pages(cache: torch.Tensor) -> torch.Tensor:
        """Return the cache with the tokens of each page in reverse order, which only the backend knows."""
        order = range(cache.shape[1] - 1, -1, -1)
        return cache.index_select(1, torch.tensor(list(order), device=cache.device))

    class Impl(ReferenceImpl):
        def write(self, layer: Any, key: Any, value: Any, *rest: Any) -> None:
            *caches, slots = rest
            size = caches[0].shape[1]
            moved = torch.where(slots < 0, slots, slots // size * size + size - 1 - slots % size)
            super().write(layer, key, value, *caches, moved)

        def attend(self, layer: Any, query: Any, key: Any, value: Any, caches: Any, *rest: Any) -> None:
            super().attend(layer, query, key, value, tuple(map(reversed_pages, caches)), *rest)

    members = {"get_impl_cls": staticmethod(lambda: Impl), "kv_cache_codec": classmethod(lambda *_: None)}
    backend = type("Tried", (ReferenceBackend,), members)
    found = judge("invariance", backend, make_case(cache={"pool_order": "BL"}))
    assert isinstance(found, Holds)
    assert isinstance(judge("cache_write", backend, make_case(cache={"pool_order": "BL"})), Holds)


def by_blocks(columns: Any) -> Any:
    """Return a backend that reads one column of the block table for each block of the manager."""

    class Impl(ReferenceImpl):
        def __init__(self, *args: Any, **keywords: Any) -> None:
            super().__init__(*args, **keywords)
            self.block_size = get_current_vllm_config().cache_config.block_size

        def attend(self, layer: Any, query: Any, key: Any, value: Any, caches: Any, metadata: Any, *rest: Any) -> None:
            run = self.block_size // caches[0].shape[1]
            table = columns(metadata.common.block_table_tensor, run)
            metadata = replace(metadata, common=replace(metadata.common, block_table_tensor=table))
            super().attend(layer, query, key, value, caches, metadata, *rest)

    return type("Tried", (ReferenceBackend,), {"get_impl_cls": staticmethod(lambda: Impl)})


def test_blocks_of_the_manager_are_runs_of_pages(judge: Any, make_case: Any) -> None:
    def of_runs(table: torch.Tensor, run: int) -> torch.Tensor:
        pages = table[:, ::run, None] + torch.arange(run, dtype=table.dtype)
        return pages.flatten(1)[:, : table.shape[1]]

    def of_blocks(table: torch.Tensor, run: int) -> torch.Tensor:
        return table[:, ::run].repeat_interleave(run, 1)[:, : table.shape[1]]

    for case in CASES:
        assert isinstance(judge("invariance", by_blocks(of_runs), make_case(*case)), Holds)
        found = judge("invariance", by_blocks(of_blocks), make_case(*case))
        assert isinstance(found, Broken)
        assert found.summary.startswith("right at first, wrong with cache.manager_block_size ")
        assert "cache_config.block_size" in (found.meaning or "")


def geometries(backend: Any, case: Any) -> list[Any]:
    """Return the variations of a case whose first step is right."""
    device = torch.device("cpu")
    problem = build_problem(case, 0)
    session = Session(backend, problem, device)
    rows = RightRows.of(problem, truth_of(problem, device), session.run(), backend.conventions)
    return list(other_geometry(rows, session))


def test_a_fault_of_a_second_pool_is_not_called_one_of_repetition(make_case: Any) -> None:
    first = list[Any]()

    class Impl(ReferenceImpl):
        def attend(self, layer: Any, query: Any, *rest: Any) -> None:
            first.append(self)
            super().attend(layer, query if self is first[0] else query * 2, *rest)

    backend = type("Tried", (ReferenceBackend,), {"get_impl_cls": staticmethod(lambda: Impl)})
    (variation,) = geometries(backend, make_case())
    found = variation.wrong()
    assert found.summary.startswith("right at first, wrong in other pages of a new pool, on a new impl and builder: ")


def test_a_case_without_another_geometry_has_no_further_step(make_case: Any) -> None:
    conventions = replace(ReferenceBackend.conventions, cache_strides="pages")
    backend = type("Dense", (ReferenceBackend,), {"conventions": conventions})
    assert len(geometries(backend, make_case())) == 1  # blocks of several pages
    requests = tuple(RequestSpec(query_len=1, seq_len=40 + more, shared_prefix=32) for more in range(3))
    assert geometries(backend, make_case(*requests, path="cascade")) == []
