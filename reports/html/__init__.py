"""Runs as one self-contained HTML page that a reader can filter, sort, open, compare and print.

Begin with ``page.py``, which assembles the page, and ``templates/page.html``. Modules ending in ``_view`` compute the
values that templates show; those ending in ``_chart`` or ``_charts`` draw. ``page_data.py`` has all records for the
page's scripts. Only this package needs the extra ``report`` (jinja2, matplotlib).
"""

from attncheck.reports.html.page import render_runs

__all__ = ["render_runs"]
