"""Times of one run: put together over its rounds, and laid out as rows of text.

Begin with ``speed.py``, which makes one speed of the rounds of a case. ``tables.py`` has a row for each case,
``summary.py`` one for each backend, and ``notes.py`` what a reader should know of the figures.
"""
