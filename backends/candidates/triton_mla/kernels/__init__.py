"""Sources of Triton kernels only: they import Triton, so only the module that launches them imports these.

Names follow :mod:`attncheck.backends.candidates.triton_unified.kernels`.
"""
