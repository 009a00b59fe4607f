"""FlashAttention-2 as a candidate; begin with ``backend``. ``layer`` is shared with torch's build of the kernels.

It has not been run on a GPU: it is written from the sources of flash-attn 2.8.3. The library is imported only if
nothing else prevents its use. FlashAttention-3 (``flash_attn_interface``) would be a separate backend.
"""
