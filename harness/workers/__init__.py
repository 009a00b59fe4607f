"""Run each backend in a process of its own.

Begin with ``protocol.py``, which documents the messages. ``worker.py`` runs inside the process, ``worker_process.py``
controls it from the run. ``worker_pool.py`` holds as many processes as the host has memory for, and ``supervisor.py``
assigns cases to them.
"""
