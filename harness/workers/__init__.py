"""Run each backend in a process of its own.

Begin with ``protocol.py``, which documents the calls. ``worker.py`` runs inside the process, ``process.py`` controls
it from the run. ``pool.py`` holds as many processes as the host has memory for, and ``executor.py`` assigns cases to
them. In ``triton_cache.py``, processes that need the same kernel wait for the one that compiles it.
"""
