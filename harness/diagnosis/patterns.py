"""Wrong rows, heads, channels and keys in words, by what they have in common and right ones do not."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from attncheck.harness.diagnosis.scores import parts_of_request, unmasked_scores
from attncheck.harness.problem.pages import visible_span
from attncheck.harness.problem.problem import Problem
from attncheck.harness.truth.truth import Truth, params_of

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
    of_rows = shares.amax(dim=1).cpu()
    of_heads = shares.amax(dim=0).cpu()
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
    query_len = each([r.rows for r in requests])
    num_keys = each([r.num_keys for r in requests])
    request = each(range(len(requests)))
    cached = each([r.cached for r in requests])
    nth = torch.cat([torch.arange(r.rows) for r in requests])
    position = nth + num_keys - query_len
    row = torch.arange(len(nth))
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
    if not problem.prefixes and problem.topk_indices is None:
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
        least = int(value[rows].min())
        most = int(value[rows].max())
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

    def where(self, chosen: Tensor) -> "_Keys":
        return _Keys(*(field[chosen] for field in vars(self).values()))


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
    blamed = found.blamed.where(too_light)
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
        "are seen, though hidden from their rows": ~found.is_seen & (found.likeness > 0),
        "weigh too much": found.is_seen & (found.likeness > 0),
        "weigh too little": found.is_seen & (found.likeness < 0),
    }
    for amount, chosen in kinds.items():
        if float(chosen.double().mean()) >= _NEARLY_ALL:
            blamed = found.blamed.where(chosen)
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
    num_rows = int(truth.rows.num_rows[index])
    num_keys = int(truth.rows.num_keys[index])
    device = truth.rows.keys.device
    q_pos = torch.arange(num_rows, device=device)[:, None] + (num_keys - num_rows)
    k_pos = torch.arange(num_keys, device=device)[None]
    return truth.rows.sees(truth.params, index, q_pos, k_pos).expand(num_rows, num_keys)


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
    least = int(found.key.min())
    most = int(found.key.max())
    for bound in dict.fromkeys((least, *(b for b in _BOUNDS if b <= least))):
        yield f"at positions from {bound} on", partial(_is_behind, bound)
    yield f"at positions up to {most}", lambda k: k.key <= most
    near = int((found.row - found.key).min())
    far = int((found.row - found.key).max())
    if near >= 0:  # none of the keys is ahead of its row
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
