"""Comparison of two runs: changes of outcomes, of times, and of the environment.

Begin with ``compare.py``, which assembles a comparison. ``significance.py`` has the statistics of a change in time,
``summary.py`` the counts and sentences that every format shares.
"""
