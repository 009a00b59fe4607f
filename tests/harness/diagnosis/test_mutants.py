"""What mutants leave in their output is named, by the first words that a reader sees."""

import re

import pytest

from attncheck.backends.mutants.catalogue import catalogue
from attncheck.harness.api import examine
from attncheck.reports.analysis.findings import findings
from attncheck.reports.run_file.records import Failed

UNNAMED = {"stride-in-ten-bits", "rows-by-the-query", "grid-of-rows", "grid-of-requests-and-heads"}
"""The summary of the last two says which rows were never written; of the first two no hypothesis is known."""

MUTANTS = [m for m in catalogue() if m.area in ("diagnosis", "functions", "spans", "sparse") and m.cause]
MUTANTS += [m for m in catalogue() if m.area == "limits" and m.check == "numerics" and m.name not in UNNAMED]
LATENT = {"latent-scale-of-the-cache-row", "latent-cuts-all-keys-first", "latent-reads-by-v-scale"}
MUTANTS += [m for m in catalogue() if m.name in {*LATENT, "latent-drafts-see-each-other"}]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_fault_is_named_first(mutant):
    suite, _, case = str(mutant.case).partition("/")
    examined = examine(mutant.ref, suite=suite, cases=case, checks=str(mutant.check))
    first = findings(examined.records, examined.header)[0]
    assert isinstance(first.example, Failed)
    diagnosis = f"{first.title} {first.example.meaning}"
    assert re.search(str(mutant.cause), diagnosis), diagnosis
