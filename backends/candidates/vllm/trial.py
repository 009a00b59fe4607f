"""Finds out whether this build of vLLM can run a backend: constructs layers, and writes and attends to one row.

A class may exist, and its layer be constructible, although its kernels belong to another platform's build, or to a
library that is imported on first use. vLLM may also refuse a layer in a constructor, although its class declares it.
Any other exception is left to the checks.
"""

import traceback
from collections.abc import Callable
from functools import cache, lru_cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from attncheck.backends.caches.packings import allocate_kv_cache
from attncheck.backends.candidates.vllm import package
from attncheck.backends.candidates.vllm.config import plain_config
from attncheck.backends.contract import CommonAttentionMetadata, KVCacheSpec, MultipleOf
from attncheck.backends.dtypes import DTYPES, cache_dtype
from attncheck.backends.impl import MLA_KEYWORDS, set_current_vllm_config
from attncheck.errors import BackendUnavailableError
from attncheck.reference.spec import AttentionType, DType, LayerSpec
from attncheck.reference.step_spec import CacheSpec, Layout

if TYPE_CHECKING:
    from attncheck.backends.candidates.vllm.bridge import VLLMBackend

_ELSEWHERE = "Could not run '"
"""Beginning of torch's message for an operator that has no kernel for this device."""

_NO_LIBRARY = ("FlashAttention version not detected", "required dependencies not available")
"""Messages of vLLM's if a library that would serve the layer is not installed."""

_IMPORTING = "<module>"
"""Frame name of a module that is being imported."""

_NUM_BLOCKS = 2

_INTERPRETING = "InterpreterError"
"""Exception that Triton's interpreter raises for unsupported operations of a kernel."""

C = TypeVar("C", bound=Callable[..., Any])


@lru_cache(maxsize=1024)
def refusals(backend: "type[VLLMBackend]", layer: LayerSpec, cache_spec: CacheSpec) -> tuple[str, ...]:
    """Construct the impl and the builder of a layer and cache, once per process; return why vLLM refuses that."""
    try:
        _Row(backend, layer, cache_spec).builder()
    except (ValueError, NotImplementedError) as error:
        # The config classes of vLLM are pydantic's, which replaces what their methods raise.
        of_config = error.errors()[0]["msg"] if hasattr(error, "errors") else None
        is_refused = of_config is not None or _is_raised_by_vllm(error)
        return (f"refused by vLLM's constructor: {of_config or error}".rstrip("."),) if is_refused else ()
    except Exception:  # noqa: BLE001 (someone else's code, for the checks to find)
        return ()
    return ()


def _is_raised_by_vllm(error: Exception) -> bool:
    """Return whether a ``raise`` statement raised ``error``, in vLLM or in the bridge: both are folders ``vllm``."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return (last.line or "").startswith("raise ") and "vllm" in Path(last.filename).parts


def names_missing_parts(stage: str) -> Callable[[C], C]:
    """Return a decorator for methods that call vLLM's code in ``stage``.

    The method raises ``BackendUnavailableError`` if a part of vLLM, or a library that it needs, is missing. The author
    of a class outside vLLM sees the exception itself.
    """

    def decorated(method: C) -> C:
        @wraps(method)
        def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
            try:
                return method(self, *arguments, **keywords)
            except Exception as error:
                theirs = self.their_backend
                absent = absent_part(stage, error)
                if not absent or not theirs.__module__.startswith("vllm."):
                    raise
                raise BackendUnavailableError(theirs.get_name(), absent) from error

        return cast(C, call)

    return decorated


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
        row = _Row(backend, *_plain(backend))
        if not backend.forward_includes_kv_cache_update:
            row.write()
        stage = "forward"
        if backend.their_backend.__module__.startswith("vllm."):
            row.attend()
    except BackendUnavailableError as error:
        return list(error.reasons)
    except Exception as error:  # noqa: BLE001 (someone else's code)
        if type(error).__name__ == _INTERPRETING:
            return [f"Triton's interpreter cannot run its kernels: {_root(error)!r}"]
        return absent_part(stage, error)
    return []


def absent_part(stage: str, error: Exception) -> list[str]:
    """Return the reason if ``error`` is about a missing part, otherwise an empty list."""
    text = f"{type(error).__name__}: {error}".partition("\n")[0]
    if package.ABSENT_OPERATOR in text:
        return [f"this build of vLLM lacks an operator of its {stage}: {error}"]
    if isinstance(error, NotImplementedError) and str(error).startswith(_ELSEWHERE):
        return [f"an operator of its {stage} is not built for this device: {text.partition('. ')[0]}"]
    if any(message in str(error) for message in _NO_LIBRARY):
        return [f"its {stage} lacks a library: {error}"]
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, ImportError) or any(frame.name == _IMPORTING for frame in frames):
        return [f"its {stage} imports what cannot be imported here: {text}"]
    return []


def _root(error: BaseException) -> BaseException:
    """Return the first exception in the chain of causes."""
    return error if error.__cause__ is None else _root(error.__cause__)


def _plain(backend: "type[VLLMBackend]") -> tuple[LayerSpec, CacheSpec]:
    """Return a plain layer and its cache, of the backend's first declared sizes."""
    sizes = backend.get_supported_head_sizes()
    size = backend.get_supported_kernel_block_sizes()[0]
    dtype = next(name for name, dtype in DTYPES.items() if dtype in backend.get_supported_dtypes())
    layer = LayerSpec(num_heads=1, num_kv_heads=1, head_size=sizes[0] if sizes else 64, dtype=cast(DType, dtype))
    return layer, CacheSpec(
        block_size=max(16, size.base) if isinstance(size, MultipleOf) else size,
        layout=cast(Layout, backend.supported_layouts[0]),
    )


class _Row:
    """One request with one row; the constructor constructs the impl of its layer."""

    def __init__(self, backend: "type[VLLMBackend]", layer: LayerSpec, cache_spec: CacheSpec) -> None:
        self._backend, self._device = backend, torch.device(package.platform().device_type)
        self._layer, self._cache = layer, cache_spec
        self._config = plain_config(
            DTYPES[layer.dtype],
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_size,
            block_size=cache_spec.block_size,
            cache_dtype=cache_spec.kv_cache_dtype,
            kv_cache_layout=cache_spec.layout,
            num_gpu_blocks=_NUM_BLOCKS,
        )
        keywords: dict[str, Any] = {}
        if layer.mla is not None:  # vLLM's layer derives or ignores those that a spec lacks
            keywords = {name: getattr(layer.mla, name, None) for name in MLA_KEYWORDS}
        elif layer.sink_logits is not None:
            dtype = DTYPES[layer.sinks_dtype or layer.dtype]
            keywords["sinks"] = torch.tensor(layer.sink_logits, dtype=dtype, device=self._device)
        if layer.value_head_size != layer.head_size:
            keywords["head_size_v"] = layer.value_head_size
        with set_current_vllm_config(self._config):
            self._impl = backend.get_impl_cls()(
                layer.num_heads,
                layer.head_size,
                layer.softmax_scale,
                layer.num_kv_heads,
                None if layer.alibi_slopes is None else list(layer.alibi_slopes),
                layer.sliding_window,
                cache_spec.kv_cache_dtype,
                layer.logits_soft_cap,
                layer.attn_type,
                "layer.0" if layer.kv_sharing else None,
                **keywords,
            )
        self._pool = allocate_kv_cache(backend, layer, cache_spec, _NUM_BLOCKS, self._device)
        self._attn_layer = _Unscaled(self._device, self._impl)
        self._config.compilation_config.static_forward_context["layer.1"] = self._attn_layer
        self._slots = torch.tensor([cache_spec.block_size], device=self._device)  # the first slot of block 1

    def builder(self) -> Any:
        """Return a builder for the layer."""
        layer, block_size = self._layer, self._cache.block_size
        spec = KVCacheSpec(
            block_size=block_size,
            num_kv_heads=layer.num_kv_heads,
            head_size=layer.head_size,
            dtype=cache_dtype(layer, self._cache),
            head_size_v=layer.value_head_size,
            sliding_window=layer.sliding_window,
            chunked_prefill_workspace_size=None if layer.mla is None else block_size,
        )
        with set_current_vllm_config(self._config):
            return self._backend.get_builder_cls()(spec, ["layer.1"], self._config, self._device)

    def write(self) -> None:
        """Write the row as a key and as a value."""
        self._impl.do_kv_cache_update(self._attn_layer, self._row(), self._row(), self._pool, self._slots)

    def attend(self) -> None:
        """Build the metadata of a decode of the row, and attend."""
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
        metadata = self.builder().build(0, common)
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
