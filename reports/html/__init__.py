"""Runs as one self-contained HTML page, for a reader who wants to look around: filter, sort, open, compare, print.

Begin with ``page.py``, which puts the page together, and ``templates/page.html``. The modules ending in ``_view`` hold
the values that templates show, those ending in ``_chart`` or ``_charts`` draw; ``page_data.py`` has all records for the
page's scripts. The page takes the extra ``report`` (jinja2, matplotlib); nothing else of attncheck does.
"""

from attncheck.reports.html.page import render_runs

__all__ = ["render_runs"]
