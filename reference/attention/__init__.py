"""Every attention path in pure torch: paged, varlen, latent (MLA), split KV, and cache writes.

All paths share one computation, ``online_softmax``. Begin with ``params``, which defines the parameters of a layer and
``visible``, and with the formulas in the docstring of ``online_softmax``. ``paged`` shows how a path uses them.
"""
