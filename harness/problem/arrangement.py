"""The requests of a problem arranged differently: reordered, a subset, in other pages, or under a wider block table.

Rows and keys are the problem's own, so that its truth holds for them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attncheck.harness.problem.page_layout import PageLayout, key_places, lay_out
from attncheck.harness.problem.problem import Problem, Request, place_requests
from attncheck.harness.problem.random_stream import RandomStream
from attncheck.reference.spec import PaddingSpec


@dataclass(frozen=True)
class Arrangement:
    """How a batch is composed of the requests of a problem.

    ``which``: the requests, in order; a request may occur twice only with ``elsewhere``. ``elsewhere``: pages are drawn
    again; repeated requests need a larger pool. ``spare_columns``: columns appended to the block table, whose entries
    are the null page. ``padding``: None for the problem's padding.
    """

    which: tuple[int, ...]
    elsewhere: bool = False
    spare_columns: int = 0
    padding: PaddingSpec | None = None

    def rows_of(self, problem: Problem) -> Tensor:
        """Return int64 ``[T]``: the problem's row at each row of the batch."""
        own = [problem.requests[i] for i in self.which]
        return _ranges([(request.first_row, request.rows) for request in own])


def arranged(problem: Problem, how: Arrangement) -> Problem:
    """Return the problem of such a batch, with the same rows and keys. Raise SpecError if the pool is too small."""
    case, specs = problem.case, [replace(spec, count=1) for spec in problem.case.batch]
    batch = replace(
        case.batch,
        requests=tuple(specs[i] for i in how.which),
        padding=case.batch.padding if how.padding is None else how.padding,
    )
    # The case's own pool has no room for repeated requests if it fits the batch exactly.
    is_repeated = len(set(how.which)) < len(how.which)
    cache = replace(case.cache, num_blocks=None, first_block=None) if is_repeated else case.cache
    other = replace(case, batch=batch, cache=cache)
    own = [problem.requests[i] for i in how.which]
    rows, keys = how.rows_of(problem), _ranges([(request.base, request.num_keys) for request in own])
    layout = _selected(problem.layout, how.which, keys)
    if problem.has_pool and how.elsewhere:
        lengths = [request.num_keys for request in own]
        stream = RandomStream(problem.seed, case.hash, "elsewhere", how.which)
        layout = lay_out(other, lengths, key_places(lengths), stream)()
    if problem.has_pool and how.spare_columns and not layout.parts:
        spare = layout.block_table.new_zeros(len(own), how.spare_columns)
        layout = replace(layout, block_table=torch.cat([layout.block_table, spare], dim=1))
    placed = zip(place_requests(other), layout.pages, strict=True)
    return replace(
        problem,
        case=other,
        requests=tuple(Request(**vars(request) | {"pages": pages}) for request, pages in placed),
        query=problem.query[rows],
        keys=problem.keys[keys],
        values=problem.values[keys],
        layout=layout,
    )


def _selected(layout: PageLayout, which: Sequence[int], keys: Tensor) -> PageLayout:
    """Return the layout of some requests, in their current pages."""
    index = list(which)
    return replace(
        layout,
        pages=tuple(layout.pages[i] for i in index),
        block_table=layout.block_table[index],
        key_slots=layout.key_slots[keys],
        parts=tuple(
            replace(part, table=part.table[index], lengths=tuple(part.lengths[i] for i in index))
            for part in layout.parts
        ),
        part_of_key=None if layout.part_of_key is None else layout.part_of_key[keys],
    )


def _ranges(spans: Sequence[tuple[int, int]]) -> Tensor:
    """Return int64: the concatenated ranges, each given by first number and count."""
    return torch.cat([torch.arange(first, first + count) for first, count in spans])
