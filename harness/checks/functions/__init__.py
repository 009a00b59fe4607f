"""Checks of single functions that a backend offers, for the paths that examine one instead of attention.

Begin with ``check``, whose table ``EXAMINATIONS`` names the function of each path. A function has two modules here:
one makes its problems and their truths, the other judges its answers.
"""
