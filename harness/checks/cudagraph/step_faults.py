"""Describe in one line what is wrong with a capture or with one step of a graph, using the judges of other checks."""

from dataclasses import replace

import torch
from torch import Tensor

from attncheck.backends.conventions import Conventions
from attncheck.harness.checks import cache_write, containment, lse
from attncheck.harness.checks.cudagraph.session import CapturedBucket
from attncheck.harness.checks.findings import Broken
from attncheck.harness.checks.numerics import check_numerics
from attncheck.harness.driver.kv_pool import KVPool
from attncheck.harness.driver.observation import Observation
from attncheck.harness.problem.problem import Problem
from attncheck.harness.truth.truth import Truth


def capture_fault(problem: Problem, capture: CapturedBucket) -> str | None:
    """Return what a capture changed in inputs or cache, or None if it changed no byte. All its slots are -1."""
    if capture.changed:
        return f"forward changed its inputs at capture: {', '.join(capture.changed)}"
    if torch.equal(capture.before, capture.after):
        return None
    changed = "capture changed the cache, although every slot of its dummies is -1"
    if capture.pool.codec is None:
        return changed
    slots = torch.arange(problem.num_blocks * problem.cache.block_size, device=capture.before.device)
    pairs = [capture.pool.read_image(image, slots) for image in (capture.before, capture.after)]
    wrong = torch.stack([_differs(was, now) for was, now in zip(*pairs, strict=True)]).any(0).nonzero().flatten()
    if not len(wrong):
        return f"{changed}: bytes between the slots"
    name = problem.slot_name(int(wrong[0]))
    text = f"{changed}: {f'1 slot, {name}' if len(wrong) == 1 else f'{len(wrong)} slots, the first is {name}'}"
    if int(wrong[0]) >= problem.cache.block_size:
        return text
    spoilt = torch.stack([~torch.isfinite(rows[wrong].double()).flatten(1).all(1) for rows in pairs[1]]).any()
    what = "NaN or Inf now is" if bool(spoilt) else "another value now is"
    return f"{text}; {what} in the null page, which every padding row points to"


def step_fault(
    problem: Problem, truth: Truth, conventions: Conventions, seen: Observation, pool: KVPool | None
) -> str | None:
    """Return what is wrong with one step over ``pool``, or None. Padding rows of the output do not count.

    Judges guard zones, the cache, inputs, rows never written, the output and the LSE, in this order.
    """
    if seen.breaches:
        return containment.breach(seen)
    if pool is not None and pool.codec is not None:
        rows = problem.keys, problem.values
        written = cache_write.judge_pool(problem, pool, seen, rows, [rows])
        if isinstance(written, Broken):
            return written.summary + (f" ({written.meaning})" if written.meaning else "")
    elif seen.changed:
        return f"inputs were changed: {', '.join(seen.changed)}"
    output = check_numerics(problem, truth, replace(seen, protocol=()), explains=False)
    if isinstance(output, Broken):
        return output.summary
    log_sum = lse.check_lse(problem, truth, seen, conventions) if seen.lse is not None else None
    return f"LSE: {log_sum.summary}" if isinstance(log_sum, Broken) else None


def _differs(was: Tensor, now: Tensor) -> Tensor:
    return (was.contiguous().view(torch.uint8) != now.contiguous().view(torch.uint8)).flatten(1).any(1)
