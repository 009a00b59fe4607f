"""An audit of a library's backends: declared and measured CUDA-graph levels and features; begin with ``page``.

Its input is a run of all backends of a family, such as ``vllm:*``, whose header has the declarations of each class.
"""
