"""Candidate ``xformers``: decodes by the library's Triton split-K operator, all other rows by attncheck's own kernel.

It declares what is correct with the pinned xformers, and refuses the rest. Begin with ``backend``.
"""
