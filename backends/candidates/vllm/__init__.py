"""The bridge to vLLM: any of its attention backends as a candidate; begin with ``bridge``.

vLLM's own objects are made as its model runner makes them (a config, an ``Attention`` layer, the layer's impl, the
builder of the layer's group), and the contract's calls are passed on to them. No module here imports vLLM before a
backend of it is requested.
"""
