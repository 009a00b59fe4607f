"""The examination: builds problems, drives backends and runs checks. Imports all other rooms; none of them imports it.

``cli``, ``pytest_plugin`` and ``api`` are the entry points. ``run`` prepares and evaluates a run. ``workers`` gives
each backend its own process. ``checks`` compare what ``driver`` observed of a ``problem`` with ``truth``, and
``diagnosis`` finds the likely cause of a wrong output. ``providers`` examines metadata utilities. Start reading at
``run/run.py``, where every run begins.
"""
