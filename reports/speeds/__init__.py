"""Times of one run, combined over its rounds, and as tables of text.

Begin with ``speed.py``, which combines the rounds of a case. ``tables.py`` has a row for each case, ``summary.py`` a
row for each backend, and ``notes.py`` the notes on the figures.
"""
