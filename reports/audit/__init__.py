"""An audit of a library's backends: CUDA-graph levels and features, declared beside measured; begin with ``page``.

Over a run of all backends of a family, such as ``vllm:*``, whose header says what each class declares.
"""
