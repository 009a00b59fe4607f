"""Every attention path in pure torch: paged, varlen, latent, split keys, and the writes to the cache.

All paths share one computation, ``online_softmax``; ``short_sequences`` has its operations for many short sequences at
once. Begin with ``params``, which defines a layer's numbers and ``visible``, and with the formulas at the head of
``online_softmax``. ``paged`` shows how a path uses them.
"""
