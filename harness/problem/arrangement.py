"""The requests of a problem put in another way: in another order, some of them, in other pages, under a wider table.

The rows and keys are the problem's own, so that its truth holds for them.
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
    """How a batch is made of the requests of a problem.

    ``which``: the requests, in order; one that comes twice takes ``elsewhere``. ``elsewhere``: pages are drawn anew
    from a pool of another size. ``spare_columns``: more columns of the block table, whose entries name the null page.
    ``padding``: None: the problem's.
    """

    which: tuple[int, ...]
    elsewhere: bool = False
    spare_columns: int = 0
    padding: PaddingSpec | None = None

    def rows_of(self, problem: Problem) -> Tensor:
        """int64: the problem's row that stands at each row of the batch."""
        own = [problem.requests[i] for i in self.which]
        return _ranges([(request.first_row, request.rows) for request in own])


def arranged(problem: Problem, how: Arrangement) -> Problem:
    """Return the problem of such a batch, of the same rows and keys. Raises SpecError where the pool is too small."""
    case, specs = problem.case, [replace(spec, count=1) for spec in problem.case.batch]
    batch = replace(
        case.batch,
        requests=tuple(specs[i] for i in how.which),
        padding=case.batch.padding if how.padding is None else how.padding,
    )
    cache = replace(case.cache, num_blocks=None) if how.elsewhere else case.cache
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
    """The layout of some requests, where they lie already."""
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
    """int64: the numbers of ranges, given by first number and count, behind one another."""
    return torch.cat([torch.arange(first, first + count) for first, count in spans])
