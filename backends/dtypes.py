"""The torch dtypes of layers and caches, keyed by their names in specs."""

import torch

from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import ROW_FORMATS, CacheSpec

DTYPES: dict[str, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}
"""Dtypes of query, key, value and output, and of caches that hold no FP8 codes."""

FP8_DTYPES: dict[str, torch.dtype] = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""Dtypes of FP8 codes in a cache or an output. The tensor of an FP8 cache is allocated as ``torch.uint8``."""


def cache_dtype(layer: LayerSpec, cache: CacheSpec) -> torch.dtype:
    """Return the dtype of the allocated cache: the layer's, the named one, or that of bytes for codes.

    Bytes are ``torch.uint8``, or ``torch.int8`` for ``int8_per_token_head``, as in vLLM.
    """
    if cache.kv_cache_dtype == "int8_per_token_head":
        return torch.int8
    if cache.kv_cache_dtype in (*FP8_DTYPES, *ROW_FORMATS):
        return torch.uint8
    return DTYPES[layer.dtype if cache.kv_cache_dtype == "auto" else cache.kv_cache_dtype]
