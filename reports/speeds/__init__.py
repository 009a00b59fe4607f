"""Times of one run, combined over its rounds, and as tables of text.

Begin with ``speed.py``, which combines the rounds of a case. ``tables.py`` has rows for cases, for the means of a
backend and for recorded traffic; ``notes.py`` has the notes on the figures.
"""
