"""Sizes of a layer with a latent cache: of the equivalent ordinary layer, and of its cache rows. Imports no torch."""

from attncheck.reference.spec import LayerSpec


def naive_layer(layer: LayerSpec) -> LayerSpec:
    """Return the ordinary layer equivalent to a layer with ``mla``; any other layer is returned unchanged."""
    if layer.mla is None:
        return layer
    return LayerSpec(
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_heads,
        head_size=layer.mla.qk_nope_head_dim + layer.mla.qk_rope_head_dim,
        head_size_v=layer.mla.v_head_dim,
        dtype=layer.dtype,
        scale=layer.softmax_scale,
        causal=layer.causal,
    )


def stored_sizes(layer: LayerSpec) -> tuple[int, int]:
    """Return the widths of what a token stores in the cache: key and value, or latent row and rotated part."""
    if layer.mla is None:
        return layer.head_size, layer.value_head_size
    return layer.mla.kv_lora_rank, layer.mla.qk_rope_head_dim
