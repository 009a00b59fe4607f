"""Whether a backend's attention can be captured in a CUDA graph, and for which batches.

Begin with ``check``, then ``probes``: the batches that are captured and replayed, a table to add to. ``measurement``
runs the probes, and ``session`` drives the backend. A ``recorder`` captures a real graph (``cuda``) or emulates one.
"""
