"""Run each backend in a process of its own.

Begin with ``protocol.py``, which documents the calls. ``worker.py`` runs inside the process, ``process.py`` controls
it from the run. ``starting.py`` starts it, on Linux as a fork of a process that runs ``fork_server.py``.
``process_tree.py`` ends what it has started, and ``printed.py`` reads what it prints. ``pool.py`` holds as many
processes as the host has memory for, and ``executor.py`` assigns cases to them. ``examination.py`` takes the records of
a case, and settles how a process ended. ``sharing.py`` has the turns of processes on one GPU. In ``triton_cache.py``,
processes that need the same kernel wait for the one that compiles it.
"""
