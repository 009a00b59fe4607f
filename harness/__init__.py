"""The examination: builds problems, drives backends and runs checks. Imports all other rooms; none of them imports it.

``cli``, ``pytest_plugin`` and ``api`` are the entry points. ``run`` prepares and evaluates a run. ``workers`` gives
each backend its own process. ``checks`` compare what ``driver`` observed of a ``problem`` with ``truth``.
``providers`` examines metadata utilities. Start reading at ``cli/run.py``, which executes a whole run in
order.
"""
