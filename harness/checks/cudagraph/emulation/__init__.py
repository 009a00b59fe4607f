"""CUDA graphs emulated on a machine without a GPU."""
