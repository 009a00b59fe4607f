"""The kill matrix: which check catches which mutant and with which diagnosis, as text and as JSON."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import indent
from typing import Any, Literal

from tabulate import tabulate

from attncheck.backends.mutants.catalogue import Mutant
from attncheck.reports.analysis.phrases import plural
from attncheck.reports.run_file.causes import UNEXPLAINED, likely_causes
from attncheck.reports.run_file.records import FALLEN_SHORT, Failed, Record, Unavailable, Unsupported

Diagnosis = Literal["right", "wrong", "absent", ""]
"""Whether the report named the mutant's cause; empty if the mutant survives or its entry has no cause."""


@dataclass(frozen=True)
class MutantResult:
    """The result for one mutant.

    ``checks``: the checks that catch it. ``causes``: the first likely causes in its records.
    ``missing``: why it was not examined; empty if it was.
    """

    mutant: Mutant
    checks: tuple[str, ...] = ()
    diagnosis: Diagnosis = ""
    causes: str = ""
    missing: str = ""


@dataclass(frozen=True)
class KillMatrix:
    """Mutants of a run against its checks. ``false_alarms``: by reference, the checks that a correct backend failed."""

    checks: tuple[str, ...]
    results: tuple[MutantResult, ...]
    false_alarms: Mapping[str, tuple[str, ...]]

    @property
    def examined(self) -> tuple[MutantResult, ...]:
        """The mutants that were examined."""
        return tuple(result for result in self.results if not result.missing)

    @property
    def survivors(self) -> tuple[MutantResult, ...]:
        """The mutants that no check catches."""
        return tuple(result for result in self.examined if not result.checks)

    @property
    def is_clean(self) -> bool:
        """Whether every mutant was examined and caught, and every correct backend passed."""
        return not any(self.false_alarms.values()) and all(result.checks for result in self.results)

    def alone(self, check: str) -> tuple[str, ...]:
        """Return the mutants that only ``check`` catches."""
        return tuple(result.mutant.name for result in self.results if result.checks == (check,))

    def diagnosed(self, how: Diagnosis) -> tuple[MutantResult, ...]:
        """Return the mutants with this diagnosis."""
        return tuple(result for result in self.results if result.diagnosis == how)


def kill_matrix(
    records: Iterable[Record],
    mutants: Sequence[Mutant],
    right: Sequence[str],
    checks: Sequence[str],
    missing: Mapping[str, str],
) -> KillMatrix:
    """Return the matrix of ``records``.

    ``right``: references of correct backends. ``missing``: by reference, why a mutant was not examined. A mutant on
    which no check ran counts as missing too.
    """
    by_ref: dict[str, list[Record]] = {}
    not_run: dict[str, str] = {}
    for record in records:
        if isinstance(record, Unsupported | Unavailable):
            not_run.setdefault(record.backend_ref, f"no check ran on it: {record.reasons[0]}")
        else:
            by_ref.setdefault(record.backend_ref, []).append(record)
    why = {mutant.ref: "no case of the suites was run" for mutant in mutants} | not_run | dict(missing)
    results = tuple(
        _result(mutant, found, checks)
        if (found := by_ref.get(mutant.ref))
        else MutantResult(mutant, missing=why[mutant.ref])
        for mutant in mutants
    )
    alarms = {ref: _short_checks(by_ref[ref], checks) for ref in right if ref in by_ref}
    return KillMatrix(tuple(checks), results, alarms)


def _short_checks(records: Iterable[Record], checks: Sequence[str]) -> tuple[str, ...]:
    short = {record.check for record in records if record.outcome in FALLEN_SHORT}
    return tuple(check for check in checks if check in short)


def _result(mutant: Mutant, records: Sequence[Record], checks: Sequence[str]) -> MutantResult:
    killing = [record for record in records if record.outcome in FALLEN_SHORT]
    causes = _first_words(killing) if killing else ""
    diagnosis: Diagnosis = ""
    if killing and mutant.cause is not None:
        diagnosis = "absent" if not causes else "right" if re.search(mutant.cause, causes, re.IGNORECASE) else "wrong"
    return MutantResult(mutant, _short_checks(killing, checks), diagnosis, causes)


def _first_words(killing: Sequence[Record]) -> str:
    """Return the first likely causes in these records, else the summary of the first one.

    Empty if the first record reports wrong rows without a cause.
    """
    for record in killing:
        if isinstance(record, Failed) and likely_causes(record.meaning):
            return record.meaning or ""
    first = killing[0]
    if isinstance(first, Failed):
        return "" if first.finding == UNEXPLAINED else first.summary
    return str(getattr(first, "finding", ""))


def as_text(matrix: KillMatrix) -> str:
    """Return the matrix as text: a row per mutant, the score, the survivors, and the value of each check."""
    parts = [_rows(matrix), _score(matrix)]
    if matrix.survivors:
        rows = [[each.mutant.name, each.mutant.kind, each.mutant.fault] for each in matrix.survivors]
        parts.append(f"survivors\n{_table(rows)}")
    if gone := [result for result in matrix.results if result.missing]:
        parts.append(f"not examined\n{_table([[each.mutant.name, each.missing] for each in gone])}")
    parts.append(_worth(matrix))
    parts.append(_causes(matrix))
    alarms = [f"  {ref}: {', '.join(checks)}" for ref, checks in matrix.false_alarms.items() if checks]
    examined = ", ".join(matrix.false_alarms) or "any right backend: none was examined"
    parts.append("\n".join(["false alarms", *alarms]) if alarms else f"no false alarm of {examined}")
    return "\n\n".join(part for part in parts if part)


def as_json(matrix: KillMatrix) -> dict[str, Any]:
    """Return the matrix as a JSON object."""
    return {
        "checks": {
            check: {
                "catches": sum(check in each.checks for each in matrix.results),
                "alone": list(matrix.alone(check)),
            }
            for check in matrix.checks
        },
        "examined": len(matrix.examined),
        "caught": len(matrix.examined) - len(matrix.survivors),
        "false_alarms": {ref: list(checks) for ref, checks in matrix.false_alarms.items()},
        "mutants": [
            {
                "name": each.mutant.name,
                "kind": each.mutant.kind,
                "caught_by": list(each.checks),
                "diagnosis": each.diagnosis or None,
                "likely_cause": each.causes or None,
                "not_examined": each.missing or None,
            }
            for each in matrix.results
        ],
    }


def _table(rows: list[list[str]]) -> str:
    return indent(tabulate(rows, tablefmt="plain", disable_numparse=True), "  ")


def _rows(matrix: KillMatrix) -> str:
    legend = ", ".join(f"{number} {check}" for number, check in enumerate(matrix.checks, 1))
    header = ["", *(str(number) for number in range(1, len(matrix.checks) + 1)), "likely cause"]
    rows = [
        [each.mutant.name, *("x" if check in each.checks else "." for check in matrix.checks), each.diagnosis]
        for each in matrix.examined
    ]
    table = tabulate([header, *rows], tablefmt="plain", disable_numparse=True)
    return f"x: the check catches the mutant; checks: {legend}\n{table}"


def _score(matrix: KillMatrix) -> str:
    examined, caught = len(matrix.examined), len(matrix.examined) - len(matrix.survivors)
    share = f", {100 * caught / examined:.1f} %" if examined else ""
    return f"caught: {caught} of {plural(examined, 'mutant')}{share}"


def _worth(matrix: KillMatrix) -> str:
    """Return a line for each check: how many mutants it catches, and which of them no other check catches."""
    lines = []
    for check in matrix.checks:
        catches, alone = sum(check in each.checks for each in matrix.results), matrix.alone(check)
        what = f"{len(alone)} that nothing else catches" if alone else "none that nothing else catches"
        some = f": {', '.join(alone[:3])}{', ...' if len(alone) > 3 else ''}" if alone else ""
        lines.append([check, str(catches), f"{what}{some}"])
    return f"each check: mutants it catches\n{_table(lines)}"


def _causes(matrix: KillMatrix) -> str:
    judged = [each for each in matrix.results if each.diagnosis]
    if not judged:
        return ""
    counts = {how: len(matrix.diagnosed(how)) for how in ("right", "wrong", "absent")}
    lines = [f"likely cause, of {len(judged)} caught: {', '.join(f'{how} {count}' for how, count in counts.items())}"]
    lines += [f"  {each.mutant.name} wrong: {each.causes}" for each in matrix.diagnosed("wrong")]
    return "\n".join(lines)
