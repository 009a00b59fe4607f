"""Whether a timed call stored its new rows: to leave that out saves time, and the output does not show it.

Cannot see: single wrong elements, which ``cache_write`` looks for; a codec, which is the backend's own, that writes
what is missing where it is asked to read, or makes it up. Must not know: clocks, backends.
"""

import torch

from attncheck.harness.checks.findings import Broken
from attncheck.harness.checks.timing.fresh_contents import FreshContents
from attncheck.harness.checks.timing.judgement import UntrustworthyTimeError
from attncheck.harness.driver.kv_pool import KVPool
from attncheck.harness.problem.problem import Problem

LOOKED_AT = 64
"""New rows that are read back after a call; which, nobody can foresee."""

_NEAR = 0.1
"""Relative error up to which a row is the one that was handed over: codes are coarser than rows."""


def require_stored(name: str, pool: KVPool, problem: Problem, contents: FreshContents) -> None:
    """Raise UntrustworthyTimeError if new rows of ``problem`` are not in the cache. Do nothing without a codec."""
    if pool.codec is None:
        return
    new = problem.new_keys[problem.new_keys >= 0]
    new = new[contents.some(len(new), LOOKED_AT).cpu()]
    if not len(new):
        return
    slots = problem.key_slots[new]
    missing = torch.zeros(len(new), dtype=torch.bool)
    for found, given in zip(pool.read_image(pool.bytes(), slots), (problem.keys, problem.values), strict=True):
        wanted = given[new].double().flatten(1)
        error = (found.double().flatten(1) - wanted).norm(dim=1)
        missing |= ~(error <= _NEAR * wanted.norm(dim=1)).cpu()
    if bool(missing.any()):
        slot = int(slots[missing][0])
        raise UntrustworthyTimeError(
            Broken(
                f"{name}: {int(missing.sum())} of {len(new)} new rows looked at are not in the cache, first: "
                f"{problem.slot_name(slot)}",
                meaning="the cache write is left out under the clock, or left to later",
            )
        )
