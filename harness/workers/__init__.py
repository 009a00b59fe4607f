"""Each backend of a run in a process of its own.

Begin with ``protocol.py``, which draws the messages. ``worker.py`` is the process from inside, ``worker_process.py``
from outside; ``worker_pool.py`` holds as many as the host has memory for, and ``supervisor.py`` hands them cases.
"""
