"""The check ``cudagraph``: whether a backend's attention can be captured in a CUDA graph, and for which batches.

Start with ``check``, then ``probes``, a table of the batches that are captured and replayed. ``measurement`` runs the
probes, and ``session`` drives the backend. A ``recorder`` captures a real graph (``cuda``) or emulates one.
"""
