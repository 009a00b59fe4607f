"""FlashAttention-2 as a candidate; begin with ``backend``. ``layer`` is shared with torch's build of the kernels.

Nothing here has run on a GPU: it is written from the sources of flash-attn 2.8.3. The library is imported only where
nothing else is in the way. FlashAttention-3 (``flash_attn_interface``) would be a backend of its own.
"""
