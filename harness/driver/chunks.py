"""The rows that a rank of prefill context parallelism has: chunks of prompts, and whole decodes."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Chunk(NamedTuple):
    """Rows of one request: ``length`` rows from row ``offset`` of the request on."""

    request: int
    offset: int
    length: int


def chunks_of_rank(query_lens: Sequence[int], is_prefilling: Sequence[bool], size: int, rank: int) -> list[Chunk]:
    """Return the chunks of ``rank`` in the order of its batch: decodes first, then those of prompts.

    A prompt is cut into ``2 * size`` chunks of equal length; the last ones may be short or empty. Rank ``r`` has
    chunks ``r`` and ``2 * size - 1 - r``, so that all ranks see about equally many keys (vLLM's ``DualChunkSwap``). The
    decodes are dealt out in turn.

    >>> chunks_of_rank([9, 1], [True, False], size=2, rank=0)
    [Chunk(request=1, offset=0, length=1), Chunk(request=0, offset=0, length=3)]
    """
    return sorted(
        _chunks(query_lens, is_prefilling, size, rank),
        key=lambda chunk: (is_prefilling[chunk.request], chunk.request, chunk.offset),
    )


def _chunks(query_lens: Sequence[int], is_prefilling: Sequence[bool], size: int, rank: int) -> Iterator[Chunk]:
    decodes = 0
    for request, query_len in enumerate(query_lens):
        if is_prefilling[request]:
            length = -(-query_len // (2 * size))
            for number in (rank, 2 * size - 1 - rank):
                offset = number * length
                if offset < query_len:
                    yield Chunk(request, offset, min(length, query_len - offset))
        else:
            if decodes % size == rank:
                yield Chunk(request, 0, query_len)
            decodes += 1
