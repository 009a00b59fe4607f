"""Runs as one self-contained HTML page: verdicts, findings, tables, charts of times, and records to filter and open.

Begin with ``page.py``: it lays out the blocks of ``reports.document``. ``text.py`` renders blocks, ``charts.py`` draws,
and ``records.py`` has all records for the page's script. Only charts need the extra ``report`` (matplotlib).
"""

from attncheck.reports.html.page import render_runs

__all__ = ["render_runs"]
