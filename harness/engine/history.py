"""Follows the requests of an engine: tokens, positions, and which computed row is the key of each position."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import accumulate
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray

from attncheck.harness.engine.events import (
    FOLLOW_OPTION,
    KVGroup,
    LayerFacts,
    ObserverResult,
    ScheduledRequest,
    StepPlan,
)
from attncheck.harness.problem.pages import visible_span
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

_NOTHING, _UNKNOWN = -1, -2
"""In a slot: nothing was written to it, or a row that is not followed or not kept."""

_ANY = -1
"""As a token: one that is not known, since a draft was dropped."""

UNSEEN_START = "requests whose start was not seen"
"""Why a request is not followed that was not added, or not started."""

NULL_BLOCK = 0
"""vLLM's block id for keys that lie outside the window of every later row."""

_MOST_ROWS = 2**20
"""Rows that are kept at most, whatever their size."""

_NO_ROOM = "their keys and values do not fit into the memory for them"
"""Why a request is not followed for which no row numbers are left."""


@dataclass(frozen=True)
class Block:
    """The row numbers of a physical block, by slot, and those that were there before. ``group``: that wrote it."""

    group: int
    numbers: Numbers
    earlier: Numbers


@dataclass
class FollowedRequest:
    """A request, as it is followed.

    tokens: prompt and sampled tokens. chain: a hash of what its keys depend on besides tokens, and then of each prefix
    of these. never_followed: why it is not followed at all; not_followed: why it is not until it starts again.
    done: tokens that are computed, by our own count; assumed: as many, if the drafts of its last step were all
    accepted. block_ids, numbers: of each group, its block table, and the row numbers of its positions. first_row,
    step_tokens: of the step that is followed, the first of its rows among all of the model's input, and its tokens.
    reported: layers, blocks and positions of keys that pages lack.
    """

    request_id: str
    tokens: list[int]
    chain: list[int]
    never_followed: str | None
    not_followed: str | None
    done: int = 0
    assumed: int = 0
    block_ids: list[list[int]] = field(default_factory=list)
    numbers: list[Numbers] = field(default_factory=list)
    first_row: int = 0
    step_tokens: list[int] = field(default_factory=list)
    reported: set[tuple[str, int, int]] = field(default_factory=set)

    @property
    def step_end(self) -> int:
        """The position behind its last row in this step; ``done`` is that of the first."""
        return self.done + len(self.step_tokens)

    @property
    def step_rows(self) -> slice:
        """Its rows among those of the model's input."""
        return slice(self.first_row, self.first_row + len(self.step_tokens))

    def chains(self, begin: int, behind: Sequence[int] = ()) -> Numbers:
        """Return a hash of each prefix that ends at position ``begin`` or later, with the tokens ``behind`` it."""
        self.chain += _chain(self.chain[-1], self.tokens[len(self.chain) - 1 :])
        return np.array(self.chain[begin + 1 :] + _chain(self.chain[-1], behind), dtype=np.int64)


def _chain(first: int, tokens: Sequence[int]) -> list[int]:
    return list(accumulate(tokens, lambda last, token: hash((last, token)), initial=first))[1:]


def first_seen(params: AttentionParams, position: int) -> int:
    """Return the first key that a causal row at ``position`` sees; later rows see no earlier one."""
    return int(visible_span(params, torch.tensor(position), position + 1)[0])


def spans(begin: int, end: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield the index of each block of ``size`` that has positions of ``begin .. end - 1``, and these: first, end."""
    for index in range(begin // size, -(-end // size)):
        yield index, max(begin, index * size), min(end, (index + 1) * size)


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
    """The requests of an engine, and the rows in its blocks. ``capacity``: rows that are kept.

    owners, positions: the request and the position of each row, by number.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        layers: Mapping[str, LayerFacts],
        result: ObserverResult,
        capacity: int = _MOST_ROWS,
        follow_one_of: int = 1,
    ) -> None:
        self.groups = tuple(groups)
        self.requests: dict[str, FollowedRequest] = {}
        self.blocks: dict[int, Block] = {}  # the one that was written or mapped last is the last
        self.capacity = max(2, min(capacity, _MOST_ROWS))
        self.owners = np.full(self.capacity, "", dtype=object)
        self.positions, self._chains = np.zeros((2, self.capacity), dtype=np.int64)
        self._free = np.arange(1, self.capacity)
        self.layers, self._result, self._follow_one_of = layers, result, follow_one_of

    # What the client and the scheduler decide.

    def add(
        self, request_id: str, tokens: Sequence[int], prefix_key: str = "", not_followed: str | None = None
    ) -> None:
        """Follow a request. ``prefix_key``: what besides tokens decides whether two prefixes are equal.

        ``not_followed``: why it is never followed. One that is added again starts with these tokens.
        """
        known = self.requests.get(request_id)
        chain = [hash(prefix_key)] if known is None else known.chain[:1]
        request = FollowedRequest(request_id, list(map(int, tokens)), chain, not_followed, not_followed or UNSEEN_START)
        self.requests[request_id] = request

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
            return f"{FOLLOW_OPTION} {self._follow_one_of} leaves out the first block of their prompt"
        return None

    def finish(self, request_id: str) -> None:
        """Forget a request; the contents of its blocks stay, since a prefix hit may use them."""
        self.requests.pop(request_id, None)

    def begin_step(self, plan: StepPlan, request_ids: Sequence[str]) -> list[FollowedRequest]:
        """Apply the scheduler's plan of a step, number its rows, and return the requests that are followed.

        ``request_ids``: in the order of the rows of the model's input; rows of those that are not followed are counted.
        """
        for block_id, copy_id in plan.block_copies:
            self.blocks.pop(copy_id, None)
            if block_id in self.blocks:
                self.blocks[copy_id] = deepcopy(self.blocks[block_id])
        # One after the other: a hit may map blocks that another one writes in this step.
        for scheduled in plan.requests:
            if scheduled.request_id not in self.requests:
                self.add(scheduled.request_id, (), not_followed=UNSEEN_START)
            request = self.requests[scheduled.request_id]
            if scheduled.starts:
                self._start(request, scheduled)
            else:
                self._continue(request, scheduled)
            self._number_rows(request, plan)
        followed, first_row = [], 0
        for request_id in request_ids:
            request, count = self.requests[request_id], plan.num_scheduled_tokens[request_id]
            if request.not_followed:
                self._result.not_followed[request.not_followed] += count
            else:
                request.first_row = first_row
                followed.append(request)
            first_row += count
        return followed

    def _continue(self, request: FollowedRequest, scheduled: ScheduledRequest) -> None:
        counted = scheduled.num_computed_tokens
        for own, new in zip(request.block_ids, scheduled.block_ids, strict=False):
            own.extend(new)
        if request.not_followed:
            request.done = counted
            return
        self._result.checks["count"] += 1
        is_assumed = self._result.engine.is_async and counted == request.assumed  # its tokens were not sampled yet
        if counted != request.done and not is_assumed:
            note = f"the scheduler counts {counted} computed tokens; {request.done} are computed"
            self._result.find("count", request.request_id, request.done, note=note)

    def _start(self, request: FollowedRequest, scheduled: ScheduledRequest) -> None:
        hit = scheduled.num_computed_tokens
        request.block_ids = [list(ids) for ids in scheduled.block_ids]
        request.done, request.not_followed, request.numbers = hit, request.never_followed, []
        self._result.counts["requests resumed after preemption"] += scheduled.is_resumed
        if request.not_followed:
            return
        self._result.counts["tokens of prefix hits"] += hit
        request.numbers = [self._numbers_of_hit(request, group, hit) for group in range(len(self.groups))]

    def _numbers_of_hit(self, request: FollowedRequest, group: int, hit: int) -> Numbers:
        """Return the rows of the blocks that a prefix hit maps; one that is wrong or not known loses the request."""
        facts, numbers = self.groups[group], np.full(hit, ZERO_ROW)
        if facts.not_followed:
            return numbers
        table = request.block_ids[group]
        chains = np.append(request.chains(0), np.zeros(hit, dtype=np.int64))  # no row has 0
        params = [self.layers[layer].params for layer in facts.layers if layer in self.layers]
        unseen = min((first_seen(each, hit) for each in params), default=0)  # no later row sees a key before
        for index, low, high in spans(0, hit, facts.block_size):
            block_id = table[index] if index < len(table) else NULL_BLOCK
            if block_id == NULL_BLOCK and high <= unseen:
                continue
            held = self.block(block_id, group).numbers[: high - low]
            if (held == _UNKNOWN).any():
                request.not_followed = "their prefix hit maps blocks whose keys are not kept"
                continue
            self._result.checks["prefix_hit"] += 1
            wrong = np.flatnonzero((held < 0) | (self._chains[held] != chains[low:high]))
            if len(wrong):
                note = f"the prefix hit maps block {block_id}, which holds {self.contents(block_id)}"
                place = {"group": group, "block_id": block_id, "block_index": index}
                self._result.find("prefix_hit", request.request_id, low + int(wrong[0]), note=note, **place)
                request.not_followed = "their prefix hit maps a wrong block"
            else:
                self.blocks[block_id] = self.blocks.pop(block_id)
                numbers[low:high] = held
        return numbers

    def block(self, block_id: int, group: int) -> Block:
        """Return a block of the group; an empty one if the group did not write it."""
        block = self.blocks.get(block_id)
        if block is not None and block.group == group:
            return block
        return Block(group, *np.full((2, self.groups[group].block_size), _NOTHING))

    def contents(self, block_id: int) -> str:
        """Return in words what was last written to a block."""
        block = self.blocks.get(block_id)
        numbers = [] if block is None else block.numbers[block.numbers >= 0].tolist()
        if not numbers:
            return "nothing that was written"
        positions = np.unique(self.positions[numbers]).tolist()
        return f"keys of {requests_in_words(self.owners[numbers])}, {positions_in_words(positions)}"

    # Rows of a step.

    def _number_rows(self, request: FollowedRequest, plan: StepPlan) -> None:
        """Give a number to each row of a request, and write the numbers to its blocks, unless it is not followed."""
        begin, count = request.done, plan.num_scheduled_tokens[request.request_id]
        self._compare_blocks(request, begin + count)
        if not request.not_followed and count > len(self._free):
            self._make_room(count)
            request.not_followed = _NO_ROOM if count > len(self._free) else None
        if request.not_followed:
            self._write(request, np.full(count, _UNKNOWN))
            return
        new, self._free = self._free[:count], self._free[count:]
        known = request.tokens[begin : begin + count]
        drafts = [*plan.drafts.get(request.request_id, ()), *[_ANY] * count][: count - len(known)]
        request.step_tokens = known + drafts
        self.owners[new] = request.request_id
        self.positions[new] = np.arange(begin, begin + count)
        self._chains[new] = request.chains(begin, drafts)[:count]
        request.numbers = [np.concatenate([numbers[:begin], new]) for numbers in request.numbers]
        self._write(request, new)

    def _compare_blocks(self, request: FollowedRequest, end: int) -> None:
        """Report a request whose blocks do not hold the positions before ``end``; it is not followed then."""
        for group, (facts, ids) in enumerate(zip(self.groups, request.block_ids, strict=False)):
            is_followed = not facts.not_followed and not request.not_followed
            if is_followed and -(-end // facts.block_size) > len(ids):
                note = f"{len(ids)} blocks of group {group} for {end} tokens"
                cause = "the scheduler gives a request too few blocks"
                self._result.checks["count"] += 1
                self._result.find("count", request.request_id, request.done, note=note, cause=cause)
                request.not_followed = "the scheduler gave them too few blocks"

    def _write(self, request: FollowedRequest, new: Numbers) -> None:
        """Write the numbers of the step's rows to their slots, in each group."""
        begin, end = request.done, request.done + len(new)
        for group, (facts, ids) in enumerate(zip(self.groups, request.block_ids, strict=False)):
            if facts.not_followed:
                continue
            for index, low, high in spans(begin, min(end, len(ids) * facts.block_size), facts.block_size):
                block, slot = self.block(ids[index], group), low % facts.block_size
                slots = slice(slot, slot + high - low)
                block.earlier[slots] = block.numbers[slots]
                block.numbers[slots] = new[low - begin : high - begin]
                self.blocks.pop(ids[index], None)
                self.blocks[ids[index]] = block

    def _make_room(self, needed: int) -> None:
        """Free row numbers that no request has, those of blocks that were written or mapped longest ago first.

        Many at once, since this visits all blocks.
        """
        followed = [request for request in self.requests.values() if not request.not_followed]
        newest_first = list(reversed(self.blocks.values()))
        is_kept = np.zeros(self.capacity, dtype=bool)
        is_kept[np.concatenate([[ZERO_ROW], *(numbers for request in followed for numbers in request.numbers)])] = True
        held = np.concatenate([[ZERO_ROW], *(block.numbers for block in newest_first)])
        held = held[(held >= 0) & ~is_kept[held]]
        once = held[np.sort(np.unique(held, return_index=True)[1])]
        most_kept = self.capacity - max(needed, self.capacity // 4) - int(is_kept.sum())
        is_kept[once[: max(0, most_kept)]] = True
        for numbers in (numbers for block in newest_first for numbers in (block.numbers, block.earlier)):
            numbers[(numbers >= 0) & ~is_kept[numbers]] = _UNKNOWN
        self._free = np.flatnonzero(~is_kept)

    def end_step(self, plan: StepPlan, sampled: Mapping[str, tuple[int, ...]]) -> None:
        """Count computed tokens, and append the sampled ones; drafts behind them were rejected."""
        for request_id, count in plan.num_scheduled_tokens.items():
            request = self.requests[request_id]
            new = list(map(int, sampled.get(request_id, ())))
            drafts = len(plan.drafts.get(request_id, ()))
            rejected = drafts + 1 - len(new) if drafts and new else 0
            request.assumed = request.done + count
            request.done += count - rejected
            request.tokens += new
            request.step_tokens = []
            self._result.counts["drafts"] += drafts
            self._result.counts["drafts accepted"] += drafts - rejected if new else 0
            if not request.not_followed and len(request.tokens) < request.done:
                note = f"{request.done} tokens are computed, but {len(request.tokens)} are known"
                self._result.checks["count"] += 1
                self._result.find("count", request.request_id, request.done, note=note)
                request.not_followed = "more of their tokens are computed than are known"
