"""Wraps a plain attention function as a backend class.

>>> def attend(query, key_cache, value_cache, metadata, params, out): ...
>>> MyKernel = kernel_backend(attend, name="my_kernel", features=("sliding_window",))
>>> MyKernel.get_name(), MyKernel.get_impl_cls().brings_writer
('MY_KERNEL', False)

The wrapper raises for every feature missing from ``features``, before it calls the function.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from attncheck.backends.contract import (
    AttentionCGSupport,
    AttentionLayer,
    AttentionType,
)
from attncheck.backends.conventions import Conventions
from attncheck.backends.declarations import MultipleOf
from attncheck.backends.paged import PagedBackend, PagedImpl
from attncheck.backends.paged_metadata import PagedBuilder, PagedMetadata
from attncheck.errors import UnknownNameError
from attncheck.reference.attention.params import LayerParams
from attncheck.reference.spec import FEATURES
from attncheck.reference.step_spec import FP8_CACHES

Kernel = Callable[..., object]
Writer = Callable[..., object]

_KERNEL_ARGUMENTS = ("query", "key_cache", "value_cache", "metadata", "params", "out")
_KERNEL_OPTIONS = ("q_scale", "k_scale", "v_scale", "output_lse", "output_scale")
_WRITER_ARGUMENTS = ("key", "value", "key_cache", "value_cache", "slot_mapping")
_WRITER_OPTIONS = ("k_scale", "v_scale")
_CACHED_TYPES = tuple(kind for kind in AttentionType if kind.has_cache)


@dataclass(frozen=True, eq=False)
class KernelParams(LayerParams):
    """The parameters of one layer for one step, as a function gets them.

    The fields are those of :class:`~attncheck.reference.attention.params.AttentionParams`, except that the numbers of
    each head are tensors on the device. They are made once a layer, so that a captured graph can read them.

    alibi_slopes: float32 ``[num_heads]``, or None.
    sinks: ``[num_heads]``, or None; float32 or the layer's dtype, as vLLM passes them.
    """

    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None


def kernel_backend(
    fn: Kernel,
    *,
    name: str,
    features: Iterable[str] = (),
    supported_dtypes: Sequence[torch.dtype] = (torch.float16, torch.bfloat16, torch.float32),
    supported_head_sizes: Sequence[int] = (),
    supported_block_sizes: Sequence[int | MultipleOf] = (MultipleOf(1),),
    supported_layouts: Sequence[str] = ("NHD",),
    supported_attn_types: Sequence[str] = (AttentionType.DECODER,),
    supported_kv_cache_dtypes: Sequence[str] = ("auto",),
    supported_devices: Sequence[str] = ("cpu", "cuda"),
    writer: Writer | None = None,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    conventions: Conventions | None = None,
    cudagraph_support: AttentionCGSupport = AttentionCGSupport.NEVER,
    version: str = "",
) -> type[PagedBackend]:
    """Return a backend class whose ``forward`` calls ``fn``; a keyword left out has the contract's default.

    ``fn(query, key_cache, value_cache, metadata, params, out)`` is called by position with

    - query: ``[T, num_heads, head_size]``; rows from ``metadata.query_start_loc[-1]`` on are padding;
    - key_cache, value_cache: logical views ``[blocks, block size, num_kv_heads, head size]`` of the pool, strided. They
      already hold the new K/V. With an FP8 cache they have a float8 dtype;
    - metadata: the ``CommonAttentionMetadata`` of the step;
    - params: the layer's :class:`KernelParams`, with the step's ``causal``; the window is mirrored if that is False;
    - out: ``[T, num_heads, value head size]``, which the function writes in place.

    These keywords are passed if the signature of ``fn`` has them: ``k_scale`` and ``v_scale`` (float32 tensors);
    ``q_scale``, together with the feature ``fp8_query`` (float32, one element or one per KV head; without effect on a
    query that is no codes); ``output_lse`` (float32 ``[T, num_heads]``, written in place), together with the feature
    ``lse``; ``output_scale``, together with the feature ``output_quant`` (float32; a code times it is the value; None
    if ``out`` takes no codes).
    The memory of ``output_lse`` is laid out as that of ``out``: the heads may precede the tokens.

    ``writer(key, value, key_cache, value_cache, slot_mapping)``, with the same optional scales, stores the new rows.
    Without a writer the harness stores them, and the cache is not examined. The class's ``functions()`` returns
    ``functions``. The function reads a paged cache, so encoder layers are not supported.

    ``cudagraph_support`` declares that a captured CUDA graph of the function (and of ``writer``) stays right for the
    batches of that level. A replay runs no Python: the tensors of ``metadata``, the rows and the slots are refilled in
    place. So read lengths, tables and slots from these tensors on the device; values read from the ``_cpu`` twins are
    frozen. ``num_reqs``, ``num_actual_tokens`` and every shape keep their values of the capture, when ``max_query_len``
    and ``max_seq_len`` were upper bounds. Captured code must not wait for the device (``.item()``, ``.tolist()``,
    ``.cpu()``), copy from the host, or create shapes that depend on contents (``nonzero``, a bool index). Padding
    requests have length 0, and their rows may hold anything and are ignored. A slot of -1 writes nothing.

    Raises:
        ValueError: declarations that contradict each other, or a signature that cannot be called like this.
        TypeError: ``features`` is a string, or ``cudagraph_support`` is no :class:`AttentionCGSupport`.
    """
    if isinstance(features, str):
        raise TypeError(f"kernel_backend {name!r}: features is the text {features!r}; give a tuple of names")
    level: object = cudagraph_support  # the code that declares it may not be type-checked
    if not isinstance(level, AttentionCGSupport):
        levels = ", ".join(AttentionCGSupport.__members__)
        raise TypeError(
            f"kernel_backend {name!r}: cudagraph_support is {level!r}; give an AttentionCGSupport: {levels}"
        )
    declared, options = frozenset(features), _options(fn, _KERNEL_ARGUMENTS, _KERNEL_OPTIONS)
    _check_declarations(name, declared, options, supported_attn_types, supported_kv_cache_dtypes)
    label, offered = name.upper(), dict(functions or {})
    own: dict[str, Any] = {"__module__": getattr(fn, "__module__", __name__)}
    members: dict[str, Any] = {
        "__doc__": inspect.getdoc(fn),
        "features": declared,
        "conventions": conventions or Conventions(),
        "supported_dtypes": tuple(supported_dtypes),
        "supported_layouts": tuple(supported_layouts),
        "supported_attn_types": tuple(supported_attn_types),
        "supported_kv_cache_dtypes": tuple(supported_kv_cache_dtypes),
        "supported_devices": tuple(supported_devices),
        "supported_head_sizes": tuple(supported_head_sizes),
        "supported_block_sizes": tuple(supported_block_sizes),
        "get_name": staticmethod(lambda: label),
        "get_impl_cls": staticmethod(lambda: impl),
        "get_builder_cls": staticmethod(lambda: builder),
        "functions": staticmethod(lambda: dict(offered)),
        "version": staticmethod(lambda: version),
    }
    backend = type(name, (PagedBackend,), own | members)
    metadata = type(f"{name}.Metadata", (PagedMetadata,), own)
    of_impl = {
        "backend": backend,
        "metadata_cls": metadata,
        "brings_writer": writer is not None,
        "kernel": staticmethod(fn),
        "kernel_options": options,
        "writing_kernel": staticmethod(writer or fn),
        "writer_options": () if writer is None else _options(writer, _WRITER_ARGUMENTS, _WRITER_OPTIONS),
    }
    impl = type(f"{name}.Impl", (KernelImpl,), own | of_impl)
    of_builder = {
        "backend": backend,
        "metadata_cls": metadata,
        "has_exact_lens": False,  # the function reads the lengths itself, so `build` need not wait for them
        "cudagraph_support": cudagraph_support,
    }
    builder = type(f"{name}.Builder", (PagedBuilder,), own | of_builder)
    return backend


class KernelImpl(PagedImpl):
    """One layer, whose steps call the function.

    Functions are called through these attributes, so that a derived class can record the calls.
    """

    kernel: ClassVar[Kernel]
    kernel_options: ClassVar[tuple[str, ...]]
    writing_kernel: ClassVar[Writer]
    writer_options: ClassVar[tuple[str, ...]]

    def write(
        self,
        layer: AttentionLayer,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        if not self.brings_writer:
            raise RuntimeError(f"{self.backend.get_name()} has no cache writer")
        self.writing_kernel(key, value, key_cache, value_cache, slot_mapping, **_scales(layer, self.writer_options))

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        caches: tuple[Tensor, Tensor] | None,
        metadata: PagedMetadata,
        output: Tensor,
        output_lse: Tensor | None,
    ) -> None:
        self.attend_quantised(layer, query, key, value, caches, metadata, output, output_lse, None)

    def attend_quantised(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        caches: tuple[Tensor, Tensor] | None,
        metadata: PagedMetadata,
        output: Tensor,
        output_lse: Tensor | None,
        output_scale: Tensor | None,
    ) -> None:
        """Call the function, which stores the codes itself; without ``output_scale`` it writes values."""
        if caches is None:
            label = self.backend.get_name()
            raise NotImplementedError(f"{label} reads a paged cache; attn_type {self.attn_type} has none")
        extra: dict[str, Tensor | None] = dict(_scales(layer, self.kernel_options))
        if "output_scale" in self.kernel_options:
            extra["output_scale"] = output_scale
        if "output_lse" in self.kernel_options:
            if output_lse is None:
                output_lse = query.new_empty((query.shape[0], self.num_heads), dtype=torch.float32)
            extra["output_lse"] = output_lse
        params = self.params(metadata)
        numbers = {each.name: getattr(params, each.name) for each in fields(LayerParams)}
        given = KernelParams(**numbers, alibi_slopes=self.slopes_on(query.device), sinks=self.given_sinks)
        returned = self.kernel(query, *caches, metadata.common, given, output, **extra)
        self.ignored_result = _ignored_result(self.kernel, returned, output)


def _ignored_result(fn: Kernel, returned: object, output: Tensor) -> str:
    """Return a text on what ``fn`` returned instead of writing ``output``; "" if it returned None or ``output``."""
    if returned is None or returned is output:
        return ""
    kind = f"tensor of shape {list(returned.shape)}" if isinstance(returned, Tensor) else type(returned).__name__
    return f"{getattr(fn, '__name__', 'the function')} returned a {kind}, which is ignored: write the result into `out`"


def _scales(layer: AttentionLayer, options: Sequence[str]) -> dict[str, Tensor]:
    found = {"q_scale": layer._q_scale, "k_scale": layer._k_scale, "v_scale": layer._v_scale}
    return {name: scale for name, scale in found.items() if name in options}


def _options(fn: Callable[..., object], arguments: Sequence[str], options: Sequence[str]) -> tuple[str, ...]:
    """Return the optional keywords that ``fn`` accepts; raise ``ValueError`` if it cannot be called at all."""
    signature = inspect.signature(fn)
    taken = tuple(option for option in options if option in signature.parameters)
    try:
        signature.bind(*arguments, **dict.fromkeys(taken))
    except TypeError as error:
        name = getattr(fn, "__name__", repr(fn))
        raise ValueError(
            f"{name}{signature} cannot be called with ({', '.join(arguments)}) by position"
            f"{''.join(f', {option}=' for option in taken)}: {error}"
        ) from None
    return taken


def _check_declarations(
    name: str,
    features: frozenset[str],
    options: Sequence[str],
    attn_types: Sequence[str],
    kv_cache_dtypes: Sequence[str],
) -> None:
    wrong = [str(UnknownNameError("feature", feature, list(FEATURES))) for feature in sorted(features - set(FEATURES))]
    for feature, parameter in (("fp8_query", "q_scale"), ("lse", "output_lse"), ("output_quant", "output_scale")):
        if (parameter in options) != (feature in features):
            wrong.append(f"the feature {feature!r} needs a parameter {parameter}, and the parameter needs the feature")
    codes = [dtype for dtype in kv_cache_dtypes if dtype in FP8_CACHES]
    if bool(codes) != ("fp8_kv" in features):
        wrong.append(
            "the feature 'fp8_kv' needs an FP8 dtype in supported_kv_cache_dtypes, and the dtype needs the feature"
        )
    if "tree" in features:
        wrong.append("a function does not get the tree ('tree'): derive a backend; its builder gets it")
    wrong += [
        f"a function does not get the metadata of {feature!r}: derive a backend; its builder gets them"
        for feature in sorted(features & {"mm_prefix", "rswa"})
    ]
    if "mla" in features:
        wrong.append("a function over keys and values cannot serve a latent cache ('mla')")
    wrong += [f"attn_type {kind} has no paged cache" for kind in attn_types if kind not in _CACHED_TYPES]
    if wrong:
        raise ValueError(f"kernel_backend {name!r}: {'; '.join(wrong)}")
