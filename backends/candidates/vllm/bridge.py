"""Candidates for vLLM's attention backend classes, such as ``vllm:CPU_ATTN``.

Their declarations and availability come from vLLM's class.
"""

import inspect
import sys
from typing import Any, ClassVar

import torch

from attncheck.backends import interpreter
from attncheck.backends.caches.codecs import KVCacheCodec
from attncheck.backends.candidates.vllm import interpreted, package
from attncheck.backends.candidates.vllm.builder import VLLMBuilder
from attncheck.backends.candidates.vllm.cache import cache_shape, kernel_block_sizes, layouts, stride_order
from attncheck.backends.candidates.vllm.declarations import VLLMDeclarations, declarations_of
from attncheck.backends.candidates.vllm.impl import VLLMImpl
from attncheck.backends.candidates.vllm.latent_bridge import LatentCache, VLLMLatentBuilder
from attncheck.backends.candidates.vllm.latent_impl import VLLMLatentImpl
from attncheck.backends.candidates.vllm.selection import is_state_space, select
from attncheck.backends.candidates.vllm.state_space import state_space_backend
from attncheck.backends.candidates.vllm.trial import missing_parts, refusals
from attncheck.backends.candidates.vllm.validation import configuration_problems
from attncheck.backends.contract import AttentionBackend, Conventions, MultipleOf
from attncheck.reference.spec import BatchSpec, CacheSpec, LayerSpec


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
        parts = {"their_backend": theirs, "__module__": __name__}
        is_latent = "mla" in found.features
        impl = type(
            f"{theirs.__name__}Impl",
            (VLLMLatentImpl if is_latent else VLLMImpl,),
            parts | {"brings_writer": found.has_writer},
        )
        builder = type(f"{theirs.__name__}Builder", (VLLMLatentBuilder if is_latent else VLLMBuilder,), parts)
        members = {
            "declared": found,
            # A latent layer writes before its forward. If this build has no writer, none is called.
            "forward_includes_kv_cache_update": not found.has_writer
            if is_latent
            else getattr(theirs, "forward_includes_kv_cache_update", True),
            "features": found.features,
            "conventions": Conventions(operand_strides="rows"),
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
        bases = (LatentCache, cls) if is_latent else (cls,)
        made = type(theirs.__name__, bases, parts | members)
        made.__doc__ = f"vLLM's {theirs.__module__}.{theirs.__qualname__}."
        return made

    @classmethod
    def get_kv_cache_shape(
        cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *, head_size_v: int | None = None
    ) -> tuple[int, ...]:
        """See the contract; the shape is that of vLLM's spec of the cache."""
        value_size = head_size if head_size_v is None else head_size_v
        return cache_shape(cls.their_backend, num_blocks, block_size, num_kv_heads, head_size, value_size)

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
        if cls.declared.layer_error:
            reasons = reasons or [cls.declared.layer_error]
        return reasons if reasons or cls.is_mla() else missing_parts(cls)

    @classmethod
    def unavailable_case_reasons(cls, device: str, layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> list[str]:
        """See the contract; faults of Triton's interpreter, and caches for which vLLM has no kernel on this CPU."""
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
        reasons += configuration_problems(cls.their_backend, layer, cache, refused=bool(reasons))
        return reasons or list(refusals(cls, layer, cache))

    @classmethod
    def kv_cache_codec(cls, layer: LayerSpec, cache: CacheSpec) -> KVCacheCodec | None:
        """Return None, so that the layout is learned from the backend's own writer.

        vLLM does not specify the layout within a page, and the shape does not determine it: the CPU backend transposes
        keys within a usual shape.
        """
        return None

    @classmethod
    def version(cls) -> str:
        """Return vLLM's version, marked if kernels are interpreted, or with the CPU instruction set of its kernels."""
        if _is_interpreted(cls.their_backend):
            return interpreter.marked(package.version())
        return ", ".join([package.version(), *_instruction_set(cls.their_backend)])


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
