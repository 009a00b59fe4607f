"""A run: selects cases, backends and checks, and produces records.

Start at ``preparation.py``, where every run begins, then read ``evaluation.py``, which examines one pair of case and
backend after the other. ``selection.py`` selects cases, ``backend_choice.py`` selects backends, and ``outcomes.py``
builds records.
"""
