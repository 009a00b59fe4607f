"""FlashAttention-2 as a candidate, and what all of its builds share: Dao-AILab's package, and the one within torch.

Nothing here has run on a GPU: it is written against the sources of flash-attn 2.8.3. No module imports the library: a
machine does that nothing else speaks against. FlashAttention-3 (``flash_attn_interface``) has signatures and page sizes
of its own, and would be a backend of its own. Must not know: cases, what is judged.
"""
