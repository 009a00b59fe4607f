"""The checks of one case on one backend: one module or folder per check, plus helpers that only they use.

Start with ``interface``, which defines a check and how to add one; ``case_checks`` finds a check by name and runs it.
"""
