"""Find which keys weigh too much or too little if no known fault fits, and what their positions have in common.

In the inputs, each row and head gives most weight to one key. A fault that hides, shows or reweighs keys therefore
moves the row's output towards one value, or away from it. Each wrong row blames that key; the heaviest keys of the
right rows serve as a control.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from attncheck.harness.problem.problem import Problem
from attncheck.harness.truth.softmax_hypotheses import parts_of_request, unmasked_scores
from attncheck.harness.truth.truth import Truth

_MOST_SCORES = 2**22
"""Scores ``H * rows * keys`` of a request above which its rows are left out."""

_CLEAR = 0.75
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

_STEPS = (256, 128, 64, 32, 16, 8, 4, 2)
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
        if not request.num_keys or truth.params.num_heads * request.rows * request.num_keys > _MOST_SCORES:
            continue
        towards, sees = _likeness(truth, index, taken, values)
        own = (request.num_keys, request.cached, index, request.first_position)
        best = towards.abs().amax(dim=-1)
        clear = wrong & (best >= _CLEAR)
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
    for phrase, has in _properties(problem, blamed):
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
            for phrase, has in _properties(problem, blamed):
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


def _properties(problem: Problem, found: _Keys) -> Iterator[tuple[str, Property]]:
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
    for step in (each for each in _STEPS if longest > 2 * each):
        yield f"whose position is a multiple of {step}", partial(_is_at, step, 0)
        yield f"whose position is {step - 1} modulo {step}", partial(_is_at, step, step - 1)
        yield f"of the last, partly filled tile of {step}", partial(_is_in_last_tile, step)
    for step in (each for each in dict.fromkeys((size, *_STEPS)) if longest > 2 * each):
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
