"""Sources of Triton kernels only: they import Triton, so only the modules that launch them import these.

In a kernel ``p_`` marks a pointer, ``b_`` a tile, ``o_`` offsets, ``m_`` a mask. The shape of a tile is noted at its
load.
"""
