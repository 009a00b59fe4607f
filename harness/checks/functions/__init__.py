"""Checks of single functions that a backend offers, for paths that examine a function instead of attention.

Start with ``check``: its table ``EXAMINATIONS`` maps each path to its function. Each function has two modules: one
builds its problems and truths, the other judges its results.
"""
