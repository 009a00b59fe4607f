"""Attention kernels of attncheck's own, in Triton, and the backend made of them.

On a CPU they are interpreted, so that the source a GPU compiles is examined in every CI run. ``kernels`` holds what is
compiled, the modules beside it launch that as torch custom operators, so that tracing, fake tensors and CUDA graphs see
one opaque call. Nothing is imported here: who asks for a backend's name or declarations needs no Triton.
"""
