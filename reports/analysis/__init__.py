"""Rows, counts and sentences about the records of one run, shared by all formats.

Begin with ``summary.py``, which counts outcomes. ``phrases.py`` has the wording. Each other module computes one section
of a report, such as measured support, or one property of a record, such as the command that repeats it.
"""
