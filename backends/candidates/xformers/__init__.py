"""Candidate ``xformers``: decode by the library's Triton split-K operator, every other row by attncheck's own kernel.

Declares what is right with the pinned xformers and refuses the rest. Begin with ``backend``.
"""
