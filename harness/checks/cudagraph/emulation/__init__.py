"""CUDA graphs emulated on a machine without a GPU.

Start with ``emulated_recorder``, which runs ``forward`` under a ``watch``. The watch tracks host memory, detects what a
graph cannot contain (``capture_rules``), and writes operators to a ``tape``, which replays them.
"""
