"""attncheck's own attention kernels in Triton, and the backend that uses them.

On a CPU they are interpreted, so that every CI run examines the source that a GPU compiles. ``kernels`` holds the
compiled code. The other modules launch it as torch custom operators, so that tracing, fake tensors and CUDA graphs see
one opaque call. Nothing is imported here, so that a backend's name and declarations are available without Triton.
"""
