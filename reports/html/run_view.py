"""Values for templates, unescaped: one run without its records, that is, verdicts, their basis and gaps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple

from attncheck.reports.analysis.findings import by_check
from attncheck.reports.analysis.graph_levels import LevelRow
from attncheck.reports.analysis.support import answered_cases
from attncheck.reports.analysis.utilities import FunctionVerdict
from attncheck.reports.analysis.verdicts import BackendVerdict
from attncheck.reports.document.run_values import RunValues
from attncheck.reports.html.budget_chart import BudgetUse, budget_chart, budget_uses
from attncheck.reports.html.finding_view import FindingView, finding_views
from attncheck.reports.html.needs import known_needs
from attncheck.reports.html.speed_view import SpeedView, speed_view
from attncheck.reports.html.support_view import SupportMatrix, Tone, support_matrix
from attncheck.reports.run_file.records import UTILITIES, XFailed
from attncheck.reports.speeds.summary import summary_tables
from attncheck.reports.speeds.tables import SpeedTable

if TYPE_CHECKING:
    from markupsafe import Markup

FUNCTION_TONES: Mapping[FunctionVerdict, Tone] = {
    "equal": "good",
    "drifted": "calm",
    "judged": "calm",
    "differs": "bad",
    "missing": "none",
    "errored": "bad",
    "crashed": "bad",
    "timed_out": "bad",
    "stale": "warn",
    "expected": "warn",
}
"""The colours of verdicts on functions of providers."""


class Coverage(NamedTuple):
    """The number of cases run on a backend (``cases``), and of those declared by it and examined (``declared``)."""

    declared: int
    cases: int


@dataclass(frozen=True)
class RunView:
    """One run as shown on the page. ``name``: that of its file; ``key``: the prefix of its sections in links.

    ``answers``: the verdicts on examined backends, those that passed first. ``fastest``: of each suite that several
    right backends were timed in, the means and the backend of the lowest. ``needs``, ``needed_forms``: every need of a
    case, and the values of each form. ``expected``: of each expected finding and check, the first record and the number
    of further ones.
    """

    run: RunValues
    key: str
    name: str
    verdict: str
    counts: str
    answers: tuple[BackendVerdict, ...]
    fastest: tuple[tuple[SpeedTable, str], ...]
    coverages: Mapping[str, Coverage]
    needs: tuple[str, ...]
    needed_forms: Mapping[str, tuple[str, ...]]
    support: SupportMatrix
    levels: tuple[LevelRow, ...]
    budgets: tuple[BudgetUse, ...]
    budget_chart: "Markup | None"
    speeds: SpeedView | None
    findings: tuple[FindingView, ...]
    expected: tuple[tuple[XFailed, int], ...]

    @property
    def tone(self) -> Tone:
        """The colour of the verdict."""
        match self.verdict:
            case "passed":
                return "good"
            case "failed":
                return "bad"
            case _:
                return "warn"

    @property
    def sections(self) -> tuple[tuple[str, str], ...]:
        """The sections with content: the name in links, and the heading."""
        found = (
            ("answer", "Verdicts", self.answers or self.run.silent),
            ("findings", "Findings", self.findings or self.run.errors),
            ("checks", "Checks", self.answers),
            ("support", "Measured support", self.support.features or self.support.forms),
            ("graphs", "CUDA-graph levels", self.levels),
            ("speeds", "Speeds", self.speeds),
            ("budgets", "Error / allowed error", self.budgets),
            ("functions", "Utilities", self.run.summary.providers),
            ("expected", "Expected failures", self.expected),
            ("gaps", "Not examined", self.run.summary.gaps),
            ("circumstances", "Circumstances", True),
        )
        return tuple((anchor, title) for anchor, title, is_shown in found if is_shown)


def run_view(run: RunValues, key: str, name: str) -> RunView:
    """Return the view of one run; ``key`` and ``name`` must be unique in the page."""
    found = run.found
    verdict, _, counts = run.closing().partition(": ")
    levels, uses = found.levels, budget_uses(run.records)
    examined = [each for each in found.verdicts if each.verdict != "not examined"]
    right_first = tuple(sorted(examined, key=lambda each: each.verdict == "failed"))
    features = {info.name: info.features for info in run.header.backends}
    declared = {each.backend: features.get(each.backend, ()) for each in examined}
    right = {each.backend for each in examined if each.verdict == "passed"}
    tables = summary_tables([speed for speed in run.speeds if speed.backend in right])
    needs = known_needs(run.records, run.header)
    return RunView(
        run=run,
        key=key,
        name=name,
        verdict=verdict,
        counts=counts,
        answers=right_first,
        fastest=tuple((each, min(each.means, key=each.means.__getitem__)) for each in tables if len(each.means) > 1),
        coverages={each.backend: _coverage(run, each.backend) for each in right_first},
        needs=needs,
        needed_forms=_values_by_key(needs),
        support=support_matrix(found.support, declared, levels),
        levels=levels,
        budgets=uses,
        budget_chart=budget_chart(f"{key}-budgets", uses) if uses else None,
        speeds=speed_view(run, key),
        findings=finding_views(run),
        expected=tuple(each for finding in found.findings if finding.is_expected for each in by_check(finding)),
    )


def _coverage(run: RunValues, backend: str) -> Coverage:
    own = [record for record in run.records if record.backend == backend and record.check != UTILITIES]
    return Coverage(len(answered_cases(own)), len({record.case for record in own}))


def _values_by_key(needs: Sequence[str]) -> dict[str, tuple[str, ...]]:
    values: dict[str, tuple[str, ...]] = {}
    for key, is_form, value in (need.partition("=") for need in needs):
        if is_form:
            values[key] = (*values.get(key, ()), value)
    return values


def run_names(runs: Sequence[RunValues]) -> list[str]:
    """Return file names that differ: with folders if names are equal, and with numbers if paths are."""
    paths = [PurePath(run.path) for run in runs]
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    if len(set(names)) < len(names):
        names = [f"{index}: {name}" for index, name in enumerate(names, start=1)]
    return names
