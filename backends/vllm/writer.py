"""A backend's own writer outside of any case: to watch what it does, and to find out whether it is there at all.

Must not know: what is learned from it, what a case asks.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from attncheck.backends.current_config import set_current_vllm_config
from attncheck.backends.declarations import DTYPES, MultipleOf
from attncheck.backends.packings import allocate_kv_cache
from attncheck.backends.vllm import package
from attncheck.backends.vllm.config import plain_config
from attncheck.reference.spec import CacheSpec, DType, LayerSpec, Layout

if TYPE_CHECKING:
    from attncheck.backends.vllm.bridge import VLLMBackend

_ABSENT = "'_OpNamespace'"
"""Of the message with which torch answers for an operator that no library has registered."""


def writer_of(
    backend: "type[VLLMBackend]", layer: LayerSpec, cache: CacheSpec
) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    """``write(kv_cache, slots, key, value)`` of a layer of these sizes; scales are 1."""
    plain = plain_config(
        dtype=DTYPES[layer.dtype],
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_size=layer.head_size,
        block_size=cache.block_size,
        cache_dtype=cache.kv_cache_dtype,
    )
    with set_current_vllm_config(plain):
        impl = backend.get_impl_cls()(layer.num_heads, layer.head_size, layer.softmax_scale, layer.num_kv_heads)
    unscaled = _Unscaled(device())

    def write(kv_cache: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
        impl.do_kv_cache_update(unscaled, key, value, kv_cache, slots)

    return write


def missing_operators(backend: "type[VLLMBackend]") -> list[str]:
    """Why not even one row can be written: an operator that this build of vLLM does not have; empty: none is known.

    Whatever else a writer raises is for the checks to find.
    """
    if backend.forward_includes_kv_cache_update or not backend.get_supported_dtypes():
        return []
    sizes = backend.get_supported_head_sizes()
    dtype = next(name for name, dtype in DTYPES.items() if dtype in backend.get_supported_dtypes())
    size = backend.get_supported_kernel_block_sizes()[0]
    layer = LayerSpec(num_heads=1, num_kv_heads=1, head_size=sizes[0] if sizes else 64, dtype=cast(DType, dtype))
    cache = CacheSpec(
        block_size=max(16, size.base) if isinstance(size, MultipleOf) else size,
        layout=cast(Layout, backend.supported_layouts[0]),
    )
    row = torch.zeros(1, 1, layer.head_size, dtype=DTYPES[dtype], device=device())
    try:
        kv_cache = allocate_kv_cache(backend, layer, cache, 2, device())
        writer_of(backend, layer, cache)(kv_cache, torch.ones(1, dtype=torch.int64, device=device()), row, row)
    except AttributeError as error:
        return [f"this build of vLLM lacks an operator of its writer: {error}"] if _ABSENT in str(error) else []
    except Exception:  # noqa: BLE001 (someone else's code)
        return []
    return []


def device() -> torch.device:
    """Where the installed vLLM keeps its tensors."""
    return torch.device(package.platform().device_type)


class _Unscaled:
    """An ``AttentionLayer`` whose scales are all 1."""

    def __init__(self, where: torch.device) -> None:
        one = torch.ones(1, dtype=torch.float32, device=where)
        self._q_scale = self._k_scale = self._v_scale = self._prob_scale = one
        self._q_scale_float = self._k_scale_float = self._v_scale_float = 1.0
