"""The run file: typed values, one a line, and the functions that write and read them.

Begin with ``records.py``; ``header.py`` has the first line of a file, ``timings.py`` and ``graph_levels.py`` what two
checks measure besides an outcome. ``store.py`` writes and reads whole files, and refuses one that contradicts itself.
"""
