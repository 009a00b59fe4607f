"""Faults of paths are named: parts lost, doubled, merged wrongly; rows and chunks placed as if nothing were cut."""

import math
from dataclasses import replace

import pytest
import torch

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl
from attncheck.reference import paged_attention, visible
from attncheck.reference.step_spec import (
    DCPOptions,
    FastPrefillOptions,
    MicroBatchOptions,
    RequestSpec,
    SplitKVOptions,
    TreeOptions,
)
from attncheck.reports.run_file.causes import ALTERNATIVE, EVIDENCE

FITS = f"{EVIDENCE.format('output')} all rows"
BY_PARTS = ReferenceBackend.features - {"cascade", "local"}
"""Features of a backend whose answers are merged by the harness."""


@pytest.fixture
def meaning(finding_of):
    def found(case, features=None, **members):
        finding = finding_of(case, features=features, **members)
        return str(finding.meaning).partition(ALTERNATIVE)[0]

    return found


def spoiled(spoil):
    def attend(self, *args):
        ReferenceImpl.attend(self, *args)
        spoil(args[6], args[7], args[5])

    return attend


def lose_others(output, lse, metadata):
    if not metadata.common.causal:
        lse.fill_(-math.inf)


def lose_last(output, lse, metadata):
    if metadata.common.causal:
        lse.fill_(-math.inf)


def double_last(output, lse, metadata):
    if metadata.common.causal:
        lse += math.log(2)


def base_two(output, lse, metadata):
    lse /= math.log(2)


def fill_empty(output, lse, metadata):
    lse[torch.isneginf(lse)] = 0.0


def level(output, lse, metadata):
    lse.fill_(1.0)


CASCADE = {"path": "cascade"}
SPLIT = {"path": "split_kv", "options": SplitKVOptions(parts=2)}


@pytest.mark.parametrize(
    ("spoil", "path", "cause"),
    [
        (lose_others, CASCADE, "only part 1 of the keys is seen|part 0 of the keys is missing"),
        (lose_last, SPLIT, "part 1 of the keys is missing|only part 0 of the keys is seen|the keys of this step are"),
        (double_last, SPLIT, "part 1 of the keys is counted twice"),
        (base_two, CASCADE, "the parts are merged by an LSE to base 2"),
        (level, SPLIT, "the outputs of the parts are averaged"),
    ],
)
def test_what_is_wrong_with_a_part_is_named(make_case, meaning, spoil, path, cause):
    batch = [RequestSpec(query_len=n, seq_len=60 + n, shared_prefix=32) for n in (1, 5)]
    case = make_case(*(batch if path is CASCADE else ((1, 90), (6, 61))), **path)
    found = meaning(case, BY_PARTS, attend=spoiled(spoil))
    assert found.startswith(tuple(cause.split("|"))), found
    assert found.endswith(FITS)


def test_an_empty_part_with_a_weight_is_named(make_case, meaning):
    case = make_case((1, 2), (1, 90), path="dcp", options=DCPOptions(size=4))
    found = meaning(case, BY_PARTS, attend=spoiled(fill_empty))
    assert found.startswith("a part in which a row sees nothing is merged with an LSE of 0")


def test_sinks_in_every_part_are_named(make_case, meaning):
    case = make_case((1, 90), (6, 61), (1, 200), sinks=True, **SPLIT)

    def params(self, metadata):
        return replace(ReferenceImpl.params(self, metadata), sinks=case.layer.sink_logits)

    assert meaning(case, BY_PARTS, params=params) == f"every part carries the sinks{FITS}"


def test_a_piece_that_does_not_see_the_one_before_is_named(make_case, meaning):
    """Of seven rows at position 33 on, the last four see nothing of the first three."""

    def hide(metadata, request, q, k):
        lost = (metadata.seq_lens[request] == 40) & (k >= 33) & (k < 36)
        return q, torch.where(lost, 10**6, k)

    case = make_case((7, 40), (9, 30), path="micro_batch", options=MicroBatchOptions(cuts=(3,)))
    assert meaning(case, attend=with_mask(hide)) == f"the keys of the pieces before are missing{FITS}"


def with_mask(places):
    """``attend`` that masks rows and keys at other places than theirs."""

    def attend(self, *args):
        query, caches, metadata, output = args[1], args[4], args[5], args[6]
        params, common = self.params(metadata), metadata.common

        def mask(request, q, k):
            return visible(params, *places(metadata, request, q, k))

        where = common.block_table_tensor, common.seq_lens, common.query_start_loc
        tree = self._tree_of_step(metadata)
        out, lse = paged_attention(query[: metadata.num_rows], *caches, *where, params, tree_mask=tree, mask_fn=mask)
        output[: len(out)], args[7][: len(out)] = out.to(output.dtype), lse.float()

    return attend


def test_chunks_counted_from_the_first_row_are_named(make_case, meaning):
    def from_context(metadata, request, q, k):
        context = metadata.seq_lens[request] - metadata.query_lens[request]
        return q - context, k - context

    case = make_case((9, 41), (20, 77), attn_chunk_size=16, path="paged")
    assert meaning(case, attend=with_mask(from_context)).startswith("chunks are counted from the first new row")


def test_rows_of_fast_prefill_counted_from_the_front_are_named(make_case, meaning):
    def from_front(metadata, request, q, k):
        return q - (18, 38)[request], k

    options = FastPrefillOptions(rows=2)
    case = make_case((20, 84), (40, 60), path="fast_prefill", options=options, kv_sharing=True)
    found = meaning(case, attend=with_mask(from_front))
    assert found.startswith("the rows are treated as the first new ones of their requests")


def test_a_tree_without_ancestors_is_named(make_case, meaning):
    def alone(self, metadata):
        tree = ReferenceImpl._tree_of_step(self, metadata)
        return None if tree is None else torch.eye(len(tree), dtype=torch.bool)

    case = make_case((4, 40), (4, 33), path="tree", options=TreeOptions(parents=(-1, 0, 0, 1)))
    found = meaning(case, _tree_of_step=alone)
    assert found == f"a row of the tree sees the context and itself, and no ancestor{FITS}"


def test_a_window_that_counts_depths_of_a_tree_is_named(make_case, meaning):
    depths = torch.tensor([0, 1, 1, 2])

    def by_depth(metadata, request, q, k):
        context = metadata.seq_lens[request] - 4
        return [torch.where(p < context, p, context + depths[(p - context).clamp(min=0)]) for p in (q, k)]

    options = TreeOptions(parents=(-1, 0, 0, 1))
    case = make_case((4, 40), (4, 33), path="tree", options=options, sliding_window=3)
    found = meaning(case, attend=with_mask(by_depth))
    assert found == f"the window counts from the depth of a row in the tree, not from its position{FITS}"
