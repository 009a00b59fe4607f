"""Runs as one self-contained HTML page, for a reader who wants to look around: filter, sort, open, compare, print.

It takes the extra ``report`` (jinja2, matplotlib); nothing else of attncheck does. Must not know: how records came
about.
"""

from attncheck.reports.html.page import render_runs

__all__ = ["render_runs"]
