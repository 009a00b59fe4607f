"""The checks of one case of one backend, a module each, and what only they need.

Begin with ``interface``: what a check is, and how to add one. ``case_checks`` finds a check by its name and makes it.
Each module says what its check cannot see. Findings are values (``findings``); records are made of them elsewhere.
"""
