"""What mutants of two areas leave in their output is named, by the first words that a reader sees."""

import re
from typing import Any

import pytest

from attncheck.backends.mutants.catalogue import Mutant, catalogue
from attncheck.harness.api import examine
from attncheck.reports.analysis.findings import findings
from attncheck.reports.run_file.records import Failed

MUTANTS = [mutant for mutant in catalogue() if mutant.area in ("diagnosis", "functions") and mutant.cause]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_fault_is_named_first(mutant: Mutant) -> None:
    suite, _, case = str(mutant.case).partition("/")
    examined: Any = examine(mutant.ref, suite=suite, cases=case, checks=str(mutant.check))
    first = findings(examined.records, examined.header)[0]
    assert isinstance(first.example, Failed)
    diagnosis = f"{first.title} {first.example.meaning}"
    assert re.search(str(mutant.cause), diagnosis), diagnosis
