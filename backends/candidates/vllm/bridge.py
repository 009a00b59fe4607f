"""``vllm:CPU_ATTN`` and its like: a class of vLLM's as a candidate.

What it declares, and where it can run, are taken from what vLLM says of the class.
"""

from typing import Any, ClassVar, cast

import torch

from attncheck.backends import interpreter
from attncheck.backends.caches.codecs import KVCacheCodec
from attncheck.backends.caches.packings import allocate_kv_cache
from attncheck.backends.candidates.vllm import interpreted, package
from attncheck.backends.candidates.vllm.builder import VLLMBuilder
from attncheck.backends.candidates.vllm.cache import cache_shape, kernel_block_sizes, layouts, stride_order
from attncheck.backends.candidates.vllm.config import plain_config
from attncheck.backends.candidates.vllm.declarations import VLLMDeclarations, declarations_of
from attncheck.backends.candidates.vllm.impl import VLLMImpl
from attncheck.backends.candidates.vllm.selection import select
from attncheck.backends.candidates.vllm.validation import configuration_problems
from attncheck.backends.contract import AttentionBackend, MultipleOf
from attncheck.backends.dtypes import DTYPES
from attncheck.backends.impl import set_current_vllm_config
from attncheck.reference.spec import BatchSpec, CacheSpec, DType, LayerSpec, Layout

_ABSENT = "'_OpNamespace'"
"""Of the message with which torch answers for an operator that no library has registered."""


class VLLMBackend(AttentionBackend):
    """A backend of the installed vLLM; :meth:`from_argument` makes the class that can be driven."""

    accept_output_buffer = True
    their_backend: ClassVar[type[Any]]
    """vLLM's class."""

    declared: ClassVar[VLLMDeclarations]

    @classmethod
    def from_argument(cls, argument: str) -> "type[VLLMBackend]":
        """The candidate for a name of vLLM's, for ``module:Class``, or for ``path/to/file.py:Class``.

        Raises:
            ImportError: vLLM, or a library that the backend needs, cannot be imported.
            ValueError: no such class, or one that the bridge cannot drive.
        """
        theirs = select(argument)
        found = declarations_of(theirs)
        parts = {"their_backend": theirs, "__module__": __name__}
        impl = type(f"{theirs.__name__}Impl", (VLLMImpl,), parts)
        builder = type(f"{theirs.__name__}Builder", (VLLMBuilder,), parts)
        members = {
            "declared": found,
            "forward_includes_kv_cache_update": getattr(theirs, "forward_includes_kv_cache_update", True),
            "features": found.features,
            "supported_kv_cache_dtypes": found.kv_cache_dtypes,
            "supported_layouts": layouts(theirs),
            "supported_attn_types": found.attn_types,
            "supported_devices": (package.platform().device_type,),
            "get_name": staticmethod(theirs.get_name),
            "get_impl_cls": staticmethod(lambda: impl),
            "get_builder_cls": staticmethod(lambda: builder),
        }
        made = type(theirs.__name__, (cls,), parts | members)
        made.__doc__ = f"vLLM's {theirs.__module__}.{theirs.__qualname__}."
        return made

    @classmethod
    def get_kv_cache_shape(
        cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *, head_size_v: int | None = None
    ) -> tuple[int, ...]:
        """See the contract; of vLLM's spec of the cache."""
        value_size = head_size if head_size_v is None else head_size_v
        return cache_shape(cls.their_backend, num_blocks, block_size, num_kv_heads, head_size, value_size)

    @classmethod
    def get_kv_cache_stride_order(cls, cache_layout: str = "NHD") -> tuple[int, ...]:
        """See the contract; of the layouts that vLLM's class reads."""
        return stride_order(cls.their_backend, cache_layout)

    @classmethod
    def get_supported_dtypes(cls) -> list[torch.dtype]:
        """See the contract."""
        return list(cls.declared.dtypes)

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
        """See the contract; what vLLM says of the machine, else what a plain layer and its writer say here."""
        reasons = _machine_reasons(cls.their_backend, device)
        if cls.declared.layer_error:
            reasons = reasons or [cls.declared.layer_error]
        return reasons or missing_operators(cls)

    @classmethod
    def unavailable_case_reasons(cls, device: str, layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> list[str]:
        """See the contract; what Triton's interpreter would get wrong in the backend's place."""
        return interpreted.gaps(layer, cache) if _is_interpreted(cls.their_backend) else []

    @classmethod
    def required_environment(cls, device: str) -> dict[str, str]:
        """See the contract; a variable of Triton's, for kernels of Triton on a CPU."""
        return interpreter.required_environment(device) if interpreted.launches_triton(cls.their_backend) else {}

    @classmethod
    def default_suite(cls, device: str) -> str:
        """See the contract; a small one where kernels are interpreted."""
        return interpreter.default_suite(device) if interpreted.launches_triton(cls.their_backend) else "smoke"

    @classmethod
    def unsupported_reasons(cls, layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> list[str]:
        """See the contract; what the declarations say, and what vLLM's own check of a configuration says besides."""
        reasons = super().unsupported_reasons(layer, cache, batch)
        return [*reasons, *configuration_problems(cls.their_backend, layer, cache, told=bool(reasons))]

    @classmethod
    def kv_cache_codec(cls, layer: LayerSpec, cache: CacheSpec) -> KVCacheCodec | None:
        """None, so that the backend's own writer is watched: vLLM says nowhere what lies where in a page.

        A shape says nothing: keys of the CPU's cache are transposed within one that a usual packing has.
        """
        return None

    @classmethod
    def version(cls) -> str:
        """Of vLLM; it tells where its kernels are interpreted."""
        return interpreter.marked(package.version()) if _is_interpreted(cls.their_backend) else package.version()


def missing_operators(backend: type[VLLMBackend]) -> list[str]:
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


def _write_a_row(backend: type[VLLMBackend], layer: LayerSpec, cache: CacheSpec) -> None:
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


def _machine_reasons(their_backend: type[Any], device: str) -> list[str]:
    """Return every known reason why ``their_backend`` cannot run on ``device`` with the installed vLLM."""
    kind, platform = torch.device(device).type, package.platform()
    if platform.device_type != kind:
        return [f"device {device}: vLLM {package.version()} is built for {platform.device_type or 'no device'} here"]
    reasons = []
    capability = platform.get_device_capability()
    supports = getattr(their_backend, "supports_compute_capability", None)
    # Without a GPU there is none to compare: a class that needs one does not support the lowest.
    if supports is not None and not supports(capability or package.lowest_capability()):
        found = "there is none" if capability is None else f"this one has {capability.as_version_str()}"
        reasons.append(f"vLLM's class names the compute capabilities of GPUs that it supports, and {found}")
    if interpreted.launches_triton(their_backend):
        reasons += interpreted.missing_triton()
    return reasons


def _is_interpreted(their_backend: type[Any]) -> bool:
    """Return whether the backend's kernels run by Triton's interpreter in this process."""
    return interpreter.is_interpreted() and interpreted.launches_triton(their_backend)
