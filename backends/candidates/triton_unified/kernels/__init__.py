"""Sources of Triton kernels, and nothing else: they import Triton, so only the modules that launch them import these.

Inside a kernel ``p_`` names a pointer, ``b_`` a tile, ``o_`` offsets, ``m_`` a mask; the shape of a tile stands beside
its load.
"""
