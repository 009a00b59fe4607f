"""The contract of an attention backend: vLLM's names and call order, plus a few declarations of attncheck's own.

A candidate is a subclass of :class:`AttentionBackend` that names an impl class and a metadata builder class. The
subclass itself is never instantiated. It must implement ``get_name``, ``get_impl_cls``, ``get_builder_cls``, the
impl's ``__init__`` and ``forward``, and the builder's ``__init__`` and ``build``. Every other member has the default
documented here. The harness drives a candidate only through this contract. One step makes these calls, in this order,
under ``torch.no_grad()``::

    impl     = backend.get_impl_cls()(num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window,
                                      kv_cache_dtype, logits_soft_cap, attn_type, None)   # [, sinks=][, head_size_v=]
    builder  = backend.get_builder_cls()(kv_cache_spec, layer_names, vllm_config, device)
    metadata = builder.build(common_prefix_len=0, common_attn_metadata=common)
    impl.do_kv_cache_update(attn_layer, key, value, kv_cache, slot_mapping)   # only where forward does not include it
    impl.forward(attn_layer, query, key, value, kv_cache, metadata, output=output)   # [, output_lse=][, output_scale=]

While impl and builder are constructed, ``get_current_vllm_config()`` returns the config that the builder gets. In that
config, ``compilation_config.static_forward_context`` maps the builder's layer names to the layers passed to
``forward``; each layer has its ``impl``.

On the path ``ranks``, which needs the feature ``dcp``, the calls are made on each rank of decode context parallelism,
in a process of its own. Then ``get_dcp_group()`` returns the group, and an impl has ``dcp_world_size`` and
``dcp_rank``. Rank ``r`` has query heads ``r * num_heads`` to ``(r + 1) * num_heads - 1``, all new keys and values, and
a cache with the keys that it holds. Key ``p`` is on rank ``p // cp_kv_cache_interleave_size % dcp_world_size``; the
slot of a key of another rank is -1. ``seq_lens`` count the keys of all ranks, ``dcp_local_seq_lens`` those of the
rank. ``forward`` returns the attention of the rank's heads to all keys, which takes the calls of the group.

For a layer with a latent cache, the impl is an ``MLAAttentionImpl``. Its constructor takes more keywords, key and value
are ``kv_c_normed`` and ``k_pe``, and the output is flat.

A candidate raises ``ValueError`` for a bad value (size, shape, dtype), ``NotImplementedError`` for an unsupported
feature or combination, ``TypeError`` for an object of the wrong kind, and ``RuntimeError`` for calls in the wrong
order. It must raise before it changes the output or the cache. A feature silently ignored is the worst bug.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

import attncheck
from attncheck.backends.caches.codecs import KVCacheCodec, default_codec
from attncheck.backends.caches.packings import Packing, packed_shape
from attncheck.backends.context_parallel import DCPGroup, get_dcp_group, get_dcp_world_size_and_rank
from attncheck.backends.conventions import Conventions
from attncheck.backends.declarations import MultipleOf, read_predicates, undeclared
from attncheck.backends.impl import (
    AttentionImpl,
    AttentionLayer,
    GroupShape,
    MLAAttentionImpl,
    QuantKey,
    ScaleDesc,
    get_current_vllm_config,
)
from attncheck.reference.spec import AttentionCGSupport, AttentionType, LayerSpec
from attncheck.reference.step_spec import BatchSpec, CacheSpec
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
    "DCPGroup",
    "GroupShape",
    "KVCacheCodec",
    "KVCacheSpec",
    "MLAAttentionImpl",
    "MultipleOf",
    "QuantKey",
    "ScaleDesc",
    "get_current_vllm_config",
    "get_dcp_group",
    "get_dcp_world_size_and_rank",
]


class AttentionMetadata:
    """Empty marker class that metadata classes may derive from. Any class can serve as metadata."""


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """Description of the KV cache that one group of layers shares; the first argument of a metadata builder.

    ``block_size`` is the kernel's, in tokens. ``dtype`` is that of the allocated tensor (``torch.uint8`` for an FP8
    cache). ``head_size_v`` is ``head_size`` unless it is given. The other optional fields are None for layers without
    the feature. ``chunked_prefill_workspace_size`` applies to latent caches: the number of context tokens that a
    chunked prefill may gather at once (vLLM's builders derive it from their config). None leaves the choice to the
    backend.
    """

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    head_size_v: int = None  # type: ignore[assignment]  # filled in below, as in vLLM
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    chunked_prefill_workspace_size: int | None = None

    def __post_init__(self) -> None:
        given: object = self.head_size_v
        if given is None:
            object.__setattr__(self, "head_size_v", self.head_size)


class AttentionBackend(ABC):
    """Capabilities and factories of one kernel library; all members are static or class members.

    Backend selection relies on these declarations. One that claims too much gives wrong results; one that claims too
    little costs speed. The harness checks both directions.

    A class may declare in vLLM's form as well: :func:`~attncheck.backends.declarations.read_predicates` reads its
    ``supports_*`` methods when the class is created.
    """

    accept_output_buffer: ClassVar[bool] = False
    """If True, ``forward`` must be given ``output`` and writes into it.

    If False, ``forward`` may return a new tensor.
    """

    forward_includes_kv_cache_update: ClassVar[bool] = True
    """If False, ``do_kv_cache_update`` writes the new K/V; the harness calls it right before ``forward``."""

    features: ClassVar[frozenset[str]] = frozenset()
    """Supported features beyond plain causal attention, as names from ``attncheck.reference.spec.FEATURES``."""

    conventions: ClassVar[Conventions] = Conventions()
    """The backend's choices where correct backends differ."""

    supported_dtypes: ClassVar[Sequence[torch.dtype]] = (torch.float16, torch.bfloat16)
    """Supported dtypes of query, key, value and output."""

    supported_kv_cache_dtypes: ClassVar[Sequence[str]] = ("auto",)
    """Supported cache dtypes. ``auto`` is the layer's dtype, under either name."""

    registered_kv_cache_dtype: ClassVar[tuple[str, torch.dtype] | None] = None
    """Name and memory dtype of a cache dtype of its own, as a plugin gives them to vLLM's ``register_kv_cache_dtype``.

    Impl, builder and ``get_kv_cache_shape`` get this name in cases of ``kv_cache_dtype: registered``.
    """

    supported_layouts: ClassVar[tuple[str, ...]] = ("NHD",)
    """Supported memory orders of a page. A backend that reads the cache through its strides supports both."""

    supported_attn_types: ClassVar[Sequence[str]] = (AttentionType.DECODER,)

    supported_sinks_dtypes: ClassVar[tuple[str, ...]] = ("float16", "bfloat16", "float32")
    """Supported dtypes of ``sinks``, which are the layer's dtype and float32."""

    supported_devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    """Supported device types, as in ``torch.device.type``."""

    builder_only: ClassVar[bool] = False
    """Whether cases of attention drive the metadata builder alone; no impl is constructed for them."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        read_predicates(cls)

    @staticmethod
    @abstractmethod
    def get_name() -> str:
        """Return the backend's name: stable, unique, upper case."""
        raise NotImplementedError

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type[AttentionImpl[Any]]:
        """Return the impl class; one instance is constructed per layer."""
        raise NotImplementedError

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        """Return the metadata builder class; one instance is constructed per group of layers."""
        raise NotImplementedError

    @classmethod
    def get_kv_cache_shape(cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """Return the logical shape of one layer's cache.

        The default is vLLM's: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``, for each token its key, then
        its value; for a latent cache ``[num_blocks, block_size, head_size]``.

        Raise ``ValueError`` for a block size that the kernels do not support. A backend that declares ``head_size_v``
        accepts it as a keyword, which is passed only if it differs from ``head_size``. A backend that declares a cache
        of ``attncheck.reference.step_spec.ROW_FORMATS`` accepts its name as the keyword ``cache_dtype_str``, which is
        passed only for such a cache; the shape is then that of a tensor of bytes. The same holds for a registered
        cache, whose shape is that of a tensor of its own dtype.
        """
        packing: Packing = "latent" if cls.is_mla() else "content"
        return packed_shape(packing, num_blocks, block_size, num_kv_heads, head_size, head_size)

    @staticmethod
    def get_kv_cache_stride_order() -> tuple[int, ...]:
        """Return the physical order of the logical dimensions.

        The default raises ``NotImplementedError``; the harness then derives the order from the packing. An override may
        take ``cache_layout`` (``"NHD"`` or ``"HND"``). An override without that argument has a single layout.
        """
        raise NotImplementedError

    @staticmethod
    def get_metadata_cls() -> type[Any]:
        """Return the class of the objects that the builder returns."""
        return AttentionMetadata

    @classmethod
    def is_mla(cls) -> bool:
        """Return whether the backend serves only layers with a latent cache, with an :class:`MLAAttentionImpl`."""
        return False

    @classmethod
    def is_sparse(cls) -> bool:
        """Return whether the backend serves only layers with an indexer, whose steps have ``topk_indices``.

        A class that returns True declares the feature ``sparse``. A class that declares the feature alone serves other
        layers, too.
        """
        return False

    @classmethod
    def is_ssm(cls) -> bool:
        """Return whether the backend serves only layers with a state (:mod:`attncheck.backends.state`)."""
        return False

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        """Return (module, qualified name), the identity by which layers are grouped."""
        return (cls.__module__, cls.__qualname__)

    @classmethod
    def get_supported_dtypes(cls) -> list[torch.dtype]:
        """Return ``supported_dtypes``; override it if they depend on the library."""
        return list(cls.supported_dtypes)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return the supported head sizes; an empty list means any size."""
        return []

    @classmethod
    def get_supported_kernel_block_sizes(cls) -> list[int | MultipleOf]:
        """Return the page sizes that the kernels support, in tokens."""
        return [MultipleOf(1)]

    @classmethod
    def validate_head_size(cls, head_size: int) -> None:
        """Raise ``ValueError`` if ``head_size`` is not supported, naming it, the backend and the supported sizes."""
        supported = cls.get_supported_head_sizes()
        if supported and head_size not in supported:
            raise ValueError(f"head size {head_size} is not supported by {cls.get_name()}; supported: {supported}")

    @classmethod
    def unavailable_reasons(cls, device: str) -> list[str]:
        """Return why this backend cannot run on ``device``, such as ``"cuda:1"``; an empty list if it can."""
        kind = torch.device(device).type
        if kind in cls.supported_devices:
            return []
        return [f"device {device}: the backend runs on {', '.join(cls.supported_devices)}"]

    @classmethod
    def unavailable_case_reasons(cls, device: str, layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> list[str]:
        """Return why a supported case cannot be examined on ``device`` of this machine; an empty list if it can.

        Use this for faults of the machine rather than of the backend, such as those of an interpreter of kernels.
        """
        return []

    @classmethod
    def required_environment(cls, device: str) -> dict[str, str]:
        """Return the environment variables that must be set before Python starts, for the backend to run on ``device``.

        An example is ``TRITON_INTERPRET=1`` on a CPU, which Triton reads when a kernel is decorated. The harness starts
        the backend's process with these variables. If it examines the backend in the caller's own process, they must
        already be set.
        """
        return {}

    @classmethod
    def default_suite(cls, device: str) -> str:
        """Return the built-in suite to run on ``device`` if the user names none.

        ``interpreted`` is for backends whose kernels are interpreted there, and so run thousands of times slower.
        """
        return "smoke"

    @classmethod
    def unsupported_reasons(cls, layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> list[str]:
        """Return every reason, with value and limit, why this backend does not support the case.

        The backend must give the right result for the case if the list is empty. The default derives the reasons from
        the declarations. An override adds to ``super().unsupported_reasons(...)`` what the declarations cannot express.
        """
        return undeclared(cls, layer, cache, batch)

    @classmethod
    def kv_cache_codec(cls, layer: LayerSpec, cache: CacheSpec) -> KVCacheCodec | None:
        """Return the codec by which the harness writes and reads the cache, or None.

        If None, the harness derives the layout by observing the backend's own writer. The default detects the usual
        packings by calling ``get_kv_cache_shape`` with distinctive sizes. It returns None for other packings, and if
        the value head size differs from the head size. Override it to return None if the cache has a usual shape but
        another layout within. A cache of ``ROW_FORMATS`` is examined only with a codec; the default is
        :func:`~attncheck.backends.caches.row_codec.row_codec` for codes of eight bits. The codec of a registered cache
        is learned from the backend's own writer if None is returned.
        """
        return default_codec(cls, layer, cache)

    @classmethod
    def functions(cls) -> dict[str, Callable[..., Any]]:
        """Return the functions offered besides attention, keyed by name.

        Possible names are ``merge_attn_states``, ``causal_conv1d``, ``sparse_attn_indexer``, ``reshape_and_cache``,
        ``copy_blocks`` and ``swap_blocks``. Each has the signature of the function in :mod:`attncheck.reference`,
        without its ``precision``. Results have the dtype of the inputs (an LSE is float32), or a wider one. The paths
        ``merge``, ``causal_conv1d`` and ``indexer`` examine the first three, ``cache_write`` the others.
        """
        return {}

    @classmethod
    def version(cls) -> str:
        """Return the version under test: attncheck's for its own candidates, otherwise "" unless overridden."""
        return attncheck.__version__ if cls.__module__.startswith("attncheck.") else ""
