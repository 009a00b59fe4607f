"""The contract: what an attention backend is. vLLM's names and call order, and a few declarations of attncheck's own.

A candidate is an :class:`AttentionBackend` subclass, never instantiated, that names an impl and a metadata builder. Its
minimum is ``get_name``, ``get_impl_cls``, ``get_builder_cls``, ``get_kv_cache_shape``, the impl's ``__init__`` and
``forward``, the builder's ``__init__`` and ``build``; everything else has the default described here. The harness
drives candidates by this and by nothing else. A step, in order, under ``torch.no_grad()``::

    impl     = backend.get_impl_cls()(num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window,
                                      kv_cache_dtype, logits_soft_cap, attn_type, None)   # [, sinks=][, head_size_v=]
    builder  = backend.get_builder_cls()(kv_cache_spec, layer_names, vllm_config, device)
    metadata = builder.build(common_prefix_len=0, common_attn_metadata=common)
    impl.do_kv_cache_update(attn_layer, key, value, kv_cache, slot_mapping)   # only where forward does not include it
    impl.forward(attn_layer, query, key, value, kv_cache, metadata, output=output)   # [, output_lse=][, output_scale=]

While impl and builder are made, ``get_current_vllm_config()`` is the config the builder is given. There,
``compilation_config.static_forward_context`` maps the builder's layer names to the layers ``forward`` will get, each
with its ``impl``.

Of a layer with a latent cache the impl is an ``MLAAttentionImpl``: its constructor takes more keywords, key and value
are ``kv_c_normed`` and ``k_pe``, and the output is flat.

Errors a candidate raises: ``ValueError`` for a value (size, shape, dtype), ``NotImplementedError`` for a feature or a
combination, ``TypeError`` for an object of the wrong kind, ``RuntimeError`` for calls in the wrong order. What it
cannot do it refuses before the output or the cache changes; a feature quietly ignored is the worst bug of all.
"""

import importlib.metadata
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from attncheck.backends.caches.codecs import KVCacheCodec, default_codec
from attncheck.backends.conventions import Conventions
from attncheck.backends.declarations import MultipleOf, undeclared
from attncheck.backends.impl import (
    AttentionImpl,
    AttentionLayer,
    GroupShape,
    MLAAttentionImpl,
    QuantKey,
    ScaleDesc,
    get_current_vllm_config,
)
from attncheck.reference.spec import AttentionCGSupport, AttentionType, BatchSpec, CacheSpec, LayerSpec
from attncheck.reference.utilities.builder import AttentionMetadataBuilder
from attncheck.reference.utilities.metadata import CommonAttentionMetadata

__all__ = [
    "AttentionBackend",
    "AttentionCGSupport",
    "AttentionImpl",
    "AttentionLayer",
    "AttentionMetadata",
    "AttentionMetadataBuilder",
    "AttentionType",
    "CommonAttentionMetadata",
    "Conventions",
    "GroupShape",
    "KVCacheCodec",
    "KVCacheSpec",
    "MLAAttentionImpl",
    "MultipleOf",
    "QuantKey",
    "ScaleDesc",
    "get_current_vllm_config",
]


class AttentionMetadata:
    """Empty marker: a base for metadata classes that want one. Any class serves as metadata."""


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """What a builder is told about the cache its layers share. ``block_size`` is the kernel's.

    ``dtype`` is that of the allocated tensor (``torch.uint8`` for an FP8 cache). The optional fields are None for a
    layer without the feature: ``head_size_v`` where it equals ``head_size``. ``chunked_prefill_workspace_size``: of a
    latent cache, tokens of context that a chunked prefill may gather at once (vLLM's builders derive it from their
    config); None: the backend's choice.
    """

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    head_size_v: int | None = None
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    chunked_prefill_workspace_size: int | None = None


class AttentionBackend(ABC):
    """Facts and factories of one kernel library: static and class members only.

    Selection believes these facts: one declared too generously becomes a wrong answer, one declared too strictly costs
    speed. The harness examines both sides.
    """

    accept_output_buffer: ClassVar[bool] = False
    """True: ``forward`` must be given ``output``, and writes into it. False: it may return a new tensor."""

    forward_includes_kv_cache_update: ClassVar[bool] = True
    """False: the new K/V are written by ``do_kv_cache_update``, which is called right before ``forward``."""

    features: ClassVar[frozenset[str]] = frozenset()
    """What the backend supports beyond plain causal attention; names of ``attncheck.reference.spec.FEATURES``."""

    conventions: ClassVar[Conventions] = Conventions()
    """Its choices where honest backends differ."""

    supported_kv_cache_dtypes: ClassVar[tuple[str, ...]] = ("auto",)
    """``auto`` is the layer's dtype, under whichever name."""

    supported_layouts: ClassVar[tuple[str, ...]] = ("NHD",)
    """Memory orders of a page; a backend that reads the cache by its strides takes both."""

    supported_attn_types: ClassVar[tuple[str, ...]] = (AttentionType.DECODER,)

    supported_devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    """Types of devices, as in ``torch.device.type``."""

    builder_only: ClassVar[bool] = False
    """Whether nothing but its metadata builder can be driven, so that no impl is ever made."""

    @staticmethod
    @abstractmethod
    def get_name() -> str:
        """Stable, unique, upper case."""
        raise NotImplementedError

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type[AttentionImpl[Any]]:
        """The class made once a layer."""
        raise NotImplementedError

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        """The class made once a group of layers."""
        raise NotImplementedError

    @staticmethod
    @abstractmethod
    def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """Logical shape of one layer's cache; ``ValueError`` for a block size the kernels cannot do.

        A backend that declares ``head_size_v`` takes it as a keyword, given only where it differs from ``head_size``.
        """
        raise NotImplementedError

    @staticmethod
    def get_kv_cache_stride_order() -> tuple[int, ...]:
        """Physical order of the logical dimensions. Raising (the default): the harness derives it from the packing.

        An override may take ``cache_layout`` (``"NHD"``, ``"HND"``); one that does not has a single layout.
        """
        raise NotImplementedError

    @staticmethod
    def get_metadata_cls() -> type[Any]:
        """The class of the builder's products."""
        return AttentionMetadata

    @classmethod
    def make_metadata(cls, *args: Any, **kwargs: Any) -> Any:
        """An object of ``get_metadata_cls()``."""
        return cls.get_metadata_cls()(*args, **kwargs)

    @classmethod
    def is_mla(cls) -> bool:
        """Whether the backend serves layers with a latent cache, and no others; its impl is an MLAAttentionImpl."""
        return False

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        """(module, qualified name): the identity by which layers are grouped."""
        return (cls.__module__, cls.__qualname__)

    @classmethod
    def get_supported_dtypes(cls) -> list[torch.dtype]:
        """Dtypes of query, key, value and output."""
        return [torch.float16, torch.bfloat16]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Empty: any."""
        return []

    @classmethod
    def get_supported_kernel_block_sizes(cls) -> list[int | MultipleOf]:
        """Page sizes the kernels can do, in tokens."""
        return [MultipleOf(1)]

    @classmethod
    def validate_head_size(cls, head_size: int) -> None:
        """``ValueError`` naming the size, the backend and the supported sizes."""
        supported = cls.get_supported_head_sizes()
        if supported and head_size not in supported:
            raise ValueError(f"head size {head_size} is not supported by {cls.get_name()}; supported: {supported}")

    @classmethod
    def unavailable_reasons(cls, device: str) -> list[str]:
        """Why this backend cannot run on ``device`` (``"cpu"``, ``"cuda"``, ``"cuda:1"``) here; empty: it can."""
        kind = torch.device(device).type
        if kind in cls.supported_devices:
            return []
        return [f"device {device}: the backend runs on {', '.join(cls.supported_devices)}"]

    @classmethod
    def unavailable_case_reasons(cls, device: str, layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> list[str]:
        """Why this one case, which the backend supports, cannot be examined on ``device`` here; empty: it can.

        For what the machine gets wrong in the backend's place, as an interpreter of kernels may.
        """
        return []

    @classmethod
    def required_environment(cls, device: str) -> dict[str, str]:
        """Variables that must stand in the environment before Python starts, for the backend to run on ``device``.

        Such as ``TRITON_INTERPRET=1`` on a CPU, which Triton reads when a kernel is decorated. A backend is examined in
        a process that is started with them; where it is examined in the caller's own, they must stand already.
        """
        return {}

    @classmethod
    def default_suite(cls, device: str) -> str:
        """The built-in suite that the backend is asked on ``device`` where the user names none.

        ``interpreted`` is for those whose kernels are interpreted there, and so thousands of times slower.
        """
        return "smoke"

    @classmethod
    def unsupported_reasons(cls, layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> list[str]:
        """Why this backend does not answer the case, every reason with value and limit; empty: it must answer right.

        Derived from the declarations. An override adds to ``super().unsupported_reasons(...)`` what they cannot say.
        """
        return undeclared(cls, layer, cache, batch)

    @classmethod
    def kv_cache_codec(cls, layer: LayerSpec, cache: CacheSpec) -> KVCacheCodec | None:
        """How the cache is written and read from outside; None: as the backend's own writer shows when it is watched.

        The default recognises the usual packings by asking ``get_kv_cache_shape`` with unmistakable numbers; it is None
        for others, and for a value head size of its own. A backend whose cache has a usual shape, but is laid out in
        another way within, overrides it to return None.
        """
        return default_codec(cls, layer, cache)

    @classmethod
    def functions(cls) -> dict[str, Callable[..., Any]]:
        """Functions offered besides attention, by the name and with the signature the reference has them under.

        Of ``merge_attn_states``, ``causal_conv1d``, ``reshape_and_cache``, ``copy_blocks`` and ``swap_blocks`` of
        :mod:`attncheck.reference`, without its ``precision``: results are in the dtype of the inputs (an LSE in
        float32), or wider. The paths ``merge`` and ``causal_conv1d`` examine the first two, ``cache_write`` the others.
        """
        return {}

    @classmethod
    def version(cls) -> str:
        """Version of what is examined: attncheck's for its own candidates, else empty unless overridden."""
        if not cls.__module__.startswith("attncheck."):
            return ""
        try:
            return importlib.metadata.version("attncheck")
        except importlib.metadata.PackageNotFoundError:  # a checkout that was never installed
            return ""
