"""Candidates for vLLM's attention backend classes, such as ``vllm:CPU_ATTN``.

Their declarations and availability come from vLLM's class.
"""

import inspect
import sys
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from attncheck.backends import interpreter
from attncheck.backends.caches.codecs import KVCacheCodec, default_codec
from attncheck.backends.caches.packings import packed_shape
from attncheck.backends.candidates.vllm import interpreted, package
from attncheck.backends.candidates.vllm.builder import VLLMBuilder, has_upper_bounds, their_metadata
from attncheck.backends.candidates.vllm.cache import cache_shape, kernel_block_sizes, layouts, stride_order
from attncheck.backends.candidates.vllm.config import their_config
from attncheck.backends.candidates.vllm.declarations import VLLMDeclarations, configuration_problems, declarations_of
from attncheck.backends.candidates.vllm.impl import VLLMImpl, VLLMLatentImpl
from attncheck.backends.candidates.vllm.interpreted import launches_triton
from attncheck.backends.candidates.vllm.layers import LatentSizes
from attncheck.backends.candidates.vllm.selection import is_state_space, named_after, select
from attncheck.backends.candidates.vllm.state import state_space_backend
from attncheck.backends.candidates.vllm.trial import missing_parts, refusals
from attncheck.backends.contract import (
    AttentionBackend,
    Conventions,
    KVCacheSpec,
    MultipleOf,
)
from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import FP8_CACHES, ROW_FORMATS, BatchSpec, CacheSpec, SpecDecodeOptions

_UNDEFINED: Mapping[str, str] = MappingProxyType(
    {
        "int4_per_token_head": "vLLM rotates a row and rounds it with a zero point, unlike attncheck's format",
        "nvfp4": "where vLLM's classes store the scales of groups is not known here",
    }
)
"""Caches that vLLM's classes may declare and attncheck does not examine there, and why."""


class VLLMBackend(AttentionBackend):
    """A backend of the installed vLLM; :meth:`from_argument` creates the class that can be driven."""

    accept_output_buffer = True
    their_backend: ClassVar[type[Any]]
    """vLLM's class."""

    declared: ClassVar[VLLMDeclarations]

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Return what vLLM's class declares; False if it has no such method."""
        return bool(getattr(cls.their_backend, "supports_device_cpu_query_lens_mismatch", bool)())

    @classmethod
    def from_argument(cls, argument: str) -> type[AttentionBackend]:
        """Return the candidate for a name of vLLM's, for ``module:Class``, or for ``path/to/file.py:Class``.

        Raises:
            ImportError: vLLM, or a library that the backend needs, cannot be imported.
            ValueError: no such class, or one that the bridge cannot drive.
        """
        theirs = select(argument)
        if is_state_space(theirs):
            return state_space_backend(theirs)
        found = declarations_of(theirs)
        is_latent = "mla" in found.features
        impl_base, builder_base = (VLLMLatentImpl, VLLMLatentBuilder) if is_latent else (VLLMImpl, VLLMBuilder)
        impl = named_after(theirs, impl_base, "Impl", {"brings_writer": found.has_writer})
        builder = named_after(theirs, builder_base, "Builder", {})
        members = {
            "declared": found,
            # A latent layer writes before its forward. If this build has no writer, none is called.
            "forward_includes_kv_cache_update": not found.has_writer
            if is_latent
            else getattr(theirs, "forward_includes_kv_cache_update", True),
            "features": found.features,
            "conventions": Conventions(
                operand_strides="rows",
                host_lens="upper_bound" if has_upper_bounds(their_metadata()) else "exact",
                cache_strides="blocks" if getattr(theirs, "indexes_kv_by_block_stride", bool)() else "pages",
                batch_invariant=not is_latent and _claims_batch_invariance(theirs),
            ),
            "supported_dtypes": found.dtypes,
            "supported_kv_cache_dtypes": found.kv_cache_dtypes,
            "supported_layouts": ("NHD", "HND") if is_latent else layouts(theirs),
            "supported_attn_types": found.attn_types,
            "supported_sinks_dtypes": found.sinks_dtypes,
            "supported_devices": (package.platform().device_type,),
            "get_name": staticmethod(theirs.get_name),
            "get_impl_cls": staticmethod(lambda: impl),
            "get_builder_cls": staticmethod(lambda: builder),
        }
        return named_after(theirs, VLLMLatentBackend if is_latent else cls, "", members)

    @classmethod
    def get_kv_cache_shape(
        cls,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        *,
        head_size_v: int | None = None,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """See the contract; the shape is that of vLLM's spec of the cache."""
        sizes = num_blocks, block_size, num_kv_heads, head_size, head_size if head_size_v is None else head_size_v
        return cache_shape(cls.their_backend, *sizes, cache_dtype_str)

    @classmethod
    def get_kv_cache_stride_order(cls, cache_layout: str = "NHD") -> tuple[int, ...]:
        """See the contract; the layouts are those that vLLM's class reads."""
        return stride_order(cls.their_backend, cache_layout)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """See the contract."""
        return list(cls.declared.head_sizes)

    @classmethod
    def get_supported_kernel_block_sizes(cls) -> list[int | MultipleOf]:
        """See the contract."""
        return kernel_block_sizes(cls.their_backend)

    @classmethod
    def unavailable_reasons(cls, device: str) -> list[str]:
        """See the contract; the reasons are vLLM's, or if it has none, those of a trial of a layer with one row."""
        reasons = _machine_reasons(cls.their_backend, device)
        if not cls.declared.kv_cache_dtypes:
            reasons = reasons or ["attncheck knows no dtype of its caches"]
        if cls.declared.layer_error:
            reasons = reasons or [cls.declared.layer_error]
        return reasons if reasons or cls.is_mla() else missing_parts(cls)

    @classmethod
    def unavailable_case_reasons(cls, device: str, layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> list[str]:
        """See the contract; faults of Triton's interpreter, and caches for which vLLM has no kernel on this CPU."""
        if cache.kv_cache_dtype in _UNDEFINED and layer.has_cache:
            return [f"kv_cache_dtype {cache.kv_cache_dtype}: {_UNDEFINED[cache.kv_cache_dtype]}"]
        if _is_interpreted(cls.their_backend):
            return interpreted.gaps(layer, cache)
        try:
            _instruction_set(cls.their_backend, cache.kv_cache_dtype)
        except NotImplementedError as error:
            return [f"kv_cache_dtype {cache.kv_cache_dtype}: {error}"]
        return []

    @classmethod
    def required_environment(cls, device: str) -> dict[str, str]:
        """See the contract; Triton kernels need a variable on a CPU."""
        return interpreter.required_environment(device) if _can_be_interpreted(cls.their_backend) else {}

    @classmethod
    def default_suite(cls, device: str) -> str:
        """See the contract; a small suite if kernels are interpreted."""
        return interpreter.default_suite(device) if _can_be_interpreted(cls.their_backend) else "smoke"

    @classmethod
    def unsupported_reasons(cls, layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> list[str]:
        """See the contract; adds the reasons of vLLM's own check of a configuration, or else of its constructors."""
        reasons = super().unsupported_reasons(layer, cache, batch)
        reasons += configuration_problems(cls.their_backend, layer, cache, batch, refused=bool(reasons))
        return reasons or list(refusals(cls, layer, cache))

    @classmethod
    def kv_cache_codec(cls, layer: LayerSpec, cache: CacheSpec) -> KVCacheCodec | None:
        """Return None, so that the layout is learned from the backend's own writer.

        vLLM does not specify the layout within a page, and the shape does not determine it: the CPU backend transposes
        keys within a usual shape. A cache that scales each row by itself has the layout of vLLM's Triton kernels.
        """
        return default_codec(cls, layer, cache) if cache.kv_cache_dtype in ROW_FORMATS else None

    @classmethod
    def version(cls) -> str:
        """Return vLLM's version, marked if kernels are interpreted, or with the CPU instruction set of its kernels.

        In vLLM's batch-invariant mode, it names the variable that selects the mode.
        """
        mode = ["VLLM_BATCH_INVARIANT=1"] if package.is_batch_invariant() else []
        if _is_interpreted(cls.their_backend):
            return ", ".join([interpreter.marked(package.version()), *mode])
        return ", ".join([package.version(), *_instruction_set(cls.their_backend), *mode])


def _claims_batch_invariance(their_backend: type[Any]) -> bool:
    """Return whether the class claims batch invariance in the mode of this process; without the mode, none does.

    Classes with a latent cache are left out by the caller: they also need the operators of torch that vLLM's worker
    replaces in this mode. attncheck does not replace them, since it computes the truth with them.
    """
    return package.is_batch_invariant() and bool(getattr(their_backend, "supports_batch_invariance", bool)())


def _machine_reasons(their_backend: type[Any], device: str) -> list[str]:
    """Return every known reason why ``their_backend`` cannot run on ``device`` with the installed vLLM."""
    kind, platform = torch.device(device).type, package.platform()
    if platform.device_type != kind:
        return [f"device {device}: vLLM {package.version()} is built for {platform.device_type or 'no device'} here"]
    found = package.platform().get_device_capability()
    reasons = _capability_reasons(their_backend, found)
    if interpreted.launches_triton(their_backend) and (found is not None or not reasons):
        reasons += interpreted.missing_triton()
    return reasons


def _instruction_set(their_backend: type[Any], kv_cache_dtype: str = "auto") -> tuple[str, ...]:
    """Return the code path that vLLM's own function, if there is one, chooses for a bfloat16 layer on this CPU.

    Raises:
        NotImplementedError: this CPU lacks the instructions for a cache of ``kv_cache_dtype``.
    """
    modules = (vars(sys.modules[kind.__module__]) for kind in their_backend.get_builder_cls().__mro__)
    choose = next((names["_get_attn_isa"] for names in modules if "_get_attn_isa" in names), None)
    if choose is None:
        return ()
    takes_dtype = "kv_cache_dtype" in inspect.signature(choose).parameters  # not in older versions
    return (str(choose(torch.bfloat16, 32, 64, **({"kv_cache_dtype": kv_cache_dtype} if takes_dtype else {}))),)


def _capability_reasons(their_backend: type[Any], found: Any) -> list[str]:
    """Return why vLLM's class cannot run on a GPU of capability ``found``, which is None if there is no GPU."""
    supports = getattr(their_backend, "supports_compute_capability", None)
    if supports is None:
        return []
    try:
        # Without a GPU, query the lowest capability: a class that needs a GPU does not support it.
        is_supported = bool(supports(found or package.lowest_capability()))
    except Exception as error:  # noqa: BLE001 (someone else's code, which queries the drivers of its platform)
        return [f"supports_compute_capability of vLLM's class raised {type(error).__name__}: {error}"]
    if is_supported:
        return []
    here = "there is none" if found is None else f"this one has {found.as_version_str()}"
    return [f"vLLM's class names the compute capabilities of GPUs that it supports, and {here}"]


def _can_be_interpreted(their_backend: type[Any]) -> bool:
    """Return whether the backend uses Triton kernels, and by its own declaration needs no GPU."""
    return interpreted.launches_triton(their_backend) and not _capability_reasons(their_backend, None)


def _is_interpreted(their_backend: type[Any]) -> bool:
    """Return whether Triton's interpreter runs the backend's kernels in this process."""
    return interpreter.is_interpreted() and _can_be_interpreted(their_backend)


class VLLMLatentBuilder(VLLMBuilder):
    """The builder of a latent backend of vLLM's."""

    @classmethod
    def their_config(cls, plain: Any, layers: Mapping[str, Any], spec: KVCacheSpec) -> Any:
        """Return the config of a model whose layers have the sizes of ``layers``, or rows of ``spec.head_size``."""
        found = [LatentSizes.of(layer) for layer in layers.values()]
        sizes = found[0] if found else LatentSizes.of_row(spec.head_size)
        return their_config(plain, layers, model=sizes.model())

    @classmethod
    def their_builder(cls, spec: KVCacheSpec) -> type[Any]:
        """Return the class of vLLM's builder, with the prefill workspace of ``spec`` rounded up to whole pages.

        If ``spec`` has none, vLLM derives it from the config: thousands of rows, also whole pages.
        """
        theirs = super().their_builder(spec)
        rows = spec.chunked_prefill_workspace_size
        if rows is None:
            return theirs
        whole = -(-rows // spec.block_size) * spec.block_size
        members = {"determine_chunked_prefill_workspace_size": staticmethod(lambda _config: whole)}
        return type(theirs.__name__, (theirs,), members | {"__module__": theirs.__module__})


class VLLMLatentBackend(VLLMBackend):
    """A backend of the installed vLLM for layers with a latent cache, such as ``vllm:CPU_MLA``.

    vLLM's ``[blocks, 1, block size, row]`` becomes ``[blocks, block size, row]`` for its layer, which has one layout.
    """

    @classmethod
    def is_mla(cls) -> bool:
        """See the contract."""
        return True

    @classmethod
    def get_kv_cache_shape(
        cls,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        *,
        head_size_v: int | None = None,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """See the contract."""
        if num_kv_heads != 1:
            raise ValueError(f"num_kv_heads {num_kv_heads}: a latent cache has one")
        cache_shape(cls.their_backend, num_blocks, block_size, 1, head_size, head_size)  # refuses unsupported pages
        return packed_shape("latent", num_blocks, block_size, 1, head_size, head_size)

    @classmethod
    def unsupported_reasons(cls, layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> list[str]:
        """See the contract; also refuse batches that vLLM's runner never builds for such a layer here."""
        reasons = super().unsupported_reasons(layer, cache, batch)
        if layer.mla is None:
            return reasons
        is_decode, on_cpu = _is_decode(batch, cls.their_backend.get_builder_cls()), package.platform().is_cpu()
        has_graphs = not on_cpu or launches_triton(cls.their_backend)
        reasons += _padding_reasons(batch, is_decode, has_graphs=has_graphs)
        if not (layer.is_causal or _is_uniform(batch)):
            reasons.append("causal false with rows of several lengths: vLLM's blocks without a causal mask have one")
        return reasons

    @classmethod
    def unavailable_case_reasons(cls, device: str, layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> list[str]:
        """See the contract. If no interpreted kernel writes the cache, its FP8 dtype is no reason."""
        dtype = cache.kv_cache_dtype
        if dtype not in FP8_CACHES or dtype not in cls.supported_kv_cache_dtypes:
            return super().unavailable_case_reasons(device, layer, cache, batch)
        known = cache if cls.get_impl_cls().brings_writer else replace(cache, kv_cache_dtype="auto")
        reasons = super().unavailable_case_reasons(device, layer, known, batch)
        is_decode = _is_decode(batch, cls.their_backend.get_builder_cls())
        if package.platform().is_cpu() and not is_decode and any(request.context_len > 0 for request in batch):
            reasons = [*reasons, f"kv_cache_dtype {dtype}: a CPU build of vLLM gathers no context of codes for prompts"]
        return reasons

    @classmethod
    def kv_cache_codec(cls, layer: LayerSpec, cache: CacheSpec) -> KVCacheCodec | None:
        """Return None, so that the layout is learned from the backend's writer; without one, the usual latent codec."""
        return None if cls.get_impl_cls().brings_writer else default_codec(cls, layer, cache)

    @classmethod
    def get_kv_cache_stride_order(cls, cache_layout: str = "NHD") -> tuple[int, ...]:
        """See the contract."""
        return (0, 1, 2)


def _is_uniform(batch: BatchSpec) -> bool:
    return len({request.query_len for request in batch}) == 1


def _is_decode(batch: BatchSpec, builder: type[Any]) -> bool:
    """Return whether vLLM's ``builder`` treats all requests as decodes: all of one length, at most 1 + drafts."""
    path = batch.path.options
    takes_drafts = getattr(getattr(builder, "query_len_support", None), "name", "SINGLE_ONLY") != "SINGLE_ONLY"
    drafts = path.num_speculative_tokens if isinstance(path, SpecDecodeOptions) and takes_drafts else 0
    return _is_uniform(batch) and batch.max_query_len <= 1 + drafts


def _padding_reasons(batch: BatchSpec, is_decode: bool, *, has_graphs: bool) -> list[str]:
    """Return why no step of vLLM's has the padding of ``batch``.

    Full graphs hold only decodes, one request per ``max_query_len`` rows. ``has_graphs``: the pieces between the calls
    of a backend may be graphs, whose padding rows no metadata count.
    """
    padding, reasons = batch.padding, []
    if (padding.requests or padding.tokens) and not (
        is_decode and padding.tokens == padding.requests * batch.max_query_len
    ):
        reasons.append(
            f"{padding.requests} padding requests and {padding.tokens} padding tokens: vLLM pads decodes of one length "
            "alone, a request for each"
        )
    if (padding.unmapped_tokens or padding.key_rows) and not has_graphs:
        reasons.append("rows that no slot is for: vLLM's runner pads no rows on a CPU")
    return reasons
