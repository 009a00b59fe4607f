"""Helpers of attncheck's own candidates, below ``paged`` and ``latent``; users derive from those two instead.

``layer`` has what a constructor and a step refuse, ``gathering`` reads keys from their pages, and ``machine`` checks
what a library needs of a machine.
"""
