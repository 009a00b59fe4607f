"""One layer of attncheck's own candidates: what its constructor and its steps refuse, and the order of ``forward``.

A bad value raises ``ValueError``, an undeclared feature or combination ``NotImplementedError``, before anything is
computed. One message names all problems.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from attncheck.backends.contract import AttentionBackend, AttentionImpl, AttentionLayer, AttentionType, MultipleOf
from attncheck.backends.dtypes import DTYPES, FP8_DTYPES
from attncheck.backends.impl import STATIC_FP8, LayerArguments
from attncheck.backends.paged_metadata import PagedMetadata
from attncheck.reference.step_spec import ROW_FORMATS

Metadata = TypeVar("Metadata", bound=PagedMetadata)


class CandidateBackend(AttentionBackend):
    """Backend whose pages have any layout, and whose builder is a ``PagedBuilder``."""

    accept_output_buffer = True
    supported_dtypes: ClassVar[Sequence[torch.dtype]] = tuple(DTYPES.values())
    supported_layouts: ClassVar[tuple[str, ...]] = ("NHD", "HND")

    supported_head_sizes: ClassVar[Sequence[int]] = ()
    """Supported head sizes of keys and values; empty for any size."""

    supported_block_sizes: ClassVar[Sequence[int | MultipleOf]] = (MultipleOf(1),)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return ``supported_head_sizes``; override it if they depend on the library."""
        return list(cls.supported_head_sizes)

    @classmethod
    def get_supported_kernel_block_sizes(cls) -> list[int | MultipleOf]:
        """Return ``supported_block_sizes``."""
        return list(cls.supported_block_sizes)

    @classmethod
    def get_metadata_cls(cls) -> type[Any]:
        """Return the class that the backend's builder declares."""
        builder: Any = cls.get_builder_cls()
        metadata: type[Any] = builder.metadata_cls
        return metadata


@dataclass(frozen=True)
class Call(Generic[Metadata]):
    """The arguments of one call of ``forward`` for a step with metadata; the contract documents their shapes.

    In a layer with a latent cache, ``key`` is ``kv_c_normed`` and ``value`` is ``k_pe``.
    """

    layer: AttentionLayer
    query: Tensor
    key: Tensor | None
    value: Tensor | None
    kv_cache: Tensor
    metadata: Metadata
    output: Tensor
    output_lse: Tensor | None
    output_scale: Tensor | None

    @property
    def num_tokens(self) -> int:
        """Number of rows that query and output must have."""
        return self.metadata.common.num_actual_tokens


class CandidateImpl(AttentionImpl[Metadata]):
    """One layer: the refusals, the profiling call, and the order of a step."""

    backend: ClassVar[type[AttentionBackend]]
    metadata_cls: ClassVar[type[PagedMetadata]] = PagedMetadata
    attn_type: AttentionType = AttentionType.DECODER
    alibi_slopes: tuple[float, ...] | None = None
    kv_cache_dtype: str

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor | None = None,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
        *,
        output_lse: Tensor | None = None,
    ) -> Tensor:
        """See the contract; nothing is written for a step that is refused."""
        if output is None:
            raise ValueError(f"{self.backend.get_name()}: output is None, but the caller must allocate it")
        if attn_metadata is None:  # profiling: there is no cache and no batch
            return output.zero_()
        call = Call(layer, query, key, value, kv_cache, attn_metadata, output, output_lse, output_scale)
        self._refuse_wrong_step(call)
        self._refuse_undeclared_step(call, has_block_scale=output_block_scale is not None)
        self._run(call)
        return output

    @abstractmethod
    def _run(self, call: Call[Metadata]) -> None:
        """Write the new rows into the cache, then attend, for a call that nothing refuses."""

    @abstractmethod
    def _wrong_tensors(self, call: Call[Metadata]) -> list[str]:
        """Return what is wrong with shapes and dtypes of the call's tensors; an empty list if nothing is."""

    def _refuse_wrong_step(self, call: Call[Metadata]) -> None:
        name, metadata = self.backend.get_name(), call.metadata
        if not isinstance(metadata, self.metadata_cls):
            given, own = type(metadata).__qualname__, self.metadata_cls.__qualname__
            raise TypeError(f"{name}: attn_metadata is a {given}, not a {own}")
        wrong = self._wrong_tensors(call)
        if metadata.num_rows > call.num_tokens:
            wrong.append(f"query_start_loc ends at {metadata.num_rows}, beyond num_actual_tokens {call.num_tokens}")
        supported = self.backend.get_supported_dtypes()
        if call.query.dtype not in (*supported, STATIC_FP8.dtype):
            wrong.append(f"query has dtype {call.query.dtype}: supported are {', '.join(map(str, supported))}")
        _raise(self.backend, ValueError, wrong)

    def _refuse_undeclared_step(self, call: Call[Metadata], *, has_block_scale: bool) -> None:
        causal, is_decoder = call.metadata.common.causal, self.attn_type == AttentionType.DECODER
        if causal and not is_decoder:
            problem = f"attention of type {self.attn_type} is not causal, but causal is True in the metadata"
            _raise(self.backend, ValueError, [problem])
        # Rows are aligned to the end of the keys. Without a causal mask, rows before the first key need no position.
        lens = zip(call.metadata.query_lens, call.metadata.seq_lens, strict=True)
        short = [(q, s) for q, s in lens if q > s] if is_decoder and causal else []
        is_fp8 = self.attn_type.has_cache and self.kv_cache_dtype in FP8_DTYPES
        has_codes = call.query.dtype == STATIC_FP8.dtype
        scales = [call.layer._k_scale, call.layer._v_scale, *([call.layer._q_scale] if has_codes else [])]
        is_per_head = is_fp8 and max(scale.numel() for scale in scales) > 1
        needed = {
            "non_causal": (is_decoder and not causal, "a decoder layer that is not causal"),
            "alibi_non_causal": (self.alibi_slopes is not None and not causal, "ALiBi without a causal mask"),
            "short_keys": (bool(short), f"(query_len, seq_len) {short[:1]}: more rows than keys"),
            "fp8_per_head": (is_per_head, "k_scale, v_scale or q_scale per head"),
            "fp8_query": (has_codes, "an FP8 query"),
            "output_quant": (call.output_scale is not None, "output_scale"),
            "lse": (call.output_lse is not None, "output_lse"),
        }
        features = self.backend.features
        missing = [text for name, (is_needed, text) in needed.items() if is_needed and name not in features]
        missing += ["output_block_scale"] if has_block_scale else []
        _raise(self.backend, NotImplementedError, [f"{text} is not supported" for text in missing])


def refuse_layer(backend: type[AttentionBackend], given: LayerArguments) -> None:
    """Raise for a layer that the backend does not support."""
    wrong = []
    if min(given.num_heads, given.num_kv_heads) < 1 or given.num_heads % given.num_kv_heads:
        wrong.append(f"num_kv_heads {given.num_kv_heads} does not divide num_heads {given.num_heads}")
    supported_sizes = backend.get_supported_head_sizes()
    for name in ("head_size", "head_size_v"):
        size = getattr(given, name)
        if size < 1 or (supported_sizes and size not in supported_sizes):
            wrong.append(f"{name} {size}: supported are {', '.join(map(str, supported_sizes)) or 'sizes from 1 on'}")
    if not math.isfinite(given.scale):
        wrong.append(f"scale {given.scale} is not finite")
    if given.sliding_window is not None and given.sliding_window < 1:
        wrong.append(f"sliding_window {given.sliding_window}: a window holds at least the query's own key")
    if given.logits_soft_cap is not None and given.logits_soft_cap < 0:
        wrong.append(f"logits_soft_cap {given.logits_soft_cap} is negative")
    for name in ("alibi_slopes", "sinks"):
        values = getattr(given, name)
        if values is not None and len(values) != given.num_heads:
            wrong.append(f"{name} has {len(values)} values for {given.num_heads} query heads")
    known_types = [str(kind) for kind in AttentionType]
    if str(given.attn_type) not in known_types:
        wrong.append(f"attn_type {given.attn_type!r}: must be one of {', '.join(known_types)}")
    if given.kv_cache_dtype not in ("auto", *DTYPES, *FP8_DTYPES, *ROW_FORMATS):
        wrong.append(f"kv_cache_dtype {given.kv_cache_dtype!r} is unknown")
    _raise(backend, ValueError, wrong)

    needs = {
        f"attn_type {given.attn_type}": str(given.attn_type) in [str(kind) for kind in backend.supported_attn_types],
        f"kv_cache_dtype {given.kv_cache_dtype}": _takes_cache_dtype(backend, given.kv_cache_dtype),
    }
    needed = {
        "alibi": given.alibi_slopes is not None,
        "sliding_window": given.sliding_window is not None,
        "logits_soft_cap": bool(given.logits_soft_cap),
        "sinks": given.sinks is not None,
        "head_size_v": given.head_size_v != given.head_size,
        "kv_sharing": given.kv_sharing_target_layer_name is not None,
    }
    needs |= {name: name in backend.features for name, is_needed in needed.items() if is_needed}
    _raise(backend, NotImplementedError, [f"{name} is not supported" for name, is_met in needs.items() if not is_met])


def wrong_shapes(*wanted: tuple[str, Tensor | None, int, tuple[int, ...]]) -> list[str]:
    """Return what is wrong with tensors, each given as name, tensor, the rows that it needs, and the shape of a row.

    A tensor may have more rows than it needs, and may be None.
    """
    return [
        f"{name} has shape {tuple(given.shape)}, not [{rows}+, {', '.join(map(str, shape))}]"
        for name, given, rows, shape in wanted
        if given is not None and (given.shape[0] < rows or given.shape[1:] != shape)
    ]


def wrong_cache_dtype(
    backend: type[AttentionBackend], kv_cache_dtype: str, stored: torch.dtype, layer_dtype: torch.dtype
) -> list[str]:
    """Return what is wrong with a cache of dtype ``stored``; an empty list if nothing is."""
    if kv_cache_dtype in ROW_FORMATS:
        expected = {torch.uint8, torch.int8}
    elif kv_cache_dtype in FP8_DTYPES:
        expected = {torch.uint8, FP8_DTYPES[kv_cache_dtype]}
    else:
        expected = {layer_dtype, *(DTYPES[name] for name in backend.supported_kv_cache_dtypes if name in DTYPES)}
    return [] if stored in expected else [f"kv_cache has dtype {stored} for kv_cache_dtype {kv_cache_dtype}"]


def _takes_cache_dtype(backend: type[AttentionBackend], kv_cache_dtype: str) -> bool:
    """Return whether the cache dtype may be supported; ``forward``, which has the layer's dtype, decides."""
    if kv_cache_dtype in FP8_DTYPES:
        return kv_cache_dtype in backend.supported_kv_cache_dtypes and "fp8_kv" in backend.features
    if kv_cache_dtype in ROW_FORMATS:
        return kv_cache_dtype in backend.supported_kv_cache_dtypes
    return any(name in backend.supported_kv_cache_dtypes for name in ("auto", kv_cache_dtype))


def _raise(backend: type[AttentionBackend], kind: type[Exception], problems: Sequence[str]) -> None:
    if problems:
        raise kind(f"{backend.get_name()}: {'; '.join(problems)}")
