"""Faults in cases that a backend does not declare: accidental exceptions instead of a refusal, and wrong results.

Each backend is right in every case that it declares.
"""

import torch

from attncheck.backends.mutants.plain import Base, PlainBuilder, PlainImpl

FEATURES = Base.features


class UnpacksTheWindow(Base):
    """Does not declare windows, and unpacks one as if it were a pair: Python's TypeError."""

    features = FEATURES - {"sliding_window"}

    class Impl(PlainImpl):
        def __init__(self, num_heads, head_size, scale, num_kv_heads=None, alibi=None, window=None, *rest, **more):
            if window is not None:
                _left, _right = window
            super().__init__(num_heads, head_size, scale, num_kv_heads, alibi, window, *rest, **more)


class UnpacksTheSinks(Base):
    """Does not declare sinks, and unpacks them as if they were two: Python's ValueError."""

    features = FEATURES - {"sinks"}

    class Impl(PlainImpl):
        def __init__(self, *arguments, sinks=None, **more):
            if sinks is not None:
                _first, _last = sinks.tolist()
            super().__init__(*arguments, sinks=sinks, **more)


class RaisesWithoutWords(Base):
    """Does not declare the soft cap, and raises a NotImplementedError without a message."""

    features = FEATURES - {"logits_soft_cap"}

    class Impl(PlainImpl):
        def __init__(self, *arguments, **more):
            without_cap = list(arguments)
            without_cap[7] = None
            super().__init__(*without_cap, **more)
            self.logits_soft_cap = arguments[7]

        def forward(self, layer, query, key, value, kv_cache, attn_metadata, *rest, **more):
            if attn_metadata is not None and self.logits_soft_cap:
                raise NotImplementedError
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, *rest, **more)


class LeavesItToTorch(Base):
    """Does not declare float32, for which an operator of torch raises a NotImplementedError."""

    supported_dtypes = (torch.float16, torch.bfloat16)

    class Impl(PlainImpl):
        def forward(self, layer, query, *rest, **more):
            if query.dtype == torch.float32:
                query.to(torch.float8_e4m3fn).sum()
            return super().forward(layer, query, *rest, **more)


class LargePagesTurned(Base):
    """Declares pages of 16 in layout NHD, refuses smaller ones and HND, and reads larger pages from slot 16 on."""

    supported_layouts = ("NHD",)

    @classmethod
    def get_supported_kernel_block_sizes(cls):
        return [16]

    @classmethod
    def get_kv_cache_shape(cls, num_blocks, block_size, num_kv_heads, head_size, head_size_v=None):
        return Base.get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, head_size_v)

    class Builder(PlainBuilder):
        def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
            cache = vllm_config.cache_config
            if cache.kv_cache_layout != "NHD" or cache.block_size < 16:
                raise NotImplementedError(f"pages of {cache.block_size} in layout {cache.kv_cache_layout}")
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    class Impl(PlainImpl):
        def attend(self, layer, query, key, value, caches, *rest):
            if caches is not None:
                caches = tuple(torch.cat([cache[:, 16:], cache[:, :16]], 1) for cache in caches)
            super().attend(layer, query, key, value, caches, *rest)


class WideHeadsCutShort(Base):
    """Declares head sizes up to 256, accepts larger ones, and computes scores from their first 256 elements."""

    @classmethod
    def get_supported_head_sizes(cls):
        return list(range(8, 257, 8))

    class Impl(PlainImpl):
        def attend(self, layer, query, *rest):
            query = query.clone()
            query[..., 256:] = 0
            super().attend(layer, query, *rest)


class OneFormatOfCodes(Base):
    """Declares FP8 caches of e4m3 with one scale, accepts those of e5m2, and stores and reads e4m3 there as well."""

    features = FEATURES - {"fp8_per_head"}
    supported_kv_cache_dtypes = ("auto", "fp8", "fp8_e4m3")

    class Impl(PlainImpl):
        def __init__(self, num_heads, head_size, scale, num_kv_heads, alibi, window, kv_cache_dtype, *rest, **more):
            self.layer_cache_dtype = kv_cache_dtype
            name = "fp8_e4m3" if kv_cache_dtype == "fp8_e5m2" else kv_cache_dtype
            super().__init__(num_heads, head_size, scale, num_kv_heads, alibi, window, name, *rest, **more)

        def forward(self, layer, query, *rest, **more):
            if self.layer_cache_dtype.startswith("fp8") and layer._k_scale.numel() > 1:
                raise NotImplementedError("scales per head")
            return super().forward(layer, query, *rest, **more)
