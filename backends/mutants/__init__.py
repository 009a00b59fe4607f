"""Backends with one deliberate fault each; the share that a suite catches measures the suite.

An entry of a YAML file here names a fault and how it is introduced into a correct backend: by a class of the Python
file of the same stem, or by replacing a text in the source of a correct backend. None is registered; ``mutants:NAME``
loads one.
"""
