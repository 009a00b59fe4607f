"""Each backend of a run in a process of its own.

Begin with ``protocol.py``, which draws the messages. ``worker.py`` is the process from inside, ``worker_process.py``
from outside; ``worker_pool.py`` holds those of all backends, and ``supervisor.py`` hands them cases.
"""
