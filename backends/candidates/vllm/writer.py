"""A backend's own writer outside of any case, to find out whether this build of vLLM has it. Must not know: cases."""

from typing import TYPE_CHECKING, cast

import torch

from attncheck.backends.caches.packings import allocate_kv_cache
from attncheck.backends.candidates.vllm import package
from attncheck.backends.candidates.vllm.config import plain_config
from attncheck.backends.declarations import MultipleOf
from attncheck.backends.dtypes import DTYPES
from attncheck.backends.impl import set_current_vllm_config
from attncheck.reference.spec import CacheSpec, DType, LayerSpec, Layout

if TYPE_CHECKING:
    from attncheck.backends.candidates.vllm.bridge import VLLMBackend

_ABSENT = "'_OpNamespace'"
"""Of the message with which torch answers for an operator that no library has registered."""


def missing_operators(backend: "type[VLLMBackend]") -> list[str]:
    """Why not even one row can be written: an operator that this build of vLLM does not have; empty: none is known.

    Whatever else a writer raises is for the checks to find.
    """
    if backend.forward_includes_kv_cache_update or not (backend.get_supported_dtypes() and backend.supported_layouts):
        return []
    sizes = backend.get_supported_head_sizes()
    dtype = next(name for name, dtype in DTYPES.items() if dtype in backend.get_supported_dtypes())
    size = backend.get_supported_kernel_block_sizes()[0]
    layer = LayerSpec(num_heads=1, num_kv_heads=1, head_size=sizes[0] if sizes else 64, dtype=cast(DType, dtype))
    cache = CacheSpec(
        block_size=max(16, size.base) if isinstance(size, MultipleOf) else size,
        layout=cast(Layout, backend.supported_layouts[0]),
    )
    try:
        _write_a_row(backend, layer, cache)
    except AttributeError as error:
        return [f"this build of vLLM lacks an operator of its writer: {error}"] if _ABSENT in str(error) else []
    except Exception:  # noqa: BLE001 (someone else's code)
        return []
    return []


def _write_a_row(backend: "type[VLLMBackend]", layer: LayerSpec, cache: CacheSpec) -> None:
    device, dtype = torch.device(package.platform().device_type), DTYPES[layer.dtype]
    sizes = (layer.num_heads, layer.num_kv_heads, layer.head_size)
    plain = plain_config(dtype, *sizes, block_size=cache.block_size, kv_cache_layout=cache.layout)
    with set_current_vllm_config(plain):
        impl = backend.get_impl_cls()(layer.num_heads, layer.head_size, layer.softmax_scale, layer.num_kv_heads)
    kv_cache = allocate_kv_cache(backend, layer, cache, 2, device)
    row, slots = torch.zeros(1, 1, layer.head_size, dtype=dtype, device=device), torch.ones(1, dtype=torch.int64)
    impl.do_kv_cache_update(_Unscaled(device), row, row, kv_cache, slots.to(device))


class _Unscaled:
    """An ``AttentionLayer`` whose scales are all 1."""

    def __init__(self, where: torch.device) -> None:
        one = torch.ones(1, dtype=torch.float32, device=where)
        self._q_scale = self._k_scale = self._v_scale = self._prob_scale = one
        self._q_scale_float = self._k_scale_float = self._v_scale_float = 1.0
