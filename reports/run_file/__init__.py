"""The run file: typed values, one a line, with the functions that write and read them.

Begin with ``records.py``. ``header.py`` has the first line of a file; ``timings.py`` and ``graph_levels.py`` have the
measurements of two checks. ``store.py`` writes and reads whole files, and rejects inconsistent ones.
"""
