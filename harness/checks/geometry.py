"""Variations of a cache's geometry, as in hybrid models: pages that lie apart, and blocks of several pages.

Rows, keys and truth stay those of the case. The cache becomes a view of a pool of three layers, with NaN between its
pages (``cache.pool_order``). Blocks of the cache manager become runs of pages (``cache.manager_block_size``).
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, get_args

from attncheck.backends.caches.packings import pool_axes
from attncheck.cases.consistency import check_meaning
from attncheck.errors import SpecError
from attncheck.harness.checks.again import Change, RightRows, Unchanged, Variation, changed_step
from attncheck.harness.checks.cache_write import judge_pool
from attncheck.harness.checks.findings import Broken
from attncheck.harness.driver.foreign_code import StageError, call_backend
from attncheck.harness.driver.observation import Observation
from attncheck.harness.driver.session import Session
from attncheck.harness.problem.problem import Arrangement, Problem, arranged
from attncheck.reference.step_spec import CacheSpec, PoolOrder

_APART = (
    "keys are read or written elsewhere than the strides of kv_cache state, by which pages may lie apart; "
    'read the strides, or declare cache_strides="pages"'
)
_MANAGER = "cache_config.block_size, that of the cache manager, is taken for the page size, kv_cache_spec.block_size"
_ELSEWHERE = Unchanged(
    "in other pages of a new pool, on a new impl and builder",
    "pages are not found through the block table alone, or something is kept from an earlier call",
)

_LARGEST = 2**24
"""Largest cache in bytes that is varied. Its pool of three layers is three times larger, and bytes are compared."""


def other_geometry(rows: RightRows, session: Session) -> Iterator[Variation]:
    """Yield a step over a cache of another geometry.

    If the backend does not declare which strides it reads, it may raise, and then gets a cache with the case's strides.
    """
    problem, conventions, own = rows.problem, session.backend.conventions, rows.problem.cache
    if session.pool is None or session.pool.kv_cache.nbytes > _LARGEST:
        return
    sizes = [pages * own.pages_per_block * own.block_size for pages in (2, 4)]
    is_undeclared = conventions.cache_strides == "undeclared"
    orders = get_args(PoolOrder) if is_undeclared else conventions.pool_orders
    blocks = _chosen(problem, [_change(_MANAGER, "manager_block_size", size) for size in sizes])
    possible = [order for order in orders if _has_order(session, order)]
    order = _chosen(problem, [_change(_APART, "pool_order", order) for order in possible])
    judge = partial(_judge, rows, session)
    step_with = partial(changed_step, own, judge=judge, unchanged=_ELSEWHERE)
    less = step_with(blocks) if order and is_undeclared else None
    if blocks or order:
        yield step_with((*blocks, *order), instead=less)


def _has_order(session: Session, pool_order: PoolOrder) -> bool:
    """Return whether the shape of the backend's cache shows which axes are those of pages and heads in this order."""
    problem, backend = session.problem, session.backend
    cache = replace(problem.cache, pool_order=pool_order)
    axes = partial(pool_axes, backend, problem.layer, cache, problem.num_blocks)
    try:
        call_backend("kv_cache", axes)
    except StageError:  # no such axes, or the backend refuses a cache with twice the pages or heads
        return False
    return True


def _change(meaning: str, key: str, value: Any) -> Change[CacheSpec]:
    return Change(f"cache.{key} {value}", meaning, lambda cache: replace(cache.unplaced, **{key: value}))


def _chosen(problem: Problem, changes: Sequence[Change[CacheSpec]]) -> list[Change[CacheSpec]]:
    """Return one of the changes, by the case's hash; none if none makes another, valid cache for the case."""
    case = problem.case
    possible = []
    for change in changes:
        with suppress(SpecError):
            cache = change.alter(case.cache)
            check_meaning(case.layer, cache, case.batch)
            possible += [change] if cache != case.cache.unplaced else []
    return possible[int(case.hash, 16) % len(possible) :][:1] if possible else []


def _judge(rows: RightRows, session: Session, cache: CacheSpec) -> Broken | None:
    """Return what is wrong with output or cache of the step over ``cache``, if it is right in the first step."""
    how = Arrangement.of_all(rows.problem, cache)
    made = Session(session.backend, arranged(rows.problem, how), session.device)
    seen = made.run()
    if (wrong := rows.wrong_in(seen, how)) is not None:
        return wrong
    wrong = _wrong_pool(made, seen)
    return None if wrong is None or _wrong_pool(session, rows.first) is not None else wrong


def _wrong_pool(session: Session, seen: Observation) -> Broken | None:
    """Return what is wrong with the cache after a step; None if that is not known, or if attncheck writes the cache."""
    problem, pool = session.problem, session.pool
    if pool is None or pool.codec is None or not session.impl.brings_writer:
        return None
    stored = problem.keys, problem.values
    finding = judge_pool(problem, pool, seen, stored, [stored])
    return finding if isinstance(finding, Broken) else None
