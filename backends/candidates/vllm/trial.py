"""Writes and attends to one row, to find out whether this build of vLLM can run a backend.

A class may exist, and its layer be constructible, although its kernels belong to another platform's build, or to a
library that is imported on first use. Any other exception is left to the checks.
"""

import traceback
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch

from attncheck.backends.caches.packings import allocate_kv_cache
from attncheck.backends.candidates.vllm import package
from attncheck.backends.candidates.vllm.config import plain_config
from attncheck.backends.contract import CommonAttentionMetadata, KVCacheSpec, MultipleOf
from attncheck.backends.dtypes import DTYPES
from attncheck.backends.impl import set_current_vllm_config
from attncheck.reference.spec import AttentionType, CacheSpec, DType, LayerSpec, Layout

if TYPE_CHECKING:
    from attncheck.backends.candidates.vllm.bridge import VLLMBackend

_ELSEWHERE = "Could not run '"
"""Beginning of torch's message for an operator that has no kernel for this device."""

_IMPORTING = "<module>"
"""Frame name of a module that is being imported."""

_NUM_BLOCKS = 2

_INTERPRETING = "InterpreterError"
"""Exception that Triton's interpreter raises for unsupported operations of a kernel."""


@cache
def missing_parts(backend: "type[VLLMBackend]") -> list[str]:
    """Return which missing part of this build prevents writing or attending to one row; an empty list if none.

    A class outside vLLM only writes its row: its author should see the exceptions of its attention.
    """
    is_decoder = AttentionType.DECODER in backend.supported_attn_types
    if not (is_decoder and backend.get_supported_dtypes() and backend.supported_layouts):
        return []
    stage = "writer"
    try:
        row = _Row(backend)
        if not backend.forward_includes_kv_cache_update:
            row.write()
        stage = "forward"
        if backend.their_backend.__module__.startswith("vllm."):
            row.attend()
    except Exception as error:  # noqa: BLE001 (someone else's code)
        return absent_part(stage, error)
    return []


def absent_part(stage: str, error: Exception) -> list[str]:
    """Return the reason if ``error`` is about a missing part, otherwise an empty list."""
    text = f"{type(error).__name__}: {error}".partition("\n")[0]
    if package.ABSENT_OPERATOR in text:
        return [f"this build of vLLM lacks an operator of its {stage}: {error}"]
    if isinstance(error, NotImplementedError) and str(error).startswith(_ELSEWHERE):
        return [f"an operator of its {stage} is not built for this device: {text.partition('. ')[0]}"]
    if type(error).__name__ == _INTERPRETING:
        return [f"Triton's interpreter cannot run its kernels: {_root(error)!r}"]
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, ImportError) or any(frame.name == _IMPORTING for frame in frames):
        return [f"its {stage} imports what cannot be imported here: {text}"]
    return []


def _root(error: BaseException) -> BaseException:
    """Return the first exception in the chain of causes."""
    return error if error.__cause__ is None else _root(error.__cause__)


class _Row:
    """One request with one row, for a plain layer of the backend's first declared sizes."""

    def __init__(self, backend: "type[VLLMBackend]") -> None:
        sizes = backend.get_supported_head_sizes()
        size = backend.get_supported_kernel_block_sizes()[0]
        self._backend, self._device = backend, torch.device(package.platform().device_type)
        dtype = next(name for name, dtype in DTYPES.items() if dtype in backend.get_supported_dtypes())
        self._layer = LayerSpec(
            num_heads=1, num_kv_heads=1, head_size=sizes[0] if sizes else 64, dtype=cast(DType, dtype)
        )
        self._cache = CacheSpec(
            block_size=max(16, size.base) if isinstance(size, MultipleOf) else size,
            layout=cast(Layout, backend.supported_layouts[0]),
        )
        shape = (self._layer.num_heads, self._layer.num_kv_heads, self._layer.head_size)
        self._config = plain_config(
            DTYPES[self._layer.dtype],
            *shape,
            block_size=self._cache.block_size,
            kv_cache_layout=self._cache.layout,
            num_gpu_blocks=_NUM_BLOCKS,
        )
        with set_current_vllm_config(self._config):
            self._impl = backend.get_impl_cls()(shape[0], shape[2], self._layer.softmax_scale, shape[1])
        self._pool = allocate_kv_cache(backend, self._layer, self._cache, _NUM_BLOCKS, self._device)
        self._slots = torch.tensor([self._cache.block_size], device=self._device)  # the first slot of block 1
        self._attn_layer = _Unscaled(self._device, self._impl)

    def write(self) -> None:
        """Write the row as a key and as a value."""
        self._impl.do_kv_cache_update(self._attn_layer, self._row(), self._row(), self._pool, self._slots)

    def attend(self) -> None:
        """Build the metadata of a decode of the row, and attend."""
        self._config.compilation_config.static_forward_context["layer.1"] = self._attn_layer
        spec = KVCacheSpec(
            block_size=self._cache.block_size,
            num_kv_heads=self._layer.num_kv_heads,
            head_size=self._layer.head_size,
            dtype=DTYPES[self._layer.dtype],
        )
        with set_current_vllm_config(self._config):
            builder = self._backend.get_builder_cls()(spec, ["layer.1"], self._config, self._device)
        starts, lens = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(self._device),
            query_start_loc_cpu=starts,
            seq_lens=lens.to(self._device),
            seq_lens_cpu=lens,
            num_computed_tokens_cpu=lens - 1,
            num_reqs=1,
            num_actual_tokens=1,
            max_query_len=1,
            max_seq_len=1,
            block_table_tensor=torch.ones(1, 1, dtype=torch.int32, device=self._device),
            slot_mapping=self._slots,
        )
        metadata = builder.build(0, common)
        rows = self._row(), self._row(), self._row()
        self._impl.forward(self._attn_layer, *rows, self._pool, metadata, output=self._row())

    def _row(self) -> torch.Tensor:
        sizes = (1, self._layer.num_heads, self._layer.head_size)
        return torch.zeros(sizes, dtype=DTYPES[self._layer.dtype], device=self._device)


class _Unscaled:
    """An ``AttentionLayer`` whose scales are all 1."""

    def __init__(self, where: torch.device, impl: Any) -> None:
        self.impl = impl
        one = torch.ones(1, dtype=torch.float32, device=where)
        self._q_scale = self._k_scale = self._v_scale = self._prob_scale = one
        self._q_scale_float = self._k_scale_float = self._v_scale_float = 1.0
