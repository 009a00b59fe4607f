"""The check ``cudagraph``: whether a backend's attention can be captured in a CUDA graph, and for which batches.

Start with ``check``, then ``probes``, a table of the batches that are captured and replayed. ``capture`` and ``replay``
do both for a backend. ``recorder`` captures a real graph. ``emulation`` does without a GPU, by the effects in
``operators``.
"""
