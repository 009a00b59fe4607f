"""The checks of one case on one backend, in modules by topic, and what only they use.

Start with ``interface``, which defines a check and how to add one; ``case_checks`` finds a check by name and runs it.
"""
