"""Checks the form of a backend class when it is loaded, and lists every problem at once.

Members, signatures and declarations are checked by inspection; nothing is computed.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import chain
from typing import Any, get_args

import torch

from attncheck.backends.contract import AttentionBackend, AttentionImpl, AttentionMetadataBuilder, MLAAttentionImpl
from attncheck.backends.conventions import Conventions
from attncheck.backends.declarations import unread_declarations
from attncheck.backends.impl import MLA_KEYWORDS, LayerArguments
from attncheck.backends.state import StateBackend, StateImpl
from attncheck.errors import UnknownNameError
from attncheck.reference.spec import FEATURES, AttentionCGSupport, AttentionType, DType
from attncheck.reference.step_spec import KVCacheDType, Layout

_FORWARD = ("layer", "query", "key", "value", "kv_cache", "attn_metadata")

_STATE_LAYER = ("rule", "num_heads", "num_kv_heads", "head_size", "head_size_v", "scale", "qk_l2norm")
_STATE_FORWARD = ("layer", "inputs", "states", "attn_metadata", "output")

_CONVOLUTION = ("x", "weight", "bias", "conv_states", "query_start_loc", "cache_indices", "has_initial_state")
_INDEXER = (
    *("query", "weights", "key", "index_cache", "block_table"),
    *("seq_lens", "query_start_loc", "slot_mapping"),
)
_FUNCTIONS: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "merge_attn_states": (("out_a", "lse_a", "out_b", "lse_b"), ()),
    "causal_conv1d": (_CONVOLUTION, ("activation", "pad_id")),
    "sparse_attn_indexer": (_INDEXER, ("index_topk",)),
    "reshape_and_cache": (("key", "value", "key_cache", "value_cache", "slot_mapping"), ("k_scale", "v_scale")),
    "copy_blocks": (("caches", "mapping"), ()),
    "swap_blocks": (("src", "dst", "mapping"), ()),
}
"""The possible names in ``functions()``, with the positional and the keyword arguments of their calls."""


def contract_problems(backend: type[AttentionBackend]) -> list[str]:
    """Return every way in which ``backend`` breaks the form of the contract; an empty list if it can be driven.

    An ``ImportError`` from ``functions`` or a factory is raised to the caller: it means that the library is missing.
    """
    parts = (_declaration_problems(backend), _function_problems(backend), _part_problems(backend))
    return [*_missing(backend, "backend"), *chain.from_iterable(parts)]


def _declaration_problems(backend: type[AttentionBackend]) -> Iterator[str]:
    for attribute, allowed in (
        ("features", FEATURES),
        ("supported_layouts", get_args(Layout)),
        ("supported_attn_types", [str(kind) for kind in AttentionType]),
        ("supported_kv_cache_dtypes", get_args(KVCacheDType)),
        ("supported_sinks_dtypes", get_args(DType)),
    ):
        given, kinds = getattr(backend, attribute), (set, frozenset) if attribute == "features" else (tuple, list)
        if not isinstance(given, kinds):
            yield f"{attribute} is a {type(given).__name__}, not a {kinds[1].__name__} of names"
            continue
        for name in sorted({str(name) for name in given} - set(allowed)):
            yield f"{attribute}: {UnknownNameError('name', name, allowed)}"
    own: object = backend.registered_kv_cache_dtype
    if own is not None and not (isinstance(own, tuple) and list(map(type, own)) == [str, torch.dtype]):
        yield f"registered_kv_cache_dtype is {own!r}, not a name and a torch.dtype"
    conventions: object = backend.conventions
    if not isinstance(conventions, Conventions):
        yield f"conventions is a {type(conventions).__name__}, not a Conventions"
    yield from unread_declarations(backend)
    yield from _no_text(backend, "get_name")
    yield from _no_text(backend, "version")
    features = _declared_features(backend)
    value_size = ("head_size_v",) if "head_size_v" in features else ()
    shape_arguments = ("num_blocks", "block_size", "num_kv_heads", "head_size")
    yield from _uncallable(backend.get_kv_cache_shape, "get_kv_cache_shape", shape_arguments, value_size)
    yield from _uncallable(backend.unavailable_reasons, "unavailable_reasons", ("device",))
    yield from _uncallable(
        backend.unavailable_case_reasons, "unavailable_case_reasons", ("device", "layer", "cache", "batch")
    )
    yield from _uncallable(backend.required_environment, "required_environment", ("device",))
    yield from _uncallable(backend.unsupported_reasons, "unsupported_reasons", ("layer", "cache", "batch"))
    yield from _uncallable(backend.kv_cache_codec, "kv_cache_codec", ("layer", "cache"))


def _function_problems(backend: type[AttentionBackend]) -> Iterator[str]:
    try:
        offered: object = backend.functions()
    except ImportError:
        raise
    except Exception as error:  # noqa: BLE001 (someone else's code: whatever it raises is the finding)
        yield f"functions() raised {type(error).__name__}: {error}"
        return
    if not isinstance(offered, dict):
        yield f"functions() returned a {type(offered).__name__}, not a dict of functions by name"
        return
    for name, function in offered.items():
        if name not in _FUNCTIONS:
            yield f"functions(): {UnknownNameError('function', str(name), list(_FUNCTIONS))}"
        elif not callable(function):
            yield f"functions() has {function!r} as {name}, which cannot be called"
        else:
            yield from _uncallable(function, name, *_FUNCTIONS[name])


def _part_problems(backend: type[AttentionBackend]) -> Iterator[str]:
    """Yield problems of the impl and the builder, as far as the factories return them."""
    features = _declared_features(backend)
    base = StateImpl if issubclass(backend, StateBackend) else AttentionImpl
    impl = _part(backend, "get_impl_cls", base)
    if isinstance(impl, str):
        yield impl
    elif impl is not None and base is StateImpl:
        yield from _missing(impl, "impl")
        yield from _uncallable(impl.__init__, f"{impl.__name__}.__init__", ("self",), _STATE_LAYER)
        yield from _uncallable(impl.forward, f"{impl.__name__}.forward", ("self", *_STATE_FORWARD))
    elif impl is not None:
        yield from _missing(impl, "impl")
        positional = ["self", *(argument.name for argument in fields(LayerArguments) if not argument.kw_only)]
        given_when_declared: list[str] = [name for name in ("sinks", "head_size_v") if name in features]
        if "mla" in features or issubclass(impl, MLAAttentionImpl):
            given_when_declared += MLA_KEYWORDS
        yield from _uncallable(impl.__init__, f"{impl.__name__}.__init__", positional, given_when_declared)
        options = ["output"]
        options += ["output_lse"] if "lse" in features else []
        options += ["output_scale", "output_block_scale"] if "output_quant" in features else []
        yield from _uncallable(impl.forward, f"{impl.__name__}.forward", ("self", *_FORWARD), options)
        separate = not backend.forward_includes_kv_cache_update
        if separate and impl.do_kv_cache_update is AttentionImpl.do_kv_cache_update:
            yield f"forward_includes_kv_cache_update is False, but {impl.__name__} has no do_kv_cache_update"

    builder = _part(backend, "get_builder_cls", AttentionMetadataBuilder)
    if isinstance(builder, str):
        yield builder
    elif builder is not None:
        yield from _missing(builder, "builder")
        arguments = ("self", "kv_cache_spec", "layer_names", "vllm_config", "device")
        yield from _uncallable(builder.__init__, f"{builder.__name__}.__init__", arguments)
        options = ["common_prefix_len", "common_attn_metadata", "fast_build"]
        options += ["num_accepted_tokens"] if base is StateImpl else []
        yield from _uncallable(builder.build, f"{builder.__name__}.build", ("self",), options)
        name = f"{builder.__name__}.get_cudagraph_support"
        yield from _uncallable(builder.get_cudagraph_support, name, ("vllm_config", "kv_cache_spec"))
        level: object = builder.cudagraph_support
        if not isinstance(level, AttentionCGSupport):
            yield f"{builder.__name__}.cudagraph_support is {level!r}, no AttentionCGSupport"


def _declared_features(backend: type[AttentionBackend]) -> frozenset[str]:
    """Return the features, or an empty set if the declaration is not a set; that is reported separately."""
    given: object = backend.features
    return frozenset(given) if isinstance(given, set | frozenset) else frozenset()


def _missing(part: type[Any], role: str) -> list[str]:
    names: frozenset[str] = getattr(part, "__abstractmethods__", frozenset())
    return [f"{role} {part.__name__} does not implement {', '.join(sorted(names))}"] if names else []


def _no_text(backend: type[AttentionBackend], method: str) -> list[str]:
    """Return one problem if a method that should return a string does not."""
    if method in getattr(backend, "__abstractmethods__", ()):
        return []
    try:
        text = getattr(backend, method)()
    except Exception as error:  # noqa: BLE001 (someone else's code: whatever it raises is the finding)
        return [f"{method}() raised {type(error).__name__}: {error}"]
    return [] if isinstance(text, str) else [f"{method}() returned {text!r}, which is no string"]


def _part(backend: type[AttentionBackend], factory: str, base: type[Any]) -> type[Any] | str | None:
    """Return the class that a factory returns, or a text on what is wrong with it; None if it is not implemented."""
    method = getattr(backend, factory)
    if factory in getattr(backend, "__abstractmethods__", ()):
        return None
    try:
        part = method()
    except ImportError:
        raise
    except Exception as error:  # noqa: BLE001 (someone else's code: whatever it raises is the finding)
        return f"{factory}() raised {type(error).__name__}: {error}"
    if not (isinstance(part, type) and issubclass(part, base)):
        return f"{factory}() returned {part!r}, which is no subclass of {base.__name__}"
    return part


def _uncallable(
    function: Callable[..., object], name: str, positional: Sequence[str], keywords: Sequence[str] = ()
) -> list[str]:
    """Return one problem if the harness cannot call ``function`` with these arguments."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin without an inspectable signature
        return []
    except TypeError:
        return [f"{name} is {function!r}, which cannot be called"]
    try:
        signature.bind(*positional, **dict.fromkeys(keywords))
    except TypeError as error:
        shown = [argument for argument in positional if argument != "self"] + [f"{keyword}=" for keyword in keywords]
        return [f"{name}{signature} cannot be called with ({', '.join(shown)}): {error}"]
    return []
