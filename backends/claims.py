"""The declarations of vLLM's attention contract, and how attncheck measures each.

A claim is a member of vLLM's class, its impl or its builder whose value is yes or no, or depends on an argument. This
is the only table of claims: declarations and ``attncheck list claims`` read it. The header of a run has what its
backends claim, for audits and statements. Loads no torch.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

UNKNOWN = "unknown to attncheck"
"""Why a claim that this table does not have is not examined."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A member of vLLM's contract, and what measures it: ``feature``, ``form`` or ``check``, or nothing.

    ``feature``: the cases that need this feature. ``form``: the cases of each value, such as each ``dtype``. ``check``:
    the check of this name; with ``form``, on cases that have this key. ``unexamined``: why nothing measures it. ``of``:
    which class has the member; ``config``: a function of vLLM's configuration.
    """

    member: str
    feature: str = ""
    form: str = ""
    check: str = ""
    unexamined: str = ""
    of: Literal["backend", "impl", "builder", "config"] = "backend"


_ALL = (
    Claim(member="supports_dtype", form="dtype"),
    Claim(member="supports_head_size", form="head_size"),
    Claim(member="supports_kv_cache_dtype", form="kv_cache_dtype"),
    Claim(member="supports_block_size", form="block_size"),
    Claim(member="supports_attn_type", form="attn_type"),
    Claim(
        member="supports_compute_capability",
        unexamined="a run has one device, and attncheck reads this to decide whether a class runs on it",
    ),
    Claim(member="supports_combination", check="refusals"),
    Claim(member="supports_sink", feature="sinks"),
    Claim(member="supports_sliding_window", feature="sliding_window"),
    Claim(member="supports_non_causal", feature="non_causal"),
    Claim(member="supports_per_head_quant_scales", feature="fp8_per_head"),
    Claim(
        member="supports_alibi_sqrt",
        feature="alibi_sqrt",
        unexamined="no case has the square-root form of ALiBi",
    ),
    Claim(member="supports_quant_query_input", feature="fp8_query", of="impl"),
    Claim(member="fused_output_quant_supported", feature="output_quant", of="impl"),
    Claim(member="supports_dense_mha_prefill", feature="mla", of="impl"),
    Claim(member="supports_batch_invariance", check="bitwise"),
    Claim(member="indexes_kv_by_block_stride", form="cache.pool_order"),
    Claim(member="supports_update_block_table", check="builder", form="cache.block_size", of="builder"),
    Claim(member="supports_draft_decode_metadata_update", check="cudagraph", of="builder"),
    Claim(
        member="get_varlen_cudagraph_max_query_len",
        of="builder",
        unexamined="no probe replays a graph of decodes with batches of several query lengths",
    ),
    Claim(member="is_sparse", feature="sparse"),
    Claim(member="supports_mm_prefix", feature="mm_prefix"),
    Claim(member="supports_rswa", feature="rswa"),
    Claim(member="supports_dcp", feature="dcp"),
    Claim(
        member="supports_pcp",
        unexamined="the path pcp gives a rank its rows but no group, and examines neither the gathering nor req_idx",
    ),
    Claim(
        member="supports_non_causal_dcp",
        unexamined="a non-causal case of the suite ranks needs the feature dcp, and no feature of its own",
    ),
    Claim(
        member="supports_non_causal_multi_token_decode",
        of="builder",
        unexamined="vLLM allows such decodes only in an attention group of a non-causal drafter, and no case has one",
    ),
    Claim(
        member="supports_non_causal_multi_token_dcp",
        of="builder",
        unexamined="no case has ranks in an attention group of a non-causal drafter",
    ),
    Claim(
        member="supports_mtp_with_cp_non_trivial_interleave_size",
        of="impl",
        unexamined="no case has ranks that verify drafts",
    ),
    Claim(
        member="supports_kv_connector",
        unexamined="a connector moves pages between engines, and no call of the contract depends on it",
    ),
    Claim(
        member="supports_device_cpu_query_lens_mismatch",
        unexamined="no case has other query lengths on the device than on the host",
    ),
    Claim(
        member="supports_kv_cache_update_bypass",
        unexamined="no case has a forward without key and value, after a fused operation wrote the cache",
    ),
    Claim(
        member="register_kv_cache_dtype",
        of="config",
        unexamined="cases of kv_cache_dtype registered examine classes of attncheck's contract, not vLLM's",
    ),
)

CLAIMS: Mapping[str, Claim] = MappingProxyType({claim.member: claim for claim in _ALL})
"""All claims by the name of the member, in the order of reports."""

PREDICATES: Mapping[str, str] = MappingProxyType(
    {claim.feature: claim.member for claim in _ALL if claim.feature and claim.of == "backend"}
)
"""The method of vLLM's class that declares each feature."""

YES, NO = "yes", "no"
BY_ARGUMENTS, BY_LAYER = "depends on its arguments", "set by the constructor of a layer"


def claim_of(member: str) -> Claim:
    """Return the claim of this name; one that nothing measures if the table has none."""
    return CLAIMS.get(member, Claim(member=member, unexamined=UNKNOWN))


def declared_claims(backend: type[Any], features: Collection[str] | None = None) -> dict[str, str]:
    """Return the value of each claim that ``backend`` makes, by member, in the order of the table; unknown ones last.

    A value is ``yes``, a text on what it depends on, or the type of an exception. Claims whose value is no are left
    out, as are known ones with a value for each argument. ``backend``: a class of vLLM or in its form. ``features``:
    those of its layers, which decide for a claim that an impl makes; None if they are not known.
    """
    found: dict[str, str] = {}
    for of, cls in _classes(backend):
        for member in _members(cls):
            feature = claim_of(member).feature
            value = YES if feature in (features or ()) else _value(cls, member, is_class=of == "backend")
            is_settled = value == BY_LAYER and feature and features is not None and not backend.is_mla()
            if value != NO and not is_settled and not (value == BY_ARGUMENTS and member in CLAIMS):
                found.setdefault(member, value)
    order = [*CLAIMS, *sorted(found.keys() - CLAIMS.keys())]
    return {member: found[member] for member in order if member in found}


def _classes(backend: type[Any]) -> Iterator[tuple[str, type[Any]]]:
    """Yield the class, its impl and its builder, as far as its methods return classes."""
    yield "backend", backend
    for of, method in (("impl", "get_impl_cls"), ("builder", "get_builder_cls")):
        try:
            cls = getattr(backend, method)()
        except Exception:  # noqa: BLE001, S112 (someone else's code: a class of a builder alone raises)
            continue
        if isinstance(cls, type):
            yield of, cls


def _members(cls: type[Any]) -> list[str]:
    return [name for name in dir(cls) if name in CLAIMS or name.startswith("supports_")]


def _value(cls: type[Any], member: str, *, is_class: bool) -> str:
    try:
        value: object = getattr(cls, member)
        if callable(value):
            if not is_class or _has_arguments(value):
                return BY_ARGUMENTS
            value = value()
        is_true = bool(value)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (someone else's code)
        # The text of an exception may differ from process to process, and the description of a backend must not.
        return f"raises {type(error).__name__}"
    if isinstance(value, property) or (not is_true and _is_set_by(cls, member)):
        return BY_LAYER
    return YES if is_true else NO


def _has_arguments(method: Callable[..., object]) -> bool:
    return any(each.default is each.empty for each in inspect.signature(method).parameters.values())


def _is_set_by(cls: type[Any], member: str) -> bool:
    """Return whether a constructor of the class stores an attribute of this name."""
    constructors = (getattr(vars(base).get("__init__"), "__code__", None) for base in cls.__mro__)
    return any(code is not None and member in code.co_names for code in constructors)
