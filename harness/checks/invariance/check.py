"""``invariance``: an output does not depend on anything that must not matter.

The same step runs again in other ways, and the rows that were right in the first step must be right again. If several
things change at once, a finding names the smallest set that makes the difference. Cannot see: variations that this
case does not use, and rows that are wrong in the first step.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from attncheck.harness.checks.findings import Broken, Finding, Holds
from attncheck.harness.checks.interface import Check, CheckedCase
from attncheck.harness.checks.invariance.changes import Variation
from attncheck.harness.checks.invariance.history import Repetition, repetitions
from attncheck.harness.checks.invariance.right_rows import RightRows
from attncheck.harness.checks.invariance.same_requests import same_requests
from attncheck.harness.checks.invariance.same_step import same_step
from attncheck.harness.driver.observation import Raised
from attncheck.reports.run_file.causes import UNKNOWN


def _check(case: CheckedCase) -> Finding:
    session, seen = case.first_step()
    rows = RightRows.of(case.problem, case.truth, seen, case.backend.conventions)
    done: list[str] = []
    others = repetitions(rows, session)
    # State kept from other steps disturbs every variation, so run one repetition first, which reports it as such.
    variations: Iterator[Variation[Any] | Repetition] = chain(
        islice(others, 1), same_step(rows, session), same_requests(rows, session), others
    )
    for variation in variations:
        wrong, what = variation.wrong(), variation.what
        if isinstance(wrong, Raised) and isinstance(variation, Variation) and variation.instead is not None:
            done.append(f"not held against the backend: {wrong.in_words}")
            wrong, what = variation.instead.wrong(), variation.instead.what
        if isinstance(wrong, Broken) and not bool(rows.is_right.all() and rows.lse_is_right.all()):
            return replace(wrong, meaning=f"{UNKNOWN}the first step has wrong rows, too")
        if wrong is not None:
            return wrong
        done.append(what)
    return Holds({"rows": int(rows.is_right.all(dim=1).sum()), "variations": len(done)}, tuple(done))


CHECK = Check(_check)
