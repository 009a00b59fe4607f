"""Follows the requests of an engine: tokens, positions, and which computed row is the key of each position."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from attncheck.harness.engine.events import (
    ContinuedRequest,
    EngineFinding,
    KVGroup,
    ObserverResult,
    StartedRequest,
    StepPlan,
)
from attncheck.reference import AttentionParams

# Each row that the model computes for a followed request gets a number. The history of a request is a list of such
# numbers, one a position and KV-cache group: the row whose key and value belong to that position. A draft that is
# rejected is overwritten by the next row at its position. A prefix hit copies the numbers of rows that were computed
# for the same tokens.
#
# The truth depends on tokens and positions only. The block ids of the scheduler have two uses: they choose among rows
# of equal token prefixes, since two computations of one prefix may differ in a bit, and they explain wrong outputs.

Numbers = NDArray[np.int64]

ZERO_ROW = 0
"""The number of a row whose key and value are zeros."""

_UNKNOWN = -1
"""In a block: a slot that no followed row was written to. As a token: one that is not known."""

_NULL_BLOCK = 0
"""vLLM's block id for keys that lie outside the window of every later row."""

_MIN_CAPACITY = 256

_NO_ROOM = "their keys and values exceed max_row_bytes"
"""Why a request is not followed for which no row numbers are left."""


@dataclass
class Block:
    """The contents of a physical block, int64 ``[block_size]`` each.

    chains: hash of the tokens up to the one in the slot. rows: its row. earlier: the row before. ``group``: the group
    that wrote it.
    """

    group: int
    chains: Numbers
    rows: Numbers
    earlier: Numbers


@dataclass(frozen=True)
class StepRows:
    """The rows that a step computes for one request.

    first: the first of them among the rows of the model's input, or 0 until that is known. position: that of the
    first row. keys: for each group, the row numbers of positions 0 up to the last of the step; None for a group that
    is not followed.
    block_ids: the block table of each group.
    """

    request_id: str
    first: int
    num_rows: int
    position: int
    keys: tuple[Numbers | None, ...]
    block_ids: tuple[Sequence[int], ...]

    @property
    def numbers(self) -> Numbers:
        """The numbers of the step's own rows."""
        own = next(keys for keys in self.keys if keys is not None)
        return own[self.position :]

    def keys_of(self, group: int) -> Numbers:
        """The row numbers of a group that is followed."""
        keys = self.keys[group]
        assert keys is not None
        return keys


@dataclass(frozen=True)
class StepInputs:
    """What the model has to be given, and the followed rows.

    tokens, positions: int64 ``[T]``; a token of -1 may be any. compared: bool ``[T]``, False for rows that are not
    followed. request_ids: of each row of the input, by request: (id, first row, number of rows).
    """

    tokens: Numbers
    positions: Numbers
    compared: NDArray[np.bool_]
    requests: tuple[tuple[str, int, int], ...]
    followed: tuple[StepRows, ...]


@dataclass
class FollowedRequest:
    """A request, as it is followed.

    tokens: prompt and sampled tokens. chain: hashes of each prefix of them. done: tokens that are computed, by our own
    count. keys: the row numbers of its positions, for each group; None for a group that is not followed.
    never_followed, lost: why it is not followed at all, or until it starts again.
    """

    request_id: str
    tokens: list[int]
    prefix_key: str = ""
    never_followed: str | None = None
    chain: list[int] = field(default_factory=list)
    done: int = 0
    block_ids: list[list[int]] = field(default_factory=list)
    keys: list[Numbers | None] = field(default_factory=list)
    lost: str | None = "it was added before the observer, or has not started"

    @property
    def not_followed(self) -> str | None:
        """Why it is not followed now, or None."""
        return self.never_followed or self.lost


class RowNumbers:
    """Numbers of rows, used again when no request and no block holds them. ``owners``, ``positions``: of each row."""

    def __init__(self) -> None:
        self.capacity = _MIN_CAPACITY
        self.max_capacity: int | None = None
        self.owners: list[str] = [""] * self.capacity
        self.positions = np.zeros(self.capacity, dtype=np.int64)
        self._free = np.arange(1, self.capacity, dtype=np.int64)

    @property
    def num_free(self) -> int:
        """How many numbers can be taken."""
        return len(self._free)

    def take(self, count: int) -> Numbers | None:
        """Return ``count`` unused numbers, or None if there are not so many."""
        if count > len(self._free):
            return None
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def grow(self, needed: int) -> None:
        """Have twice as many numbers as are needed, within ``max_capacity``."""
        while 2 * needed > self.capacity:
            if self.max_capacity is not None and self.capacity >= self.max_capacity:
                break
            self._grow()

    def free_all_but(self, kept: "KeptNumbers") -> None:
        """Let all numbers be taken that are not kept."""
        is_kept = np.concatenate([kept.is_kept, np.zeros(self.capacity - len(kept.is_kept), dtype=bool)])
        self._free = np.flatnonzero(~is_kept)

    def _grow(self) -> None:
        size = min(2 * self.capacity, self.max_capacity or 2 * self.capacity)
        self.owners += [""] * (size - self.capacity)
        self.positions = np.concatenate([self.positions, np.zeros(size - self.capacity, dtype=np.int64)])
        self.capacity = size


class KeptNumbers:
    """Row numbers that are kept. ``count``: how many, with that of the row of zeros."""

    def __init__(self, capacity: int) -> None:
        self.is_kept = np.zeros(capacity, dtype=bool)
        self.is_kept[ZERO_ROW] = True
        self.count = 1

    def has_some(self, numbers: Numbers) -> bool:
        """Return whether some of the numbers, besides the row of zeros, are kept."""
        return bool(self.is_kept[numbers[numbers > ZERO_ROW]].any())

    def add(self, numbers: Numbers, limit: int) -> bool:
        """Keep numbers if no more than ``limit`` are kept then; return whether they are."""
        new = np.unique(numbers[numbers > ZERO_ROW])
        new = new[~self.is_kept[new]]
        if len(new) and self.count + len(new) > limit:
            return False
        self.is_kept[new] = True
        self.count += len(new)
        return True


def first_seen(params: AttentionParams, position: int) -> int:
    """Return the first key that a causal row at ``position`` sees; later rows see no earlier one."""
    first = max(0, position - params.window[0]) if params.window[0] >= 0 else 0
    if params.attn_chunk_size is not None:
        chunk = position // params.attn_chunk_size - params.attn_chunk_lookback
        first = max(first, chunk * params.attn_chunk_size)
    return first


def first_needed(params: AttentionParams, position: int) -> int:
    """Return the first key for a truth; chunks count positions from 0, so none may be left out."""
    return 0 if params.attn_chunk_size is not None else first_seen(params, position)


def block_in_words(block_id: int, index: int) -> str:
    """Return ``block 12 (number 0 of the table)``."""
    return f"block {block_id} (number {index} of the table)"


def positions_in_words(positions: Sequence[int]) -> str:
    """Return ``position 32``, ``positions 32 to 35``, or ``2 of positions 32 to 35``; in increasing order."""
    first, last = positions[0], positions[-1]
    if first == last:
        return f"position {first}"
    some = "" if len(positions) == last - first + 1 else f"{len(positions)} of "
    return f"{some}positions {first} to {last}"


def requests_in_words(request_ids: Iterable[str]) -> str:
    """Return ``request 4``, or ``requests 3 and 4``."""
    names = sorted(set(request_ids))
    return f"request{'' if len(names) == 1 else 's'} {' and '.join(names)}"


class EngineHistory:
    """The requests of an engine. ``settings``: those of the layers of each group."""

    def __init__(
        self,
        groups: Sequence[KVGroup],
        settings: Sequence[Sequence[AttentionParams]],
        tally: ObserverResult,
        follow_one_of: int = 1,
    ) -> None:
        self.groups = tuple(groups)
        self.numbers = RowNumbers()
        self.blocks: dict[int, Block] = {}
        self.requests: dict[str, FollowedRequest] = {}
        self._settings = tuple(settings)
        self._tally = tally
        self._follow_one_of = follow_one_of
        self._unknown_blocks: set[int] = set()
        self._plan = StepPlan((), (), {})
        self._rows: dict[str, StepRows | None] = {}

    # What the client and the scheduler decide.

    def add(
        self, request_id: str, tokens: Sequence[int], prefix_key: str = "", not_followed: str | None = None
    ) -> None:
        """Follow a request. ``prefix_key``: what besides tokens decides whether two prefixes are equal.

        ``not_followed``: why it is never followed. One that is added again starts with these tokens.
        """
        known = self.requests.get(request_id)
        key = prefix_key if known is None else known.prefix_key
        self.requests[request_id] = FollowedRequest(request_id, list(map(int, tokens)), key, not_followed)

    def reason_of(self, tokens: Sequence[int]) -> str | None:
        """Return why a request with this prompt is never followed, or None.

        Requests that a prefix hit connects share the first block of their prompts, so that they are followed together
        or not at all.
        """
        if all(group.not_followed for group in self.groups):
            return next((group.not_followed for group in self.groups), "engines without keys")
        size = min(group.block_size for group in self.groups)
        first_block = np.array(tokens[:size], dtype=np.int64)
        if crc32(first_block.tobytes()) % self._follow_one_of:
            return f"--follow {self._follow_one_of} leaves out the first block of their prompt"
        return None

    def finish(self, request_id: str) -> None:
        """Forget a request; the contents of its blocks stay, since a prefix hit may use them."""
        self.requests.pop(request_id, None)

    def begin(self, plan: StepPlan) -> None:
        """Apply the scheduler's plan of a step, and number its rows.

        The order is that of ``num_scheduled_tokens``: a prefix hit may map blocks that a request which was scheduled
        before it writes in the same step.
        """
        self._plan, self._rows = plan, {}
        for source, destination in plan.block_copies:
            self._copy_block(source, destination)
        for continued in plan.continued:
            self._continue(continued)
        self._make_room(plan)
        waiting = {started.request_id: started for started in plan.started}
        for request_id, count in plan.num_scheduled_tokens.items():
            if request_id in waiting:
                self._start(waiting.pop(request_id))
            self._rows[request_id] = self._rows_of_step(self._request(request_id), count)
        for started in waiting.values():  # they compute nothing in this step
            self._start(started)

    def _copy_block(self, source: int, destination: int) -> None:
        block = self.blocks.get(source)
        self.blocks.pop(destination, None)
        if block is None:
            self._unknown_blocks.add(destination)
            return
        self._unknown_blocks.discard(destination)
        self.blocks[destination] = Block(block.group, block.chains.copy(), block.rows.copy(), block.earlier.copy())

    def _request(self, request_id: str) -> FollowedRequest:
        request = self.requests.get(request_id)
        if request is None:
            request = FollowedRequest(request_id, [], never_followed="requests that were added before the observer")
            self.requests[request_id] = request
        return request

    def _start(self, started: StartedRequest) -> None:
        request = self._request(started.request_id)
        hit = started.num_computed_tokens
        request.block_ids = [list(ids) for ids in started.block_ids]
        request.done, request.lost = hit, None
        request.keys = [None for _ in self.groups]
        self._tally.counts["requests resumed after preemption"] += started.resumed
        if request.never_followed:
            return
        self._tally.counts["tokens of prefix hits"] += hit
        self._extend_chain(request)
        if hit > len(request.tokens):
            self._count_finding(request, hit, f"a prefix hit of {hit} tokens; {len(request.tokens)} are known")
            request.lost = "their prefix hit is longer than their tokens"
            return
        for group, facts in enumerate(self.groups):
            if facts.not_followed is None:
                request.keys[group] = self._rows_of_hit(request, group, hit)

    def _rows_of_hit(self, request: FollowedRequest, group: int, hit: int) -> Numbers:
        """Return the rows of the blocks that a prefix hit maps; the request is lost if one is not known."""
        size = self.groups[group].block_size
        rows = np.zeros(hit, dtype=np.int64)
        for index in range(-(-hit // size)):
            span = slice(index * size, min(hit, (index + 1) * size))
            block_id = request.block_ids[group][index] if index < len(request.block_ids[group]) else _NULL_BLOCK
            if block_id == _NULL_BLOCK and self._is_unseen(group, span.stop, hit):
                continue
            chain = np.array(request.chain[span], dtype=np.int64)
            found = self._rows_of_block(request, group, block_id, chain)
            if found is None:
                request.lost = "their prefix hit maps blocks whose keys are not kept"
                continue
            is_right = found >= 0
            self._tally.checks["prefix_hit"] += 1
            if not is_right.all():
                self._wrong_hit(request, group, index, block_id, int(np.flatnonzero(~is_right)[0]))
                found = self._rows_of_chain(group, chain)
                if found is None:
                    request.lost = "their prefix hit maps a wrong block, and no other has its tokens"
                    continue
            rows[span] = found
        return rows

    def _is_unseen(self, group: int, end: int, hit: int) -> bool:
        """Whether no row from position ``hit`` on sees the keys before ``end``."""
        return end <= min((first_seen(params, hit) for params in self._settings[group]), default=0)

    def _rows_of_block(self, request: FollowedRequest, group: int, block_id: int, chain: Numbers) -> Numbers | None:
        """Return the block's rows, -1 where it holds other tokens than those of ``chain``; None if it is unknown."""
        block = self.blocks.get(block_id)
        if block is None or block.group != group:
            return None if block_id in self._unknown_blocks else np.full(len(chain), _UNKNOWN)
        held = slice(0, len(chain))
        return np.where(block.chains[held] == chain, block.rows[held], _UNKNOWN)

    def _rows_of_chain(self, group: int, chain: Numbers) -> Numbers | None:
        """Return rows that were computed for these tokens, from any block of the group."""
        for block in self.blocks.values():
            if block.group == group and np.array_equal(block.chains[: len(chain)], chain):
                rows = block.rows[: len(chain)]
                if (rows >= 0).all():
                    return rows
        return None

    def _wrong_hit(self, request: FollowedRequest, group: int, index: int, block_id: int, offset: int) -> None:
        size = self.groups[group].block_size
        holds = "nothing that was written" if block_id == _NULL_BLOCK else self.contents(block_id)
        self._tally.find(
            EngineFinding(
                kind="prefix_hit",
                step=self._tally.steps + 1,
                request_id=request.request_id,
                position=index * size + offset,
                group=group,
                block_id=block_id,
                block_index=index,
                note=f"the prefix hit maps block {block_id}, which holds {holds}",
            )
        )

    def contents(self, block_id: int) -> str:
        """Return in words what was last written to a block."""
        block = self.blocks.get(block_id)
        if block is None:
            return "nothing that was written"
        rows = block.rows[block.rows >= 0]
        if not len(rows):
            return "nothing that was written"
        owners = requests_in_words(self.numbers.owners[row] for row in rows.tolist())
        return f"keys of {owners}, {positions_in_words(np.unique(self.numbers.positions[rows]).tolist())}"

    def _continue(self, continued: ContinuedRequest) -> None:
        request = self._request(continued.request_id)
        for own, new in zip(request.block_ids, continued.new_block_ids, strict=False):
            own.extend(new)
        counted = continued.num_computed_tokens
        if request.not_followed:
            request.done = request.done if counted is None else counted
        elif counted is not None:
            self._tally.checks["count"] += 1
            if counted != request.done:
                note = f"the scheduler counts {counted} computed tokens; {request.done} are computed"
                self._count_finding(request, request.done, note)

    def _count_finding(self, request: FollowedRequest, position: int, note: str) -> None:
        step = self._tally.steps + 1
        self._tally.find(EngineFinding("count", step, request.request_id, position, note=note))

    # What the model is given.

    def enter(self, request_ids: Sequence[str]) -> StepInputs:
        """Return what the model has to be given in this step, for requests in the order of its rows."""
        followed, requests = [], []
        tokens: list[int] = []
        positions: list[Numbers] = []
        compared: list[NDArray[np.bool_]] = []
        first = 0
        for request_id in request_ids:
            count = self._plan.num_scheduled_tokens[request_id]
            request = self._request(request_id)
            rows = self._rows[request_id]
            if rows is None:
                self._tally.not_followed[str(request.not_followed)] += count
                tokens += [_UNKNOWN] * count
            else:
                followed.append(replace(rows, first=first))
                tokens += self._tokens_of_step(request, count)
            compared.append(np.full(count, rows is not None))
            positions.append(np.arange(request.done, request.done + count))
            requests.append((request_id, first, count))
            first += count
        empty = np.zeros(0, dtype=np.int64)
        return StepInputs(
            tokens=np.array(tokens, dtype=np.int64),
            positions=np.concatenate([empty, *positions]),
            compared=np.concatenate([empty.astype(bool), *compared]),
            requests=tuple(requests),
            followed=tuple(followed),
        )

    def _tokens_of_step(self, request: FollowedRequest, count: int) -> list[int]:
        known = request.tokens[request.done : request.done + count]
        drafts = list(self._plan.drafts.get(request.request_id, ()))[: count - len(known)]
        return known + drafts + [_UNKNOWN] * (count - len(known) - len(drafts))

    def _rows_of_step(self, request: FollowedRequest, count: int) -> StepRows | None:
        """Number the rows of a request and write them to its blocks, or forget what its blocks held."""
        begin, end = request.done, request.done + count
        for group, ids in enumerate(request.block_ids):
            if not request.not_followed and -(-end // self.groups[group].block_size) > len(ids):
                note = f"{len(ids)} blocks of group {group} for {end} tokens"
                self._count_finding(request, begin, note)
                request.lost = "the scheduler gave them too few blocks"
        numbers = None if request.not_followed else self.numbers.take(count)
        if numbers is None and not request.not_followed:
            request.lost = _NO_ROOM
        if numbers is None:
            self._forget_blocks(request, begin, end)
            return None
        self.numbers.positions[numbers] = np.arange(begin, end)
        for number in numbers.tolist():
            self.numbers.owners[number] = request.request_id
        chain = self._chain_of_step(request, count)
        for group, keys in enumerate(request.keys):
            if keys is not None:
                request.keys[group] = np.concatenate([keys[:begin], numbers])
                self._write_blocks(request.block_ids[group], group, begin, chain, numbers)
        return StepRows(
            request_id=request.request_id,
            first=0,
            num_rows=count,
            position=begin,
            keys=tuple(request.keys),
            block_ids=tuple(request.block_ids),
        )

    def _write_blocks(self, ids: Sequence[int], group: int, begin: int, chain: Numbers, numbers: Numbers) -> None:
        size = self.groups[group].block_size
        at = begin
        while at < begin + len(numbers):
            offset = at % size
            count = min(size - offset, begin + len(numbers) - at)
            slots, some = slice(offset, offset + count), slice(at - begin, at - begin + count)
            block_id = ids[at // size]
            at += count
            block = self.blocks.pop(block_id, None)
            if offset and block is None and block_id in self._unknown_blocks:
                continue  # what precedes in the block is not known
            if block is None or block.group != group:
                fresh = [np.full(size, _UNKNOWN, dtype=np.int64) for _ in range(3)]
                block = Block(group, *fresh)
                self._unknown_blocks.discard(block_id)
            self.blocks[block_id] = block  # the last, as the one that was written last
            block.earlier[slots] = block.rows[slots]
            block.chains[slots], block.rows[slots] = chain[some], numbers[some]

    def _forget_blocks(self, request: FollowedRequest, begin: int, end: int) -> None:
        for ids, group in zip(request.block_ids, self.groups, strict=False):
            for block_id in ids[begin // group.block_size : -(-end // group.block_size)]:
                self.blocks.pop(block_id, None)
                self._unknown_blocks.add(block_id)

    # Row numbers are used again.

    def _make_room(self, plan: StepPlan) -> None:
        """Free row numbers for a step if too few are left, many at once, since this visits all blocks."""
        started = {each.request_id for each in plan.started}
        of_started = of_running = 0
        for request_id, count in plan.num_scheduled_tokens.items():
            request = self._request(request_id)
            if request.never_followed:
                continue
            if request_id in started:
                of_started += count
            elif request.lost is None:
                of_running += count
        needed = of_started + of_running
        if needed <= self.numbers.num_free:
            return
        kept = KeptNumbers(self.numbers.capacity)
        for numbers in self._held():
            kept.add(numbers, self.numbers.capacity)
        self.numbers.grow(kept.count + needed)
        if kept.count + needed > self.numbers.capacity - self.numbers.capacity // 4:
            self._touch_blocks(plan.started)
            kept = self._drop_oldest(needed, of_running)
        self.numbers.free_all_but(kept)

    def _held(self) -> Iterator[Numbers]:
        """Yield the row numbers that requests and blocks hold."""
        for request in self.requests.values():
            if not request.not_followed:
                yield from (keys for keys in request.keys if keys is not None)
        for block in self.blocks.values():
            yield block.rows
            yield block.earlier

    def _touch_blocks(self, started: Sequence[StartedRequest]) -> None:
        """Make blocks that are mapped now the last to be dropped."""
        for block_id in (block_id for each in started for ids in each.block_ids for block_id in ids):
            if block_id in self.blocks:
                self.blocks[block_id] = self.blocks.pop(block_id)

    def _drop_oldest(self, needed: int, of_running: int) -> KeptNumbers:
        """Drop what does not fit, and return what is kept.

        Requests come first, the oldest before others; then blocks that only a prefix hit can use, those written last
        before others; then the earlier contents of blocks, which only explain findings.
        """
        capacity = self.numbers.capacity
        kept = KeptNumbers(capacity)
        limit = capacity - max(of_running, capacity // 8)
        for request in self.requests.values():
            keys = [keys for keys in request.keys if keys is not None]
            if not request.not_followed and keys and not kept.add(np.concatenate(keys), limit):
                request.lost = _NO_ROOM
        # A block with a row of a running request is kept whole, since the request may write to the rest of it.
        of_running_requests = {block_id for block_id, block in self.blocks.items() if kept.has_some(block.rows)}
        for block_id in of_running_requests:
            kept.add(self.blocks[block_id].rows, capacity)
        limit = capacity - max(needed, capacity // 4)
        newest_first = list(reversed(self.blocks.items()))
        for block_id, block in newest_first:
            if block_id not in of_running_requests and not kept.add(block.rows, limit):
                del self.blocks[block_id]
                self._unknown_blocks.add(block_id)
        for _, block in newest_first:
            if not kept.add(block.earlier, limit):
                block.earlier[:] = _UNKNOWN
        return kept

    def _extend_chain(self, request: FollowedRequest) -> None:
        chain = request.chain
        last = chain[-1] if chain else hash(request.prefix_key)
        for token in request.tokens[len(chain) :]:
            last = hash((last, token))
            chain.append(last)

    def _chain_of_step(self, request: FollowedRequest, count: int) -> Numbers:
        self._extend_chain(request)
        chain = request.chain[request.done : request.done + count]
        for token in self._tokens_of_step(request, count)[len(chain) :]:
            last = chain[-1] if chain else request.chain[-1]
            chain.append(hash((last, token)))
        return np.array(chain, dtype=np.int64)

    # What was sampled.

    def end(self, sampled: Mapping[str, tuple[int, ...]]) -> None:
        """Count computed tokens, and append the sampled ones; drafts behind them were rejected."""
        for request_id, count in self._plan.num_scheduled_tokens.items():
            request = self.requests.get(request_id)
            if request is None:
                continue
            new = [int(token) for token in sampled.get(request_id, ())]
            drafts = len(self._plan.drafts.get(request_id, ()))
            rejected = drafts + 1 - len(new) if drafts and new else 0
            request.done += count - rejected
            request.tokens += new
            self._tally.counts["drafts"] += drafts
            self._tally.counts["drafts accepted"] += drafts - rejected if new else 0
            if not request.not_followed and len(request.tokens) < request.done:
                note = f"{request.done} tokens are computed, but {len(request.tokens)} are known"
                self._count_finding(request, request.done, note)
                request.lost = "more of their tokens are computed than are known"
