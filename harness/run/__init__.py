"""A run: selects cases, backends and checks, and produces records.

Start at ``run.py``, where every run begins, then read ``evaluate.py``, which examines one pair of case and backend
after the other. ``options.py`` declares the options, ``selection.py`` selects cases, ``preparation.py`` selects
backends, and ``outcomes.py`` builds records.
"""
