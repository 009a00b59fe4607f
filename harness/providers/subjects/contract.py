"""Questions about the classes and constants of the contract: CUDA-graph levels, common metadata, the builder's base."""

from collections.abc import Iterator
from dataclasses import MISSING, fields
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import torch

from attncheck.harness.providers.questions import Subject, SubjectCall, SubjectSetting, subject_call


def _value(target: Any) -> Any:
    return target


def _just(text: str) -> Any:
    def questions(_: SubjectSetting) -> Iterator[SubjectCall]:
        yield subject_call(text)

    return questions


def _levels(target: Any) -> dict[str, Any]:
    try:
        ordered = target.NEVER < target.ALWAYS
    except TypeError:
        ordered = "raises TypeError"
    try:
        fourth: Any = target(4)
    except ValueError:
        fourth = "raises ValueError"
    return {
        "members": {level.name: level.value for level in target},
        "NEVER < ALWAYS": ordered,
        "the level of 2": target(2).name,
        "the level of 4": fourth,
    }


def _fields(target: Any, **given: Any) -> dict[str, Any]:
    """Return the fields in the constructor's order, or those of an instance made with positional arguments."""
    if given:
        made = target(*given["values"])
        return {"values": {name: getattr(made, name) for name in given["names"]}, "causal": made.causal}
    return {
        "required": [field.name for field in fields(target) if field.default is MISSING],
        "optional": {field.name: field.default for field in fields(target) if field.default is not MISSING},
    }


FIRST_FIELDS = (
    "query_start_loc",
    "query_start_loc_cpu",
    "seq_lens",
    "seq_lens_cpu",
    "num_computed_tokens_cpu",
    "num_reqs",
    "num_actual_tokens",
    "max_query_len",
    "max_seq_len",
    "block_table_tensor",
    "slot_mapping",
)


def _metadata(_: SubjectSetting) -> Iterator[SubjectCall]:
    yield subject_call("its fields")
    yield subject_call(
        "made by position, causal included",
        names=list(FIRST_FIELDS),
        values=[*range(11), False],
    )


PROTOCOL = ("logits_indices_padded", "num_logits_indices")


def _is_fast_prefill(target: Any, *, attributes: list[str], derived: bool) -> Any:
    """Return whether an object with ``attributes`` is an instance; if ``derived``, which attributes a subclass has."""
    if derived:
        one = type("Metadata", (target,), {})()
        return {name: hasattr(one, name) for name in PROTOCOL}
    return isinstance(SimpleNamespace(**dict.fromkeys(attributes)), target)


def _protocol(_: SubjectSetting) -> Iterator[SubjectCall]:
    for attributes in (PROTOCOL, PROTOCOL[:1], PROTOCOL[1:], ()):
        yield subject_call(
            f"an object with {' and '.join(attributes) or 'neither attribute'}",
            attributes=list(attributes),
            derived=False,
        )
    yield subject_call("a class derived from it", "derived", attributes=[], derived=True)


def _builder_of(target: Any) -> Any:
    """Return a concrete builder whose ``build`` returns its arguments."""

    class Builder(target):  # type: ignore[misc]
        def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)

        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            return [common_prefix_len, common_attn_metadata, fast_build]

    return Builder


def _is_refused(make: Any) -> bool:
    try:
        make()
    except TypeError:
        return True
    return False


def _builder_facts(target: Any) -> dict[str, Any]:
    names, device = ["layer"], torch.device("cpu")
    config = SimpleNamespace(speculative_config=None)
    kind = _builder_of(target)
    one = kind("spec", names, config, device)
    return {
        "abstract methods": sorted(target.__abstractmethods__),
        "can be made without them": not _is_refused(lambda: target("spec", names, config, device)),
        "subscriptable": not _is_refused(lambda: target[int]),
        "arguments are kept": [one.kv_cache_spec, one.layer_names is names, one.vllm_config is config, one.device],
        "reorder_batch_threshold": target.reorder_batch_threshold,
        "build_for_cudagraph_capture": one.build_for_cudagraph_capture("metadata"),
        "build_for_drafting": one.build_for_drafting("metadata", 3),
    }


def _threshold(target: Any, *, arguments: tuple[Any, ...], vllm_config: Any) -> dict[str, Any]:
    one = _builder_of(target)("spec", [], vllm_config, torch.device("cpu"))
    one._init_reorder_batch_threshold(*arguments)
    return {"of the instance": one.reorder_batch_threshold, "of the class": type(one).reorder_batch_threshold}


def _cascade(target: Any) -> Any:
    one = _builder_of(target)("spec", [], None, torch.device("cpu"))
    return one.use_cascade_attention(512, np.array([1, 1]), 8, 2, False, False, False, 108)


def _level(target: Any) -> Any:
    """Return the attribute, or the result of the class method that replaces it in newer versions."""
    if hasattr(target, "cudagraph_support"):
        return target.cudagraph_support
    return target.get_cudagraph_support(SimpleNamespace(), SimpleNamespace())


def _builder_value(target: Any, *, what: str, **arguments: Any) -> Any:
    match what:
        case "facts":
            return _builder_facts(target)
        case "support":
            return _level(target).name
        case "cascade":
            return _cascade(target)
        case _:
            return _threshold(target, **arguments)


def _config(speculative: int | None, *, ranks: int = 1, parallel_drafting: bool = False) -> SimpleNamespace:
    """Return the config that the threshold depends on; ``speculative`` of -1 means no speculative config."""
    tokens = SimpleNamespace(num_speculative_tokens=speculative, parallel_drafting=parallel_drafting)
    return SimpleNamespace(
        speculative_config=None if speculative == -1 else tokens,
        parallel_config=SimpleNamespace(decode_context_parallel_size=ranks),
        use_v2_model_runner=not parallel_drafting,
    )


def _builders(_: SubjectSetting) -> Iterator[SubjectCall]:
    yield subject_call("its methods and attributes", what="facts")
    yield subject_call("cudagraph_support", what="support")
    yield subject_call("use_cascade_attention", "use_cascade_attention", what="cascade")
    cases: tuple[tuple[tuple[Any, ...], int | None], ...] = (
        ((), -1),
        ((1, True), 3),
        ((4, True), 1),
        ((2, False), 7),
        ((None, True), 3),
        ((1, True), None),
        ((1, True), 0),
        ((3, True), -1),
    )
    for arguments, speculative in cases:
        config = "no speculative config" if speculative == -1 else f"{speculative} speculative tokens"
        yield subject_call(
            f"_init_reorder_batch_threshold{arguments}, {config}",
            what="threshold",
            arguments=arguments,
            vllm_config=_config(speculative),
        )
    for arguments in [(None, True), (2, False)]:
        yield subject_call(
            f"_init_reorder_batch_threshold{arguments}, the config not to be looked at",
            "config not needed",
            what="threshold",
            arguments=arguments,
            vllm_config=None,
        )
    for arguments in [(4, False), (None, False)]:
        yield subject_call(
            f"_init_reorder_batch_threshold{arguments}, two ranks of decode context parallelism",
            "context parallelism",
            what="threshold",
            arguments=arguments,
            vllm_config=_config(-1, ranks=2),
        )
    yield subject_call(
        "_init_reorder_batch_threshold(1, True), 3 speculative tokens drafted in parallel",
        "parallel drafting",
        what="threshold",
        arguments=(1, True),
        vllm_config=_config(3, parallel_drafting=True),
    )


def _names_and_defaults(target: Any) -> list[Any]:
    return [[name, default] for name, _, default in target]


SUBJECTS = (
    Subject("AttentionCGSupport", _just("its members"), _levels, is_function=False),
    Subject("CommonAttentionMetadata", _metadata, _fields, is_function=False),
    Subject("AttentionMetadataBuilder", _builders, _builder_value, is_function=False),
    Subject("KVSharingFastPrefillMetadata", _protocol, _is_fast_prefill, is_function=False),
    Subject("PAD_SLOT_ID", _just("its value"), _value, is_function=False),
    Subject("KVCacheLayoutType", _just("its values"), get_args, is_function=False),
    Subject(
        "KV_SHARING_FAST_PREFILL_METADATA_FIELDS",
        _just("names and defaults"),
        _names_and_defaults,
        is_function=False,
    ),
)
