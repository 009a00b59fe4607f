"""The bridge to vLLM: any of its attention backends as a candidate; begin with ``bridge``.

vLLM's own objects (a config, an ``Attention`` layer, the layer's impl, the builder of the layer's group) are
constructed as its model runner constructs them. The contract's calls are forwarded to them. No module here imports vLLM
before one of its backends is requested.
"""
