"""What attncheck's own candidates share below ``paged`` and ``latent``; users derive from those two instead.

``refusals`` refuses what is not declared, ``gathering`` takes keys out of their pages, ``machine`` says what a library
needs of a machine.
"""
