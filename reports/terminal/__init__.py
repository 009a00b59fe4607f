"""Reports as plain text for a terminal, within 100 columns.

Begin with ``run.py`` for a run and ``comparison.py`` for a comparison; ``columns.py`` lines up and folds their text.
"""
