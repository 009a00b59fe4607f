"""Sources of Triton kernels, and nothing else: they import Triton, so only the module that launches them does.

Names are as in :mod:`attncheck.backends.candidates.triton_unified.kernels`.
"""
