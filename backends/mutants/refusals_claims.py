"""Backends that accept only multiples of a number that they do not declare, or claim a scale for each head.

The first three are right in every case that they run and declare.
"""

from types import SimpleNamespace

import torch

from attncheck.backends.mutants.plain import Base, PlainBuilder, PlainImpl

FEATURES = Base.features


class ClaimsAnyHeadSize(Base):
    """Declares any head size, and refuses those that are no multiple of 8."""

    class Impl(PlainImpl):
        def __init__(self, num_heads, head_size, *rest, head_size_v=None, **more):
            sizes = (head_size, head_size_v or head_size)
            if any(size % 8 for size in sizes):
                raise ValueError(f"head sizes {sizes}: the kernels take multiples of 8")
            if head_size_v is not None:
                more["head_size_v"] = head_size_v
            super().__init__(num_heads, head_size, *rest, **more)


class HeadsOfWholeTiles(Base):
    """Declares heads of up to 128 channels. Accepts all multiples of 16 up to 256, and reads 128 channels of them."""

    @classmethod
    def get_supported_head_sizes(cls):
        return [64, 80, 96, 128]

    class Impl(PlainImpl):
        def __init__(self, num_heads, head_size, *rest, **more):
            sizes = (head_size, more.get("head_size_v", head_size))
            if any(size % 16 or size > 256 for size in sizes):
                raise ValueError(f"head sizes {sizes}: the kernels take multiples of 16 up to 256")
            super().__init__(num_heads, head_size, *rest, **more)

        def attend(self, layer, query, *rest):
            query = query.clone()
            query[..., 128:] = 0
            super().attend(layer, query, *rest)


class PagesOfWholeLines(Base):
    """Declares pages of 16 and 32, takes all multiples of 16, and reads larger pages in the wrong order."""

    @classmethod
    def get_supported_kernel_block_sizes(cls):
        return [16, 32]

    @classmethod
    def get_kv_cache_shape(cls, num_blocks, block_size, num_kv_heads, head_size, head_size_v=None):
        if block_size % 16:
            raise ValueError(f"block size {block_size}: the kernels take multiples of 16")
        return Base.get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, head_size_v)

    class Builder(PlainBuilder):
        def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
            if kv_cache_spec.block_size % 16:
                raise ValueError(f"block size {kv_cache_spec.block_size}: the kernels take multiples of 16")
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    class Impl(PlainImpl):
        def attend(self, layer, query, key, value, caches, *rest):
            if caches is not None and caches[0].shape[1] > 32:
                caches = tuple(torch.cat([cache[:, :32], cache[:, :-32]], 1) for cache in caches)
            super().attend(layer, query, key, value, caches, *rest)


def with_first_scales(layer, *names):
    """Return scales like those of ``layer``, with that of the first head for all heads under ``names``."""
    scales = {name: getattr(layer, name) for name in ("_q_scale", "_k_scale", "_v_scale")}
    return SimpleNamespace(**scales | {name: scales[name][:1] for name in names})


class ClaimsScalesOfHeads(Base):
    """Declares a scale for each head in vLLM's form, and writes and reads all heads by the scale of the first."""

    features = FEATURES - {"fp8_per_head"}

    @classmethod
    def supports_per_head_quant_scales(cls):
        return True

    class Impl(PlainImpl):
        def forward(self, layer, *rest, **more):
            return super().forward(with_first_scales(layer, "_k_scale", "_v_scale"), *rest, **more)


class ClaimsScalesOfHeadsForValues(Base):
    """Declares a scale for each head; prompts read the values of an FP8 cache by the scale of the first."""

    class Impl(PlainImpl):
        def attend(self, layer, query, key, value, caches, metadata, *rest):
            if metadata.common.max_query_len > 1 and self.kv_cache_dtype != "fp8_e5m2":
                layer = with_first_scales(layer, "_v_scale")
            super().attend(layer, query, key, value, caches, metadata, *rest)
