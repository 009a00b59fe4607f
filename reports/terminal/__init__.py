"""Reports as plain text for a terminal, 100 columns wide by default.

Begin with ``run.py`` for a run and ``comparison.py`` for a comparison; ``columns.py`` aligns and wraps text.
"""
