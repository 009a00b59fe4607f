"""Assemble the page from templates, style sheet, scripts and data into one self-contained file.

The page loads nothing. Its content security policy forbids that, and allows only its own script, by digest.
"""

import base64
import hashlib
import shlex
from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING

from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.graph_levels import legend, level_notes, unmeasured_cases
from attncheck.reports.analysis.utilities import LEGEND, function_rows, notes_by_heading, provider_title
from attncheck.reports.document.circumstances import facts
from attncheck.reports.document.run_values import RunValues
from attncheck.reports.document.timings import averaged
from attncheck.reports.html.budget_chart import TALLEST
from attncheck.reports.html.comparison_view import comparison_view
from attncheck.reports.html.environment import template_environment
from attncheck.reports.html.finding_view import SHOWN
from attncheck.reports.html.page_data import page_data
from attncheck.reports.html.run_view import FUNCTION_TONES, run_names, run_view
from attncheck.reports.html.support_view import GRAPHS
from attncheck.reports.html.units import measured_time
from attncheck.reports.run_file.graph_levels import GRAPH_LEVELS
from attncheck.reports.run_file.store import Run
from attncheck.reports.speeds.tables import FASTEST_ROUNDS

if TYPE_CHECKING:
    from jinja2 import Environment

SCRIPTS = ("dom.js", "table.js", "drill.js", "explorer.js", "rules.js", "needs.js", "page.js")
"""In the order of concatenation; they share one scope."""

LONGEST_REASON = 240
"""Maximum characters of a graph level's reason; records show all of them."""


def render_runs(runs: Sequence[Run]) -> str:
    """Return one self-contained HTML page of these runs, at least one; the first is compared with each of the others.

    Raises:
        MissingExtraError: jinja2 or matplotlib is not installed.
    """
    environment = _environment()
    from markupsafe import Markup

    values = [RunValues.of(run) for run in runs]
    names = run_names(values)
    views = [run_view(run, f"run-{index}", names[index]) for index, run in enumerate(values)]
    comparisons = [
        comparison_view(runs[0], run, f"comparison-{index}", (names[0], names[index]))
        for index, run in enumerate(runs)
        if index
    ]
    script = _script()
    # These values are safe: templates of the package, and JSON in which nothing can end its element.
    return environment.get_template("page.html").render(
        views=views,
        comparisons=comparisons,
        policy=_policy(script),
        style=Markup(_text("page.css")),  # noqa: S704
        script=Markup(script),  # noqa: S704
        data=Markup(page_data(values, names)),  # noqa: S704
    )


def _environment() -> "Environment":
    """Return the template environment of the report."""
    environment = template_environment(__package__, "a report as HTML", "matplotlib")
    environment.filters |= {
        "budgets": phrases.budgets,
        "chosen_kernels": phrases.chosen_kernels,
        "conventions": phrases.conventions,
        "extent": phrases.extent,
        "facts": facts,
        "gap_outcome": phrases.gap_outcome,
        "gap_reasons": phrases.gap_reasons,
        "gap_what": phrases.gap,
        "level_legend": legend,
        "level_notes": level_notes,
        "measured_level": phrases.measured_level,
        "why_no_higher": lambda row: phrases.cut(phrases.why_no_higher(row), LONGEST_REASON),
        "notes_by_heading": notes_by_heading,
        "other_reasons": phrases.other_reasons,
        "averaged": averaged,
        "shell": shlex.join,
        "time": measured_time,
        "unmeasured": unmeasured_cases,
        "verdict_counts": phrases.verdict_counts,
        "verdict_words": phrases.verdict_words,
        "what_happened": phrases.what_happened,
    }
    environment.globals |= {
        "levels": GRAPH_LEVELS,
        "row_tones": FUNCTION_TONES,
        "function_rows": function_rows,
        "provider_title": provider_title,
        "functions_legend": LEGEND,
        "tallest": TALLEST,
        "graphs_column": GRAPHS,
        "shown_findings": SHOWN,
        "fastest_rounds": FASTEST_ROUNDS,
    }
    return environment


def _script() -> str:
    """Return all scripts as one block, whose names are local to it."""
    return '"use strict";\n{\n' + "\n".join(_text(name) for name in SCRIPTS) + "}\n"


def _policy(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Inline styles are allowed because matplotlib writes styles into attributes.
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; base-uri 'none'; "
        "form-action 'none'"
    )


def _text(name: str) -> str:
    return (resources.files(__package__) / "templates" / name).read_text(encoding="utf-8")
