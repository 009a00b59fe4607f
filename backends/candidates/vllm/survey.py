"""Lists all classes of the installed vLLM, and what each declares, with the columns of vLLM's own table.

Values come from the predicates of the classes. vLLM's page of attention backends has the same columns.
"""

from collections.abc import Callable, Iterable
from math import gcd
from typing import Any, get_args

import torch

from attncheck.backends.candidates.vllm import package
from attncheck.backends.candidates.vllm.cache import kernel_block_sizes
from attncheck.backends.candidates.vllm.config import plain_config, their_config
from attncheck.backends.candidates.vllm.selection import is_sparse, is_state_space, path_of, registered, select_class
from attncheck.backends.claims import declared_claims
from attncheck.backends.contract import KVCacheSpec, MultipleOf
from attncheck.backends.dtypes import DTYPES
from attncheck.reference.spec import AttentionType

_CAPABILITIES = ((7, 0), (7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1))
"""Compute capabilities of the GPUs that vLLM's page distinguishes."""

_HEAD_SIZES = range(1, 1025)

_ANY = ("any",)


def member_names() -> tuple[str, ...]:
    """Return the arguments that name classes of the installed vLLM: of its registries, and of its platform.

    Raises:
        ImportError: vLLM, or a plugin of it, cannot be imported.
    """
    package.module("vllm")
    return (*registered(), *_chosen_by_platform())


def declared_by(argument: str) -> tuple[dict[str, tuple[str, ...]], dict[str, str], str]:
    """Return what the class of ``argument`` declares: values by column, claims by member, and its CUDA-graph level.

    All are empty if the class cannot be imported. A predicate that raises gives one value, the text of its exception.
    """
    try:
        theirs = select_class(argument)
    except Exception:  # noqa: BLE001 (someone else's code; the registry reports why the import failed)
        return {}, {}, ""
    columns: dict[str, Callable[[], Iterable[str]]] = {
        "layers": lambda: _kinds(theirs),
        "dtype": lambda: [name for name, dtype in DTYPES.items() if theirs.supports_dtype(dtype)],
        "kv_cache_dtype": lambda: [name for name in _cache_dtypes() if theirs.supports_kv_cache_dtype(name)],
        "block_size": lambda: _sizes(kernel_block_sizes(theirs)),
        "head_size": lambda: _head_sizes(theirs),
        "attn_type": lambda: [kind.value for kind in AttentionType if theirs.supports_attn_type(kind.value)],
        "compute_capability": lambda: _capabilities(theirs),
    }
    if is_state_space(theirs):  # has none of the other columns
        columns = {"layers": columns["layers"]}
    values = {name: tuple(_declared_values(values)) for name, values in columns.items()}
    return values, declared_claims(theirs), _level(theirs)


def _declared_values(values: Callable[[], Iterable[str]]) -> Iterable[str]:
    try:
        return values()
    except AttributeError:  # an older class without this predicate
        return ()
    except Exception as error:  # noqa: BLE001 (someone else's code)
        return [f"raises {type(error).__name__}: {error}".partition("\n")[0]]


def _kinds(theirs: type[Any]) -> list[str]:
    if is_state_space(theirs):
        return ["state"]
    cached = "latent" if theirs.is_mla() else "keys and values"
    return [cached, "sparse"] if is_sparse(theirs) else [cached]


def _cache_dtypes() -> tuple[str, ...]:
    return get_args(package.find("CacheDType", "vllm.config.cache", "vllm.config"))


def _sizes(sizes: Iterable[int | MultipleOf]) -> list[str]:
    return list(_ANY) if MultipleOf(1) in sizes else [str(size) for size in sizes]


def _head_sizes(theirs: type[Any]) -> list[str]:
    """Return the head sizes that the predicate accepts: one by one, or as a range with equal steps."""
    taken = [size for size in _HEAD_SIZES if theirs.supports_head_size(size)]
    if len(taken) == len(_HEAD_SIZES):
        return list(_ANY)
    step = gcd(*taken) if taken else 1
    if len(taken) < 3 or taken != list(range(taken[0], taken[-1] + 1, step)):
        return [str(size) for size in taken]
    kind = "" if step == 1 else f"multiples of {step}, "
    is_open = taken[-1] + step > _HEAD_SIZES[-1]
    return [f"{kind}{taken[0]} and above" if is_open else f"{kind}{taken[0]} to {taken[-1]}"]


def _capabilities(theirs: type[Any]) -> list[str]:
    """Return ranges of compute capabilities, such as ``8.0 to 9.0``; ``any`` if the class excludes none."""
    kind = type(package.lowest_capability())
    taken = [theirs.supports_compute_capability(kind(*each)) for each in _CAPABILITIES]
    if all(taken) and theirs.supports_compute_capability(package.lowest_capability()):
        return list(_ANY)
    names = [f"{major}.{minor}" for major, minor in _CAPABILITIES]
    runs: list[list[str]] = []
    for position, (name, is_taken) in enumerate(zip(names, taken, strict=True)):
        if is_taken and position and taken[position - 1]:
            runs[-1].append(name)
        elif is_taken:
            runs.append([name])
    if runs and runs[-1][-1] == names[-1]:
        return [*map(_run, runs[:-1]), f"{runs[-1][0]} and above"]
    return [_run(run) for run in runs]


def _run(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _level(theirs: type[Any]) -> str:
    """Return the graph level that the builder declares for a plain layer, or else that of the class."""
    try:
        builder = theirs.get_builder_cls()
        own = getattr(builder, "_cudagraph_support", None) or getattr(builder, "cudagraph_support", None)
    except Exception:  # noqa: BLE001 (someone else's code)
        return ""
    try:
        plain = plain_config(torch.bfloat16, num_heads=2, num_kv_heads=1, head_size=64, block_size=64)
        config = their_config(plain)
        spec = KVCacheSpec(block_size=64, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
        return str(builder.get_cudagraph_support(config, spec).name)
    except Exception:  # noqa: BLE001 (someone else's code)
        return str(getattr(own, "name", ""))


def _chosen_by_platform() -> tuple[str, ...]:
    """Return ``module:Class`` of classes that a plugin's platform chooses and that the registries do not name."""
    platform = package.platform()
    if not getattr(platform, "is_out_of_tree", bool)():
        return ()
    named = {path for member in registered().values() if (path := path_of(member))}
    found: dict[str, None] = {}
    for use_mla in (False, True):
        try:
            selector = package.module("vllm.v1.attention.selector").AttentionSelectorConfig
            config = selector(head_size=64, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=64, use_mla=use_mla)
            path = str(platform.get_attn_backend_cls(None, config, num_heads=2))
        except Exception:  # noqa: BLE001, S112 (someone else's code: it has no such class, or raises its own exception)
            continue
        if path not in named:
            place, _, name = path.rpartition(".")
            found[f"{place}:{name}"] = None
    return tuple(found)
