"""Backends that are wrong on purpose, one fault each: what a suite catches of them is how much it sees.

An entry of a YAML file here names a fault, and how a right backend gets it: by a class of the Python file of the same
stem, or by a text that is replaced in the source of a right backend. None is registered; ``mutants:NAME`` loads one.
"""
