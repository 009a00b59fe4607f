"""CUDA graphs emulated on a machine without a GPU.

Begin with ``emulated_recorder``, which runs ``forward`` under a ``watch``. The watch keeps account of host memory,
finds what a graph cannot hold (``capture_rules``), and writes operators on a ``tape``, which replays them.
"""
