"""The check ``cudagraph``: whether a backend's attention can be captured in a CUDA graph, and for which batches.

Start with ``check``, then ``probes``, a table of the batches that are captured and replayed. ``play`` captures and
replays them. ``recorder`` captures a real graph; ``emulation`` does without a GPU.
"""
