"""The examination: builds problems, drives backends, runs checks. Knows every other room; none of them knows it.

From the top: ``cli``, ``pytest_plugin`` and ``api`` take a question, ``run`` prepares and evaluates it, ``workers``
gives each backend a process, ``checks`` judge by ``truth`` what ``driver`` saw of a ``problem``; ``providers`` examines
metadata utilities. Begin with ``cli/run_execution.py``, which does a whole run in order.
"""
