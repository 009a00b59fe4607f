"""Faults of paths are named: parts lost, doubled, merged wrongly; rows and chunks placed as if nothing were cut."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl
from attncheck.harness.checks import numerics
from attncheck.harness.checks.findings import Broken
from attncheck.harness.driver.session import Session
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.truth.truth import truth_of
from attncheck.reference import paged_attention, visible
from attncheck.reference.spec import (
    DCPOptions,
    FastPrefillOptions,
    MicroBatchOptions,
    RequestSpec,
    SplitKVOptions,
    TreeOptions,
)
from attncheck.reports.run_file.causes import ALTERNATIVE

CPU = torch.device("cpu")


def meaning(backend: Any, case: Any) -> str | None:
    problem = build_problem(case, 0)
    seen = Session(backend, problem, CPU).run()
    finding = numerics.check_numerics(problem, truth_of(problem, CPU), seen)
    assert isinstance(finding, Broken)
    return finding.meaning and finding.meaning.partition(ALTERNATIVE)[0]


class NoCascade(ReferenceBackend):
    """Answers by parts: what ``spoil`` (output, LSE, metadata) does to each answer is the fault."""

    features = ReferenceBackend.features - {"cascade", "local"}


def spoiled(spoil: Callable[[torch.Tensor, torch.Tensor, Any], None]) -> Any:
    class Impl(ReferenceImpl):
        backend = NoCascade

        def attend(self, *args: Any) -> None:
            super().attend(*args)
            spoil(args[6], args[7], args[5])

    return type("Wrong", (NoCascade,), {"get_impl_cls": staticmethod(lambda: Impl)})


def lose_others(output: torch.Tensor, lse: torch.Tensor, metadata: Any) -> None:
    if not metadata.common.causal:
        lse.fill_(-math.inf)


def lose_last(output: torch.Tensor, lse: torch.Tensor, metadata: Any) -> None:
    if metadata.common.causal:
        lse.fill_(-math.inf)


def double_last(output: torch.Tensor, lse: torch.Tensor, metadata: Any) -> None:
    if metadata.common.causal:
        lse += math.log(2)


def base_two(output: torch.Tensor, lse: torch.Tensor, metadata: Any) -> None:
    lse /= math.log(2)


def fill_empty(output: torch.Tensor, lse: torch.Tensor, metadata: Any) -> None:
    lse[torch.isneginf(lse)] = 0.0


def level(output: torch.Tensor, lse: torch.Tensor, metadata: Any) -> None:
    lse.fill_(1.0)


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (lose_others, "only part 1 of the keys is seen|part 0 of the keys is missing"),
        (lose_last, "part 1 of the keys is missing|only part 0 of the keys is seen|the keys of this step are missing"),
        (double_last, "part 1 of the keys is counted twice"),
        (base_two, "the parts are merged by an LSE to base 2"),
        (level, "the outputs of the parts are averaged"),
    ],
)
def test_what_is_wrong_with_a_part_is_named(make_case: Any, spoil: Any, cause: str) -> None:
    batch = [RequestSpec(query_len=n, seq_len=60 + n, shared_prefix=32) for n in (1, 5)]
    for case in (
        make_case(*batch, path="cascade"),
        make_case((1, 90), (6, 61), path="split_kv", options=SplitKVOptions(parts=2)),
    ):
        found = meaning(spoiled(spoil), case)
        assert found is not None
        assert found.startswith(tuple(cause.split("|"))), found
        assert found.endswith("a reference with this fault gives the same output in all rows")


def test_an_empty_part_with_a_weight_is_named(make_case: Any) -> None:
    case = make_case((1, 2), (1, 90), path="dcp", options=DCPOptions(size=4))
    found = meaning(spoiled(fill_empty), case)
    assert found is not None
    assert found.startswith("a part in which a row sees nothing is merged with an LSE of 0")


def test_sinks_in_every_part_are_named(make_case: Any) -> None:
    case = make_case((1, 90), (6, 61), (1, 200), sinks=True, path="split_kv", options=SplitKVOptions(parts=2))

    class Impl(ReferenceImpl):
        backend = NoCascade

        def params(self, metadata: Any) -> Any:
            return replace(super().params(metadata), sinks=case.layer.sink_logits)

    backend = type("Wrong", (NoCascade,), {"get_impl_cls": staticmethod(lambda: Impl)})
    assert (
        meaning(backend, case)
        == "every part carries the sinks: a reference with this fault gives the same output in all rows"
    )


def test_a_piece_that_does_not_see_the_one_before_is_named(make_case: Any) -> None:
    """Of seven rows at position 33 on, the last four see nothing of the first three."""

    def hide(metadata: Any, request: int, q: Any, k: Any) -> Any:
        lost = (metadata.seq_lens[request] == 40) & (k >= 33) & (k < 36)
        return q, torch.where(lost, 10**6, k)

    case = make_case((7, 40), (9, 30), path="micro_batch", options=MicroBatchOptions(cuts=(3,)))
    found = meaning(with_mask(hide), case)
    assert (
        found
        == "the keys of the pieces before are missing: a reference with this fault gives the same output in all rows"
    )


def with_mask(places: Callable[[Any, int, Any, Any], Any]) -> Any:
    """Masks rows and keys at other places than theirs."""

    class Impl(ReferenceImpl):
        def attend(self, *args: Any) -> None:
            query, caches, metadata, output = args[1], args[4], args[5], args[6]
            params, common = self.params(metadata), metadata.common

            def mask(request: int, q: Any, k: Any) -> Any:
                return visible(params, *places(metadata, request, q, k))

            where = common.block_table_tensor, common.seq_lens, common.query_start_loc
            out, lse = paged_attention(query[: metadata.num_rows], *caches, *where, params, mask_fn=mask)
            output[: len(out)], args[7][: len(out)] = out.to(output.dtype), lse.float()

    return type("Wrong", (ReferenceBackend,), {"get_impl_cls": staticmethod(lambda: Impl)})


def test_chunks_counted_from_the_first_row_are_named(make_case: Any) -> None:
    def from_context(metadata: Any, request: int, q: Any, k: Any) -> Any:
        context = metadata.seq_lens[request] - metadata.query_lens[request]
        return q - context, k - context

    case = make_case((9, 41), (20, 77), attn_chunk_size=16, path="paged")
    found = meaning(with_mask(from_context), case)
    assert found is not None
    assert found.startswith("chunks are counted from the first new row")


def test_rows_of_fast_prefill_counted_from_the_front_are_named(make_case: Any) -> None:
    def from_front(metadata: Any, request: int, q: Any, k: Any) -> Any:
        return q - (18, 38)[request], k

    options = FastPrefillOptions(rows=2)
    case = make_case((20, 84), (40, 60), path="fast_prefill", options=options, kv_sharing=True)
    found = meaning(with_mask(from_front), case)
    assert found is not None
    assert found.startswith("the rows are treated as the first new ones of their requests")


def test_a_tree_without_ancestors_is_named(make_case: Any) -> None:
    class Impl(ReferenceImpl):
        def _tree_of_step(self, metadata: Any) -> Any:
            tree = super()._tree_of_step(metadata)
            return None if tree is None else torch.eye(len(tree), dtype=torch.bool)

    backend = type("Wrong", (ReferenceBackend,), {"get_impl_cls": staticmethod(lambda: Impl)})
    case = make_case((4, 40), (4, 33), path="tree", options=TreeOptions(parents=(-1, 0, 0, 1)))
    found = meaning(backend, case)
    assert (
        found
        == "a row of the tree sees the context and itself, and no ancestor: a reference with this fault gives the same output in all rows"
    )
