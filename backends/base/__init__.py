"""Helpers of attncheck's own candidates, below ``paged`` and ``latent``; users derive from those two instead.

``refusals`` raises for undeclared layers and calls, ``gathering`` reads keys from their pages, and ``machine`` checks
what a library needs of a machine.
"""
