"""Faults that are fitted to the error: rows, keys, heads, channels and factors."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from attncheck.harness.diagnosis.scores import (
    MOST_SCORES,
    attend_scores,
    masked_scores,
    parts_of_request,
    unmasked_scores,
)
from attncheck.harness.problem.pages import visible_span
from attncheck.harness.problem.problem import Problem, Request
from attncheck.harness.truth.faults import Hypothesis
from attncheck.harness.truth.truth import Truth, params_of
from attncheck.harness.truth.unpaged import UnpagedAttention, share_of_budget
from attncheck.reference import AttentionParams

# Describe wrong rows, heads and channels in words, by what they have in common and right ones do not.

_ROW_STEPS = (128, 64, 32, 16, 8, 4, 2)
"""Numbers of rows or keys in a tile, a page or a vector; faults at their edges repeat at this distance."""

_FEWEST_REPEATED = 8
"""Rows, wrong and right ones together, from which on a distance at which they repeat is no coincidence."""

_CLEAR = 2.0
"""Budgets that an error must reach in each named row, head or channel: of errors near 1 budget, chance chooses some."""

_REPEATED = "whose "
"""Prefix of the phrases that state a distance at which rows repeat."""


def pattern(problem: Problem, truth: Truth, error: Tensor, shares: Tensor) -> str | None:
    """Return in words which rows, heads and channels are wrong, or None if all are, or nothing separates them.

    ``error`` ``[T, H, Dv]``: difference of the output from the truth. ``shares`` ``[T, H]``: the same in budgets.
    """
    of_rows, of_heads = shares.amax(dim=1).cpu(), shares.amax(dim=0).cpu()
    of_channels = (error.abs() / truth.budget.peak[..., None])[shares > 1].amax(dim=0).cpu()
    rows, heads, channels = (each > 1 for each in (of_rows, of_heads, of_channels))
    found = []
    if _is_clear(of_rows) and (phrase := shared_by(problem, rows, ~rows)):
        found.append(f"rows {phrase}")
    if _is_clear(of_heads):
        found.append(which_heads(problem, heads))
    if _is_clear(of_channels):
        found.append(f"only {places('channel', channels.nonzero().flatten().tolist())}")
    return f"wrong are {', '.join(found)}" if found else None


def _is_clear(errors: Tensor) -> bool:
    """Return whether some errors are above 1 budget, all of these clearly, and some are not."""
    wrong = errors > 1
    return bool(wrong.any()) and not bool(wrong.all()) and bool((errors[wrong] >= _CLEAR).all())


def shared_by(problem: Problem, rows: Tensor, others: Tensor) -> str | None:
    """Return in words what all of ``rows`` and none of ``others`` (bool ``[T]``) have in common, or None if unknown."""
    known = [(phrase, has) for phrase, has in _row_properties(problem, rows, others) if bool(has[rows].all())]
    exact = [phrase for phrase, has in known if not bool(has[others].any())]
    if exact:
        return exact[0]
    repeated = [(phrase, has) for phrase, has in known if phrase.startswith(_REPEATED)]
    for phrase, has in repeated:
        for other, also in known:
            if not other.startswith(_REPEATED) and not bool((has & also)[others].any()):
                return f"{other}, {phrase}"
    return None


def _row_properties(problem: Problem, rows: Tensor, others: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield properties that rows may share: (in words, bool ``[T]``).

    ``rows``: the wrong ones; ``others``: right ones.
    """

    def each(values: Sequence[int]) -> Tensor:
        return torch.tensor([v for v, r in zip(values, problem.requests, strict=True) for _ in range(r.rows)])

    requests, size = problem.requests, problem.cache.block_size
    query_len, num_keys = each([r.rows for r in requests]), each([r.num_keys for r in requests])
    request, cached = each(range(len(requests))), each([r.cached for r in requests])
    nth = torch.cat([torch.arange(r.rows) for r in requests])
    position, row = nth + num_keys - query_len, torch.arange(len(nth))
    yield "with query_len 1", query_len == 1
    yield "with query_len > 1", query_len > 1
    yield "without context", cached == 0
    yield "with context", cached > 0
    yield "with query_len > 1 and context", (query_len > 1) & (cached > 0)
    first = int(request[rows][0])
    yield f"of request {first}", request == first
    yield "of requests other than request 0", request > 0
    yield "of requests other than the last", request < len(requests) - 1
    yield "first of their requests", nth == 0
    yield "last of their requests", nth == query_len - 1
    yield "behind the first of their requests", nth > 0
    yield "before the last of their requests", nth < query_len - 1
    yield "where the last page is full", num_keys % size == 0
    yield "where the last page is not full", num_keys % size != 0
    if int(rows.sum()) > 1 and int((rows | others).sum()) >= _FEWEST_REPEATED:
        for step in _ROW_STEPS:
            for name, value in (("position", position), ("number in the request", nth), ("number", row)):
                yield f"whose {name} is a multiple of {step}", value % step == 0
                yield f"whose {name} is {step - 1} modulo {step}", value % step == step - 1
    start, _ = visible_span(params_of(problem), position, num_keys)
    yield "whose keys begin inside of a page", start % size != 0
    yield "whose keys begin behind the first key", start > 0
    values = (
        ("seq_len", num_keys),
        ("query_len", query_len),
        ("row of the request", nth),
        ("position", position),
        ("context_len", num_keys - query_len),
        ("pages", -(-num_keys // size)),
        ("number in the batch", row),
    )
    for name, value in values:
        least, most = int(value[rows].min()), int(value[rows].max())
        if least == most:
            yield f"with {name} {least}", value == least
        yield f"with {name} >= {least}", value >= least
        yield f"with {name} <= {most}", value <= most


def which_heads(problem: Problem, heads: Tensor) -> str:
    """Return the wrong ``heads`` (bool ``[H]``) in words, with what they have in common."""
    group = problem.layer.num_heads // problem.layer.num_kv_heads
    indices = heads.nonzero().flatten().tolist()
    text = f"only {places('head', indices)}"
    if group == 1:
        return text
    own = torch.arange(len(heads))
    if len(indices) == group and indices[0] % group == 0 and indices[-1] < indices[0] + group:
        return f"{text} (those of KV head {indices[0] // group})"
    for name, nth in (("first", 0), ("last", group - 1)):
        if torch.equal(heads, own % group == nth):
            return f"{text} (the {name} of each KV head)"
    return text


def places(name: str, indices: Sequence[int]) -> str:
    """Return indices in words: ``channels 32 to 63``, ``heads 1, 3, 5``, ``channel 7``.

    >>> places("channel", [8, 9, 10, 11]), places("head", [5]), places("channel", list(range(1, 40, 2)))
    ('channels 8 to 11', 'head 5', 'channels 1, 3, 5, ... (20 in all, 2 apart)')
    """
    if len(indices) == 1:
        return f"{name} {indices[0]}"
    apart = {b - a for a, b in pairwise(indices)}
    if apart == {1} and len(indices) > 2:
        return f"{name}s {indices[0]} to {indices[-1]}"
    if len(indices) <= 6:
        return f"{name}s {', '.join(map(str, indices))}"
    steps = f", {apart.pop()} apart" if len(apart) == 1 else ""
    return f"{name}s {', '.join(map(str, indices[:3]))}, ... ({len(indices)} in all{steps})"


# Find which keys weigh too much or too little if no known fault fits, and what their positions have in common.
#
# In the inputs, each row and head gives most weight to one key. A fault that hides, shows or reweighs keys therefore
# moves the row's output towards one value, or away from it. Each wrong row blames that key; the heaviest keys of the
# right rows serve as a control.

_MOST_WEIGHTS = 2**22
"""Scores ``H * rows * keys`` of a request above which its rows are left out."""

_BLAMED = 0.75
"""Cosine between an error and the move towards one value from which on that key is blamed."""

_MOSTLY = 0.75
"""Share of the wrong rows and heads that must blame a key."""

_HEAVY = 0.3
"""Weight of a key above which its loss would show in a right row."""

_NEARLY_ALL = 0.8
"""Share of the blamed keys that a property must hold for."""

_MOST_TRIED = 12
"""Maximum number of properties for which the output without these keys is computed."""

_BOUNDS = (1024, 512, 256, 128, 64, 32)
"""Numbers of keys that a kernel may have room for."""

_KEY_STEPS = (256, 128, 64, 32, 16, 8, 4, 2)
"""Numbers of keys in a tile, a page or a vector."""


@dataclass(frozen=True)
class _Keys:
    """Keys of rows and heads, int64 ``[n]`` each: positions of the key and the row, and facts of the request."""

    key: Tensor
    row: Tensor
    num_keys: Tensor
    cached: Tensor
    request: Tensor


Property = Callable[[_Keys], Tensor]
"""A predicate of keys; returns bool ``[n]``."""


@dataclass(frozen=True)
class WrongKeys:
    """The key that each wrong row and head blames, and the heaviest keys of right ones."""

    blamed: _Keys
    is_seen: Tensor
    """bool ``[n]``: whether the row sees the key it blames."""
    likeness: Tensor
    """float64 ``[n]``: cosine of the error with the move towards the key's value; > 0 if the key weighs too much."""
    spared: _Keys
    num_wrong: int
    """Wrong rows and heads, including those that blame no key."""


def wrong_keys(problem: Problem, truth: Truth, values: Tensor, shares: Tensor) -> WrongKeys | None:
    """Return the keys that the wrong rows of ``values [T, H, Dv]`` blame, or None.

    None if no row blames a key, or for layers with a tree. ``shares``: the errors of ``values`` in budgets, ``[T, H]``.
    """
    if truth.rows.tree is not None:
        return None
    blamed, spared, signs, seen, count = [], [], [], [], 0
    for index, request in enumerate(problem.requests):
        taken = slice(request.first_row, request.first_row + request.rows)
        wrong = (shares[taken] > 1).T  # [H, rows]
        count += int(wrong.sum())
        if not request.num_keys or truth.params.num_heads * request.rows * request.num_keys > _MOST_WEIGHTS:
            continue
        towards, sees = _likeness(truth, index, taken, values)
        own = (request.num_keys, request.cached, index, request.first_position)
        best = towards.abs().amax(dim=-1)
        clear = wrong & (best >= _BLAMED)
        key = towards.abs().argmax(dim=-1)
        blamed.append(_placed(clear, key, *own))
        signs.append(towards.gather(-1, key[..., None])[..., 0][clear])
        seen.append(sees.expand(len(key), -1, -1).gather(-1, key[..., None])[..., 0][clear])
        weight, heaviest = _weights(truth, index, taken, sees).max(dim=-1)
        spared.append(_placed(~wrong & (weight > _HEAVY), heaviest, *own))
    if not blamed or not any(len(each.key) for each in blamed):
        return None
    return WrongKeys(_joined(blamed), torch.cat(seen), torch.cat(signs), _joined(spared), count)


def lost_keys(problem: Problem, truth: Truth, values: Tensor, shares: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (meaning, output) of losing all keys that share a property with the keys that weigh too little."""
    found = wrong_keys(problem, truth, values, shares)
    if found is None:
        return
    too_light = found.is_seen & (found.likeness < 0)
    if not bool(too_light.any()):
        return
    blamed = _Keys(*(field[too_light] for field in vars(found.blamed).values()))
    sizes = [(request.num_keys, request.cached) for request in problem.requests]
    tried = 0
    for phrase, has in _key_properties(problem, blamed):
        if tried == _MOST_TRIED:
            return
        if float(has(blamed).double().mean()) >= _NEARLY_ALL:
            tried += 1

            hidden = partial(_is_lost, has, sizes)
            yield f"keys {phrase} are missing", truth.rows.attend(truth.params, hidden=hidden)[0]


def _is_lost(has: Property, sizes: Sequence[tuple[int, int]], request: int, rows: Tensor, keys: Tensor) -> Tensor:
    num_keys, cached = (torch.full_like(keys, size) for size in sizes[request])
    return has(_Keys(keys, rows, num_keys, cached, torch.full_like(keys, request)))


def key_pattern(problem: Problem, truth: Truth, values: Tensor, shares: Tensor) -> str | None:
    """Return in words which keys weigh too much or too little in the wrong rows of ``values``, or None."""
    found = wrong_keys(problem, truth, values, shares)
    if found is None or len(found.blamed.key) < _MOSTLY * found.num_wrong:
        return None
    kinds = {
        "are seen, though hidden from their rows": ~found.is_seen,
        "weigh too much": found.is_seen & (found.likeness > 0),
        "weigh too little": found.is_seen & (found.likeness < 0),
    }
    for amount, chosen in kinds.items():
        if float(chosen.double().mean()) >= _NEARLY_ALL:
            blamed = _Keys(*(field[chosen] for field in vars(found.blamed).values()))
            for phrase, has in _key_properties(problem, blamed):
                if bool(has(blamed).all()) and not bool(has(found.spared).any()):
                    return f"keys {phrase} {amount}"
            return f"the heaviest keys {amount}" if "weigh" in amount else f"keys {amount}"
    return None


def _likeness(truth: Truth, index: int, taken: slice, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines ``[H, rows, keys]`` of errors with the moves towards each value, and which keys each row sees."""
    rows = truth.rows
    held = parts_of_request(rows, index)[2].repeat_interleave(truth.params.group_size, dim=1).transpose(0, 1)
    right = truth.out[taken].transpose(0, 1)
    error = values[taken].transpose(0, 1) - right
    along = error @ held.transpose(1, 2) - (error * right).sum(-1, keepdim=True)
    length = (
        (held * held).sum(-1)[:, None] - 2 * right @ held.transpose(1, 2) + (right * right).sum(-1, keepdim=True)
    ).clamp(min=1e-30)
    size = error.norm(dim=-1, keepdim=True).clamp(min=1e-30)
    return along / length.sqrt() / size, _sees(truth, index)


def _sees(truth: Truth, index: int) -> Tensor:
    num_rows, num_keys = int(truth.rows.num_rows[index]), int(truth.rows.num_keys[index])
    device = truth.rows.keys.device
    q_pos = torch.arange(num_rows, device=device)[:, None] + (num_keys - num_rows)
    k_pos = torch.arange(num_keys, device=device)[None]
    return truth.rows.sees(truth.params, q_pos, k_pos, num_keys - num_rows).expand(num_rows, num_keys)


def _weights(truth: Truth, index: int, taken: slice, sees: Tensor) -> Tensor:
    scores = unmasked_scores(truth.params, truth.rows, index).masked_fill(~sees, -torch.inf)
    return torch.nan_to_num(torch.exp(scores - truth.lse[taken].T[..., None]))


def _placed(chosen: Tensor, key: Tensor, num_keys: int, cached: int, request: int, first: int) -> _Keys:
    row = torch.arange(key.shape[1], device=key.device).expand_as(key)[chosen] + first
    found = key[chosen]
    return _Keys(found, row, *(torch.full_like(found, each) for each in (num_keys, cached, request)))


def _joined(parts: list[_Keys]) -> _Keys:
    return _Keys(*(torch.cat(fields) for fields in zip(*(vars(part).values() for part in parts), strict=True)))


def _key_properties(problem: Problem, found: _Keys) -> Iterator[tuple[str, Property]]:
    """Yield (property in words, predicate) of properties that keys may share. ``found``: the blamed keys.

    A property that repeats needs a request in which two keys have it, or which goes on behind the second run.
    """
    size = problem.cache.block_size
    yield "of the context", lambda k: k.key < k.cached
    yield "of this step", lambda k: k.key >= k.cached
    yield "of the rows themselves", lambda k: k.key == k.row
    yield "at position 0", lambda k: k.key == 0
    yield "of last pages", lambda k: k.key >= (k.num_keys - 1) // size * size
    yield "of other pages than the first", lambda k: k.key >= size
    longest = int(found.num_keys.max())
    for step in (each for each in _KEY_STEPS if longest > 2 * each):
        yield f"whose position is a multiple of {step}", partial(_is_at, step, 0)
        yield f"whose position is {step - 1} modulo {step}", partial(_is_at, step, step - 1)
        yield f"of the last, partly filled tile of {step}", partial(_is_in_last_tile, step)
    for step in (each for each in dict.fromkeys((size, *_KEY_STEPS)) if longest > 2 * each):
        yield f"of every second run of {step} positions", partial(_is_in_run, step, 1)
        yield f"of every second run of {step} positions, the first among them", partial(_is_in_run, step, 0)
    least, most = int(found.key.min()), int(found.key.max())
    for bound in dict.fromkeys((least, *(b for b in _BOUNDS if b <= least))):
        yield f"at positions from {bound} on", partial(_is_behind, bound)
    yield f"at positions up to {most}", lambda k: k.key <= most
    near, far = int((found.row - found.key).min()), int((found.row - found.key).max())
    yield f"{near} or more positions before their row", lambda k: k.row - k.key >= near
    yield f"at most {far} positions before their row", lambda k: k.row - k.key <= far
    end = int((found.num_keys - found.key).max())
    yield f"among the last {end} of their requests", lambda k: k.num_keys - k.key <= end


def _is_at(step: int, rest: int, keys: _Keys) -> Tensor:
    return (keys.key % step == rest) & (keys.key > 0)


def _is_in_last_tile(step: int, keys: _Keys) -> Tensor:
    return keys.key >= keys.num_keys // step * step


def _is_in_run(step: int, rest: int, keys: _Keys) -> Tensor:
    return keys.key // step % 2 == rest


def _is_behind(bound: int, keys: _Keys) -> Tensor:
    return keys.key >= bound


# Right numbers in wrong places: rows, heads and channels of output or query that are exchanged or lost.

_ALIKE = 0.05
"""Relative difference below which a channel counts as equal to another one."""

_WIDTHS = (8, 16, 32, 64, 128, 256)
"""Numbers of channels that a kernel may assume for a head, or for a tile of a head."""

_MOST_REARRANGED = 512
"""Rows of a step up to which the source of a wrong row is searched for."""

_FEWEST_REARRANGED = 8
"""Wrong rows and heads from which on a match of channels is no coincidence."""

_NAMED_PLACES = 3
"""Places that a message names one by one."""


def query_explanations(truth: Truth) -> Iterator[Hypothesis]:
    """Yield the faults of using queries of other rows or heads, and of products over some of the channels."""
    rows, params = truth.rows, truth.params
    starts, number = rows.cu_seqlens_q[:-1], rows.num_rows
    first, length = (each.repeat_interleave(number) for each in (starts, number))
    nth = rows.places.node
    if bool((number > 1).any()):
        moved = {
            "the query of a row is that of the row before in its request": (nth - 1) % length,
            "the query of a row is that of the next row of its request": (nth + 1) % length,
            "every row of a request has the query of its first row": torch.zeros_like(nth),
            "every row of a request has the query of its last row": length - 1,
        }
        for meaning, place in moved.items():
            other = replace(rows, query=rows.query[first + place])
            yield Hypothesis(meaning, partial(other.attend, params))
    for meaning, heads in _head_orders(params.num_heads):
        other = replace(rows, query=rows.query[:, heads])
        yield Hypothesis(f"query head h has the query of head {meaning}", partial(other.attend, params))
    size = params.head_size
    channel = torch.arange(size, device=rows.query.device)
    kept = {f"only channels 0 to {width - 1} count in the scores": channel < width for width in _WIDTHS if width < size}
    if size // 2 not in _WIDTHS:
        kept[f"only channels 0 to {size // 2 - 1} count in the scores"] = channel < size // 2
    kept["the last channel is missing in the scores"] = channel < size - 1
    for meaning, counts in kept.items():
        yield Hypothesis(meaning, partial(replace(rows, query=rows.query * counts).attend, params))
    for meaning, order in _orders(channel):
        other = replace(rows, query=rows.query[..., order])
        yield Hypothesis(f"the channels of query and key do not match: {meaning}", partial(other.attend, params))


def _head_orders(number: int) -> Iterator[tuple[str, list[int]]]:
    """Yield (name of the head whose query head h gets, list of these heads)."""
    if number > 1:
        yield "h - 1", [(head - 1) % number for head in range(number)]
        yield "num_heads - 1 - h", list(reversed(range(number)))
    if number > 2:
        yield "h + 1", [(head + 1) % number for head in range(number)]


def packed_queries(truth: Truth) -> Iterator[Hypothesis]:
    """Yield the faults of reading the query as if every request had equally many rows."""
    rows = truth.rows
    number = rows.num_rows
    place = torch.arange(len(rows.query), device=rows.query.device)
    request = torch.arange(len(number), device=place.device).repeat_interleave(number)
    longest = int(number.max())
    for width in dict.fromkeys((longest, 1 << (longest - 1).bit_length())):
        other = (request * width + rows.places.node).clamp(max=len(place) - 1)
        if not torch.equal(other, place):
            packed = replace(rows, query=rows.query[other])
            yield Hypothesis(
                f"queries are read as if every request had {width} rows", partial(packed.attend, truth.params)
            )


def _orders(channel: Tensor) -> Iterator[tuple[str, Tensor]]:
    size = len(channel)
    yield "in one of them the halves are exchanged", channel.roll(size // 2)
    yield "in one of them they are in reversed order", channel.flip(0)
    if size % 2 == 0:
        halves = torch.cat([channel[::2], channel[1::2]])
        yield "one has even and odd ones interleaved, the other in halves", halves
        yield "one has the halves interleaved, the other not", halves.argsort()


def misplaced(problem: Problem, truth: Truth, values: Tensor, shares: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (meaning, output ``[T, H, Dv]``) of right outputs in other channels, heads and rows, nearest to ``values``.

    ``shares``: the errors of ``values`` in budgets, ``[T, H]``.
    """
    wrong = shares > 1
    number = values[wrong].median()
    yield f"every number of the output is {float(number):.3g}", torch.full_like(values, float(number))
    yield from _channels(truth, values, wrong)
    yield from _heads(truth, values, wrong)
    yield from _rows(problem, truth, values, wrong)


def _channels(truth: Truth, values: Tensor, wrong: Tensor) -> Iterator[tuple[str, Tensor]]:
    got, right = values[wrong], truth.out[wrong]  # [n, Dv]
    size = right.shape[1]
    bad = ((got - right).abs() > truth.budget.peak[wrong][:, None]).any(dim=0)
    if not bool(bad.any()):
        return
    which = bad.nonzero().flatten()
    if not bool(bad.all()):
        out = truth.out.clone()
        out[..., which] = 0.0
        yield f"{places('channel', which.tolist())} of the output are 0", out
    if len(got) < _FEWEST_REARRANGED:
        return
    norm = (right * right).sum(dim=0)
    far = (got * got).sum(dim=0)[:, None] - 2 * got.T @ right + norm[None]  # [Dv, Dv]: channel got, channel right
    source = far.argmin(dim=1)
    source = torch.where(bad, source, torch.arange(size, device=source.device))
    near = far.gather(1, source[:, None])[:, 0] <= _ALIKE**2 * norm[source]
    if bool(near[bad].all()) and bool((source != torch.arange(size, device=source.device)).any()):
        named = [f"channel {c} holds channel {int(source[c])}" for c in which.tolist()[:_NAMED_PLACES]]
        more = f", ... ({len(which)} in all)" if len(which) > _NAMED_PLACES else ""
        yield f"channels of the output are exchanged: {', '.join(named)}{more}", truth.out[..., source]


def _heads(truth: Truth, values: Tensor, wrong: Tensor) -> Iterator[tuple[str, Tensor]]:
    number = truth.params.num_heads
    source = torch.arange(number, device=values.device)
    heads = wrong.any(dim=0).nonzero().flatten().tolist()
    for head in heads:
        rows = wrong[:, head]
        off = torch.linalg.vector_norm(truth.out[rows] - values[rows, head][:, None], dim=-1)
        source[head] = off.norm(dim=0).argmin()
    moved = [head for head in heads if int(source[head]) != head]
    if moved:
        named = [f"head {head} holds that of head {int(source[head])}" for head in moved[:_NAMED_PLACES]]
        more = f", ... ({len(moved)} in all)" if len(moved) > _NAMED_PLACES else ""
        # Within a group, all heads read the same keys, so exchanged queries give the same.
        group = torch.div(torch.arange(number, device=values.device), truth.params.group_size, rounding_mode="floor")
        what = "queries or outputs" if torch.equal(group[source], group) else "outputs"
        yield f"{what} are those of other heads: {', '.join(named)}{more}", truth.out[:, source]


def _rows(problem: Problem, truth: Truth, values: Tensor, wrong: Tensor) -> Iterator[tuple[str, Tensor]]:
    rows = wrong.any(dim=1).nonzero().flatten()
    if len(truth.out) > _MOST_REARRANGED:
        return
    source = torch.arange(len(values), device=values.device)
    source[rows] = torch.cdist(values[rows].flatten(1), truth.out.flatten(1)).argmin(dim=1)
    moved = [row for row in rows.tolist() if int(source[row]) != row]
    if not moved:
        return
    shifts = {int(source[row]) - row for row in moved}
    if len(shifts) == 1:
        (shift,) = shifts
        words = f"each holds that of the row {abs(shift)} {'behind' if shift > 0 else 'before'} it"
    else:
        named = [
            f"row {row} ({problem.row_name(row)}) holds that of row {int(source[row])}" for row in moved[:_NAMED_PLACES]
        ]
        words = ", ".join(named) + (f", ... ({len(moved)} in all)" if len(moved) > _NAMED_PLACES else "")
    yield f"outputs are those of other rows: {words}", truth.out[source]


def rescaled(_problem: Problem, truth: Truth, values: Tensor, shares: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (meaning, output) of the right output times a factor, one for all wrong rows and heads."""
    wrong = shares > 1
    if int(wrong.sum()) < 2:
        return
    own = (truth.out**2).sum(dim=-1).clamp(min=1e-300)
    factor = float(((values * truth.out).sum(dim=-1) / own)[wrong].median())
    yield f"the output is the right one times {factor:.3g}", truth.out * factor


# Find the factor by which scale, soft cap or ALiBi slopes are wrong, if the output is right for another number.
#
# The factor is searched for on the smallest requests with wrong rows, on a grid and then between two of its points, and
# is then refined on all rows.

_REACH, _WIDE_STEP, _STEP = math.log(4.0), 0.15, 0.05
"""Natural logarithms: of the largest factor tried, and of the steps between points of the coarse and the fine grid."""

_FINEST = 2e-6
"""Difference of two logarithms below which the search ends."""

_LEAST = 2e-4
"""Natural logarithm that a factor must exceed in absolute value; below it, the factor counts as 1."""

FACTOR = " times the layer's"
"""End of the meanings."""

_NEAR = 1e-3
"""Difference of two logarithms within which a factor is that of an earlier case."""

_NEARER = 2.0
"""How many times nearer than the truth the best answer must be on the smallest requests."""

_FEWEST_SCALED = 3
"""Wrong rows and heads that one factor must explain."""

_FEW_SCORES, _MOST_SCALED = 2**17, 2**20
"""Scores ``H * rows * keys``: maximum for the smallest requests together, and for a single request."""

_GOLDEN = (math.sqrt(5) - 1) / 2

Altered = Callable[[float], AttentionParams]


def other_factors(
    problem: Problem,
    truth: Truth,
    values: Tensor,
    shares: Tensor,
    near: Collection[str] = (),
    among: Collection[str] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (meaning, output ``[T, H, Dv]``) of the factor nearest to ``values``, for each number of the layer.

    ``shares``: the errors of ``values`` in budgets, ``[T, H]``. ``near``: meanings of an earlier case; then only their
    factors are tried, on the smallest requests. ``among``: the only ones of :func:`fitted_numbers` to try, among
    other words; None for all.
    """
    every = [(truth, slice(None))]
    few = [
        (truth.of_requests(index, index + 1), slice(taken.first_row, taken.first_row + taken.rows))
        for index in _smallest_wrong(problem, truth, shares)
        for taken in (problem.requests[index],)
    ]
    if not few:
        return
    for name, altered in _numbers(truth.params):

        def off(parts: list[tuple[Truth, slice]], log: float, altered: Altered = altered) -> float:
            total = 0.0
            for part, rows in parts:
                out, _ = part.rows.attend(altered(math.exp(log)))
                error = share_of_budget(values[rows] - out, part.budget)
                total += float(torch.log1p(error)[shares[rows] > 1].sum())
            return total

        known = [float(text.split()[-4]) for text in near if text.startswith(f"the {name} ") and text.endswith(FACTOR)]
        if known:
            log = _narrowed(partial(off, few), math.log(known[-1]), _NEAR)
            yield f"the {name} {math.exp(log):.4g}{FACTOR}", truth.rows.attend(altered(math.exp(log)))[0]
        if near or (among is not None and _factor_in_words(name) not in among):
            continue
        coarse = [step * _WIDE_STEP for step in range(-round(_REACH / _WIDE_STEP), round(_REACH / _WIDE_STEP) + 1)]
        middle = min(coarse, key=partial(off, few))
        fine = [middle + step * _STEP for step in range(-2, 3)]
        best = _narrowed(partial(off, few), min(fine, key=partial(off, few)), _STEP)
        if _NEARER * off(few, best) > off(few, 0.0):
            continue
        log = _narrowed(partial(off, every), best, _STEP / 10)
        if abs(log) > _LEAST:
            yield f"the {name} {math.exp(log):.4g}{FACTOR}", truth.rows.attend(altered(math.exp(log)))[0]


def fitted_numbers(params: AttentionParams) -> list[str]:
    """Return the causes that :func:`other_factors` may yield, in words without figures."""
    return [_factor_in_words(name) for name, _ in _numbers(params)]


def _factor_in_words(name: str) -> str:
    return f"the {name} N{FACTOR}"


def _numbers(params: AttentionParams) -> Iterator[tuple[str, Altered]]:
    """Yield each number that may be wrong by a factor, in words, with a function from the factor to the parameters."""
    yield "scale is", lambda factor: replace(params, scale=params.softmax_scale * factor)
    cap, slopes = params.soft_cap, params.alibi_slopes
    if cap is not None:
        yield "soft cap is", lambda factor: replace(params, logits_soft_cap=cap * factor)
    if slopes is not None:
        yield "ALiBi slopes are", lambda factor: replace(params, alibi_slopes=tuple(factor * each for each in slopes))


def _smallest_wrong(problem: Problem, truth: Truth, shares: Tensor) -> list[int]:
    """Return the requests with wrong rows that have the fewest scores.

    Empty if even the smallest has too many, or if too few rows are wrong.
    """
    wrong = (shares > 1).any(dim=1)
    scores = {
        index: request.rows * request.num_keys * truth.params.num_heads
        for index, request in enumerate(problem.requests)
        if bool(wrong[request.first_row : request.first_row + request.rows].any())
    }
    ordered = sorted(scores, key=scores.__getitem__)
    if problem.parts or int((shares > 1).sum()) < _FEWEST_SCALED or scores[ordered[0]] > _MOST_SCALED:
        return []
    sums = accumulate(scores[index] for index in ordered)
    return [index for index, total in zip(ordered, sums, strict=True) if index == ordered[0] or total <= _FEW_SCORES]


def _narrowed(off: Callable[[float], float], middle: float, reach: float) -> float:
    """Return the minimum of ``off`` within ``reach`` of ``middle``, by golden-section search."""
    low, high = middle - reach, middle + reach
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = off(left), off(right)
    while high - low > _FINEST:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = off(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = off(right)
    return (low + high) / 2


# Find which KV head each wrong query head reads, if its output is right for another KV head.

_MOST_REQUESTS = 4
"""Maximum number of requests in whose rows other KV heads are tried."""

_PARTS = {"": ("keys", "values"), "keys of ": ("keys",), "values of ": ("values",)}
"""What is read from another KV head, in words, and its fields."""

_NAMED_HEADS = 4
"""Heads that a message names one by one."""


def other_heads(problem: Problem, truth: Truth, values: Tensor, shares: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (meaning, output ``[T, H, Dv]``) of the map from query heads to KV heads that comes nearest to ``values``.

    The map holds for keys and values, or for one of them alone. ``shares``: the errors of ``values`` in budgets,
    ``[T, H]``. Only wrong heads are remapped. Nothing for a single KV head, for latent attention, and if the worst rows
    of the wrong heads are in more than ``_MOST_REQUESTS`` requests.
    """
    params = truth.params
    wrong = (shares > 1).any(dim=0).nonzero().flatten().tolist()
    if params.num_kv_heads < 2 or problem.layer.mla is not None:
        return
    worst = {head: _request_of(problem, int(shares[:, head].argmax())) for head in wrong}
    if len(set(worst.values())) > _MOST_REQUESTS:
        return
    own = torch.arange(params.num_heads, device=values.device) // params.group_size
    for part, fields in _PARTS.items():
        reads = own.clone()
        for request in set(worst.values()):
            nearest = _nearest_head(problem, truth, values, own, request, fields)
            for head in (head for head in wrong if worst[head] == request):
                reads[head] = nearest[head]
        out, _ = _reading(truth.rows, own, reads, fields).attend(replace(params, num_kv_heads=params.num_heads))
        yield _heads_in_words(part, [(head, int(reads[head]), int(own[head])) for head in wrong]), out


def _request_of(problem: Problem, row: int) -> int:
    return next(i for i, r in enumerate(problem.requests) if r.first_row <= row < r.first_row + r.rows)


def _nearest_head(
    problem: Problem, truth: Truth, values: Tensor, own: Tensor, index: int, fields: tuple[str, ...]
) -> Tensor:
    """Return int64 ``[H]``: for each query head, the other KV head whose output in request ``index`` is nearest."""
    request, params = problem.requests[index], truth.params
    taken = slice(request.first_row, request.first_row + request.rows)
    rows = truth.rows.of_requests(index, index + 1)
    errors = []
    others = [(own + shift) % params.num_kv_heads for shift in range(1, params.num_kv_heads)]
    for reads in others:
        out, _ = _reading(rows, own, reads, fields).attend(replace(params, num_kv_heads=params.num_heads))
        errors.append(torch.linalg.vector_norm((out - values[taken]).transpose(0, 1).flatten(1), dim=1))
    return torch.stack(others)[torch.stack(errors).argmin(dim=0), torch.arange(len(own), device=own.device)]


def _reading(rows: UnpagedAttention, own: Tensor, reads: Tensor, fields: tuple[str, ...]) -> UnpagedAttention:
    """Return ``rows`` with a KV head for each query head: ``reads`` for ``fields``, and its ``own`` for the other."""
    keys, values = (reads if name in fields else own for name in ("keys", "values"))
    return replace(rows, keys=rows.keys[:, keys], values=rows.values[:, values])


def _heads_in_words(part: str, found: list[tuple[int, int, int]]) -> str:
    """Return the head map in words, from triples (query head, KV head it reads, KV head it should read)."""
    heads, read = [each[0] for each in found], [each[1] for each in found]
    if len(found) > 1 and len(set(read)) == 1:
        return f"query heads {', '.join(map(str, heads))} read {part}KV head {read[0]} instead of their own"
    named = [f"query head {head} reads {part}KV head {new} instead of {old}" for head, new, old in found[:_NAMED_HEADS]]
    more = f" (and {len(found) - _NAMED_HEADS} more heads read others)" if len(found) > _NAMED_HEADS else ""
    return ", ".join(named) + more


# Find the span of keys each wrong row sees, if its output is right for a span with another start or end.
#
# Examples are a mask left out in one tile, a window that begins at a page boundary, and a lost tail: each row then sees
# more or fewer keys at one end of its span, and how many differs from row to row.

WINDOW_START = "the window begins"
"""Prefix of the meaning of a fault at the first key of a sliding window."""

_MOST_SPANS = 128
"""Maximum number of wrong rows for which spans are tried."""

_MOST_SPANNED = 2**24
"""Scores ``H * rows * keys`` of a request above which spans are not tried, because all are held at once."""

_MOST_KEYS = 8192
"""Keys of a request above which spans are not tried, because every possible end is tried in turn."""


def other_spans(problem: Problem, truth: Truth, values: Tensor, shares: Tensor) -> list[tuple[str, Tensor]]:
    """Return (meaning, output ``[T, H, Dv]``) of the spans nearest to ``values``: with other ends, with other starts.

    ``shares``: the errors of ``values`` in budgets, ``[T, H]``. Only wrong rows get another span. Empty if no other
    span comes nearer, if the layer has a tree, or if there are too many rows or keys.
    """
    wrong = (shares > 1).any(dim=1)
    if truth.rows.tree is not None or not 0 < int(wrong.sum()) <= _MOST_SPANS:
        return []
    outs = {"end": truth.out.clone(), "start": truth.out.clone()}
    moved: dict[str, list[int]] = {"end": [], "start": []}
    for index, request in enumerate(problem.requests):
        own = wrong[request.first_row : request.first_row + request.rows].nonzero().flatten()
        if not len(own):
            continue
        scores = truth.params.num_heads * request.rows * request.num_keys
        if scores > _MOST_SPANNED or request.num_keys > _MOST_KEYS:
            return []
        for place, (out, shift) in _nearest_span(truth, index, request, own, values, shares).items():
            outs[place][request.first_row + own] = out
            moved[place] += shift.tolist()
    return [
        (_span_in_words(place, shifts, has_window=min(truth.params.window) >= 0), outs[place])
        for place, shifts in moved.items()
        if any(shifts)
    ]


def _nearest_span(
    truth: Truth, index: int, request: Request, own: Tensor, values: Tensor, shares: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the nearest outputs ``[r, H, Dv]`` for rows ``own [r]`` of a request, and how many keys the end was moved.

    The dict has one entry for spans with other ends, and one for other starts.
    """
    params = truth.params
    scores = unmasked_scores(params, truth.rows, index)[:, own]
    held = parts_of_request(truth.rows, index)[2].repeat_interleave(params.group_size, dim=1).transpose(0, 1)
    first, last = visible_span(params, own + (request.num_keys - request.rows), request.num_keys)
    key = torch.arange(request.num_keys, device=scores.device)
    sinks = (
        scores.new_full((params.num_heads,), -torch.inf) if params.sinks is None else scores.new_tensor(params.sinks)
    )
    rows = request.first_row + own
    is_wrong = (shares[rows] > 1).double()
    found = {}
    for place, inside in (("end", key >= first[:, None]), ("start", key <= last[:, None])):
        nearest, least = truth.out[rows], torch.full((len(own),), torch.inf, dtype=torch.float64, device=scores.device)
        shift = torch.zeros_like(own)
        top = sinks[:, None].expand(-1, len(own))
        part, total = held.new_zeros(len(held), len(own), held.shape[-1]), (top > -torch.inf).double()
        for at in key.tolist() if place == "end" else reversed(key.tolist()):
            score = scores[..., at].masked_fill(~inside[:, at], -torch.inf)
            higher = torch.maximum(top, score)
            pivot = higher.masked_fill(higher == -torch.inf, 0.0)
            fade, weight, top = torch.exp(top - pivot), torch.exp(score - pivot), higher
            part, total = part * fade[..., None] + weight[..., None] * held[:, None, at], total * fade + weight
            answer = (part / total.clamp(min=1e-300)[..., None]).transpose(0, 1)
            error = (torch.linalg.vector_norm(answer - values[rows], dim=-1) * is_wrong).sum(dim=1)
            is_better = error < least
            least = torch.where(is_better, error, least)
            nearest = torch.where(is_better[:, None, None], answer, nearest)
            shift = torch.where(is_better, at - last if place == "end" else first - at, shift)
        found[place] = nearest, shift
    return found


def _span_in_words(place: str, shifts: list[int], *, has_window: bool) -> str:
    """Return the fault in words; a shift above 0 means more keys than in the right span."""
    low, high = min(shifts), max(shifts)
    if place == "start":
        name = WINDOW_START if has_window else "the keys begin"
        if low >= 0:
            return f"{name} too early: up to {high} older keys are seen"
        if high <= 0:
            return f"{name} too late: up to {-low} of its first keys are missing"
        return f"{name} up to {high} keys too early or {-low} keys too late"
    if low >= 0:
        return f"keys after the last visible one are seen, up to {high} of them"
    if high <= 0:
        return f"the last visible keys are missing, up to {-low} of them"
    return f"the keys end up to {high} too late or {-low} too early"


# Faults of merging the partial results of splits of the keys: each is weighed by another number than its LSE.

_SPLITS = (32, 64, 128, 256, 512, 1024)
"""Numbers of keys in a split."""

LogWeight = Callable[[Tensor, Tensor], Tensor]
"""``(LSE, largest score)`` of every split, ``[H, rows, splits]`` -> the logarithm of its weight."""


def merging_explanations(params: AttentionParams, rows: UnpagedAttention) -> Iterator[Hypothesis]:
    """Yield the faults for each usual size of a split; none if there are too many scores to hold at once."""
    longest = int(rows.num_keys.max())
    if int(rows.num_rows.max()) * longest * params.num_heads > MOST_SCORES:
        return
    first = torch.arange(params.num_heads, device=rows.keys.device) // params.group_size * params.group_size
    faults: dict[str, LogWeight] = {
        "averaged, whatever their LSE": lambda lse, _top: lse.masked_fill(~torch.isneginf(lse), 0.0),
        "weighed by their largest scores, not by their LSE": lambda _lse, top: top,
        "weighed by sums that are not rescaled to a common maximum": lambda lse, top: (lse - top).nan_to_num(
            nan=-math.inf
        ),
        "merged by an LSE to base 2": lambda lse, _top: lse / math.log(2),
        "merged to base 2 by a natural LSE": lambda lse, _top: lse * math.log(2),
    }
    if params.group_size > 1:
        faults["merged by the LSE of the first head of each group"] = lambda lse, _top: lse[first]
    scores = cache(partial(masked_scores, params, rows))
    for split in _SPLITS:
        if split >= longest:
            break
        for how, log_weight in faults.items():
            weigh = partial(_weigh, split, log_weight)
            meaning = f"the partial results of splits of {split} keys are {how}"
            yield Hypothesis(meaning, partial(attend_scores, params, rows, scores, weigh))


def _weigh(split: int, log_weight: LogWeight, s_HqK: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return weights of the keys, and LSE, as ``attend_scores`` needs them. A sink is one more part."""
    num_keys = s_HqK.shape[-1]
    parts = s_HqK.split(split, -1)
    lse_HqP = torch.stack([part.logsumexp(-1) for part in parts], -1)
    weight_HqP = log_weight(lse_HqP, torch.stack([part.amax(-1) for part in parts], -1))
    total = weight_HqP.logsumexp(-1, keepdim=True)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.expand_as(total))
    moved_HqP = (weight_HqP - lse_HqP - total).nan_to_num(nan=0.0, neginf=0.0)
    return torch.exp(s_HqK + moved_HqP.repeat_interleave(split, -1)[..., :num_keys]), total
