"""Two runs compared: which outcomes changed, which times, and what the runs were made with.

Begin with ``compare.py``, which puts a comparison together. ``significance.py`` has the statistics of a changed time,
``summary.py`` the counts and sentences that every format shares.
"""
