"""What the records of one run come to: rows, counts and sentences that every format shares.

Begin with ``summary.py``, which counts the outcomes. ``phrases.py`` has the wording. Each other module is one section
of a report, such as measured support, or a question about a record, such as the command that repeats it.
"""
