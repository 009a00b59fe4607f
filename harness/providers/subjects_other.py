"""Subjects of the contract, of kernels, layers and layouts."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass, make_dataclass
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from attncheck.harness.providers.batches import ProviderBatch
from attncheck.harness.providers.provider import Subject, SubjectCall, SubjectSetting, are_apart, subject_call
from attncheck.reference import PerLayerParameters

# Questions about the classes and constants of the contract: CUDA-graph levels, common metadata, the builder's base.


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


def _metadata_fields(_: SubjectSetting) -> Iterator[SubjectCall]:
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


CONTRACT = (
    Subject("AttentionCGSupport", _just("its members"), _levels, is_function=False),
    Subject("CommonAttentionMetadata", _metadata_fields, _fields, is_function=False),
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


# Questions about the launch arguments of kernels: programs, blocks of states, lengths, prefix ranges, reshapes.


def _programs(target: Any, *, query_start_loc_p: Tensor) -> dict[str, Any]:
    by_block, batch_ptr, token_chunk_offset_ptr = target(query_start_loc_p)
    return {
        "block sizes": list(by_block),
        "programs": {str(size): dict(entries) for size, entries in by_block.items()},
        "batch_ptr": batch_ptr,
        "token_chunk_offset_ptr": token_chunk_offset_ptr,
        "both are those of the dictionary": [
            all(entries["batch_ptr"] is batch_ptr for entries in by_block.values()),
            all(entries["token_chunk_offset_ptr"] is token_chunk_offset_ptr for entries in by_block.values()),
        ],
    }


def _conv1d(setting: SubjectSetting) -> Iterator[SubjectCall]:
    for batch in setting.batches:
        yield subject_call(str(batch), query_start_loc_p=batch.offsets().to(setting.device))

    def call(*starts: int, tags: tuple[str, ...] = ()) -> SubjectCall:
        given = torch.tensor(starts, dtype=torch.int32, device=setting.device)
        text = f"start locations {' '.join(map(str, starts)) or 'none'}"
        return subject_call(text, *tags, refused=bool(tags), query_start_loc_p=given)

    yield call(0)
    yield call(0, 17)
    yield call(0, 5, 21, 29, 29)
    yield call(0, 9000)
    yield call(0, 5, 3, tags=("malformed",))
    yield call(tags=("malformed",))


RANKS: tuple[tuple[int, int | None, int], ...] = (
    (1, None, 1),
    (1, 0, 1),
    (2, None, 1),
    (2, None, 4),
    (4, 2, 1),
    (4, None, 16),
    (3, 1, 2),
)
"""World size, rank (None for all), interleave."""

IMPOSSIBLE = ((5, 0, None, 1), (5, 4, 4, 1), (5, 4, -1, 1), (5, 4, 0, 0), (-5, 4, 0, 1))
"""A length, world size, rank, interleave: at least one of them is invalid."""


def _local_lens(setting: SubjectSetting) -> Iterator[SubjectCall]:
    def call(lens: Tensor, text: str, size: int, rank: Any, stripe: int, *tags: str) -> SubjectCall:
        return subject_call(
            f"{text}: rank {'all' if rank is None else rank} of {size}, interleave {stripe}",
            *tags,
            refused=bool(tags),
            seq_lens=lens,
            dcp_size=size,
            dcp_rank=rank,
            cp_kv_cache_interleave_size=stripe,
        )

    one = torch.tensor([1], dtype=torch.int32, device=setting.device)
    for batch in setting.batches:
        lens = batch.metadata(setting.device).seq_lens
        for size, rank, stripe in RANKS:
            yield call(lens, str(batch), size, rank, stripe)
        yield call(lens, str(batch), 4, one, 2)
        yield subject_call(f"{batch}: by default", seq_lens=lens)
    for length, size, rank, stripe in IMPOSSIBLE:
        lens = torch.tensor([length], dtype=torch.int32, device=setting.device)
        yield call(lens, f"length {length}", size, rank, stripe, "malformed")
    yield call(lens.abs(), "length 5", 1, one, 1, "malformed")


def _numbered(*shape: int) -> Tensor:
    """Return a tensor whose elements all differ, so that a wrong order shows."""
    return torch.arange(math.prod(shape), dtype=torch.float32).view(shape)


def _viewed(target: Any, **arguments: Any) -> dict[str, Any]:
    """Return the result and whether it is a view, since callers write through it."""
    given = next(value for value in arguments.values() if isinstance(value, Tensor))
    made = target(**arguments)
    return {
        "result": made,
        "strides": list(made.stride()),
        "is a view": not are_apart(made, given),
    }


def _queries(setting: SubjectSetting) -> Iterator[SubjectCall]:
    def call(query: Tensor, size: int, *, text: str = "", refused: bool = False) -> SubjectCall:
        text = f"{list(query.shape)}{text}, batch size {size}"
        return subject_call(text, refused=refused, query=query.to(setting.device), batch_size=size)

    for shape, size in [((6, 2, 8), 3), ((4, 2, 8), 1), ((0, 2, 8), 3), ((8, 1, 4), 8)]:
        yield call(_numbered(*shape), size)
    yield call(_numbered(6, 2, 16)[..., :8], 3, text=", half of wider rows")
    yield call(_numbered(7, 2, 8), 3, refused=True)
    yield call(_numbered(7, 8), 7, refused=True)
    yield call(_numbered(7, 2, 8), 0, refused=True)


def _outputs(setting: SubjectSetting) -> Iterator[SubjectCall]:
    def call(output: Tensor, *, text: str = "", refused: bool = False) -> SubjectCall:
        return subject_call(f"{list(output.shape)}{text}", refused=refused, attn_output=output.to(setting.device))

    yield call(_numbered(3, 2, 2, 8))
    yield call(_numbered(6, 2, 8))
    yield call(_numbered(5, 1, 2, 8).transpose(0, 1), text=", first axes swapped")
    yield call(_numbered(6, 8), refused=True)
    yield call(_numbered(2, 3, 2, 8).transpose(0, 1), text=", first axes swapped", refused=True)


def _state_blocks(setting: SubjectSetting) -> Iterator[SubjectCall]:
    def call(
        lens: Tensor, text: str, mode: str, page: int, drafts: int, width: int, *, refused: bool = False
    ) -> SubjectCall:
        table = _numbered(len(lens), width).to(setting.device, torch.int32)
        return subject_call(
            f"{text}: mode {mode}, blocks of {page}, {drafts} speculative blocks, {width} columns",
            refused=refused,
            block_table=table,
            seq_lens=lens,
            kv_cache_spec=SimpleNamespace(block_size=page, num_speculative_blocks=drafts),
            mamba_cache_mode=mode,
        )

    for batch in setting.batches:
        lens, page = batch.metadata(setting.device).seq_lens, batch.block_size
        blocks = max(1, -(-max(batch.seq_lens) // page))
        yield call(lens, str(batch), "none", page, 1, 2)
        for drafts in (0, 2):
            yield call(lens, str(batch), "align", page, drafts, blocks + drafts)
            yield call(lens, str(batch), "align", page, drafts, blocks + drafts + 3)
    lens = torch.tensor([9], dtype=torch.int32, device=setting.device)
    yield call(lens, "length 9", "align", 4, 1, 3, refused=True)


def _same_object(target: Any, *, block_table: Tensor, **arguments: Any) -> dict[str, Any]:
    made = target(block_table=block_table, **arguments)
    return {"blocks": made, "is the table": made is block_table}


def _prefix_ranges(batch: ProviderBatch) -> Iterator[tuple[str, dict[int, list[tuple[int, int]]] | None]]:
    """Yield bidirectional ranges, in words and as an argument: none, one per request, several, one past all tokens."""
    ends = [s for s in batch.seq_lens if s]
    yield "no ranges", None
    yield "no request with a range", {}
    yield "all but the last token", {request: [(0, end - 2)] for request, end in enumerate(ends) if end > 2}
    yield "the last two tokens and more", {request: [(end - 2, end + 5)] for request, end in enumerate(ends) if end > 1}
    yield (
        "two ranges of every second request",
        {request: [(0, 1), (2, end - 1)] for request, end in enumerate(ends) if end > 3 and not request % 2},
    )
    yield "a range of one token, and none", {0: [(ends[0] - 1, ends[0] - 1)], len(ends) - 1: []}
    yield "a range behind all tokens", {0: [(ends[0] + 3, ends[0] + 9)]}


def _range_tables(setting: SubjectSetting) -> Iterator[SubjectCall]:
    for batch in setting.batches:
        for text, ranges in _prefix_ranges(batch):
            yield subject_call(
                f"{batch}: {text}", mm_prefix_range=ranges, num_seqs=batch.num_reqs, device=setting.device
            )


def _range_rows(setting: SubjectSetting) -> Iterator[SubjectCall]:
    def call(batch: ProviderBatch, text: str, ranges: Any, rows: int, *, refused: bool = False) -> SubjectCall:
        return subject_call(
            f"{batch}: {text}, a buffer of {rows} rows",
            refused=refused,
            out=np.full((rows, 2), 77, dtype=np.int32),
            mm_prefix_range=ranges,
            query_start_loc_cpu=batch.offsets(),
            seq_lens_cpu=batch.metadata(torch.device("cpu")).seq_lens_cpu,
        )

    for batch in setting.batches:
        for text, ranges in _prefix_ranges(batch):
            yield call(batch, text, ranges, batch.num_tokens + batch.num_reqs % 3)
        yield call(batch, "a range of all", {0: [(0, 99)]}, batch.num_tokens - 1, refused=True)


KERNELS = (
    Subject("compute_causal_conv1d_metadata", _conv1d, _programs),
    Subject("mamba_get_block_table_tensor", _state_blocks, _same_object),
    Subject("get_dcp_local_seq_lens", _local_lens),
    Subject("compute_mm_prefix_range_tensor", _range_tables),
    Subject("fill_mm_prefix_query_ranges", _range_rows),
    Subject("reshape_query_for_spec_decode", _queries, _viewed),
    Subject("reshape_attn_output_for_spec_decode", _outputs, _viewed),
)


# Questions about layers: their parameters for a plan step, and classes derived from their backends and metadata.

Layer = tuple[Any, ...]
"""Constructor arguments of one layer's parameters: window, cap, scale, sinks, verdicts."""


def _parameter_facts(target: Any, *, arguments: Layer) -> dict[str, Any]:
    one = target(*arguments)
    others = {"the same": (1, None, 0.5), "a cap of 0": (1, 0.0, 0.5), "sinks": (1, None, 0.5, True)}
    return {"fields": one, "equals": {name: one == target(*other) for name, other in others.items()}}


def _parameters(_: SubjectSetting) -> Iterator[SubjectCall]:
    for arguments in [(1, None, 0.5), (1, None, 0.5, False, True, True), (1, 0.0, 0.5), (-1, 30.0, 0.125, True)]:
        yield subject_call(f"made from {arguments}", arguments=arguments)


class Impl:
    """An attention implementation with only the attributes that are read."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def get_impl_variants(self) -> "list[Impl]":
        """Return the implementation alone; newer vLLM calls this method."""
        return [self]


class SpecialImpl(Impl):
    """A subclass, which must be accepted, too."""


class OtherImpl:
    """An implementation of an unrelated class."""

    scale = 0.5

    def get_impl_variants(self) -> "list[OtherImpl]":
        """Return the implementation alone."""
        return [self]


IMPLS: dict[str, Any] = {
    "a": Impl(sliding_window=(127, 0), logits_soft_cap=30.0, scale=0.125, sinks="some"),
    "b": Impl(scale=0.5),
    "c": SpecialImpl(sliding_window=(-1, -1), logits_soft_cap=None, scale=0.5, sinks=None),
    "d": Impl(sliding_window=(0, 0), logits_soft_cap=0.0, scale=1.0),
    "without a scale": Impl(sliding_window=(3, 0)),
    "of another class": OtherImpl(),
    "with a window that is no pair": Impl(sliding_window=127, scale=0.5),
}


def _layers(_: SubjectSetting) -> Iterator[SubjectCall]:
    def call(*names: str, tag: str = "", refused: bool = False) -> SubjectCall:
        layers = {name: SimpleNamespace(impl=impl) for name, impl in IMPLS.items()}
        context = {**layers, "no attention": SimpleNamespace()}
        return subject_call(
            f"layers {', '.join(names) or 'none'}",
            *([tag] if tag else []),
            refused=refused,
            vllm_config=SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context)),
            layer_names=list(names),
            cls_=Impl,
        )

    yield call("c", "no attention", "a", "b")
    yield call("d")
    yield call()
    yield call("a", "unknown", tag="an unknown layer", refused=True)
    yield call("without a scale", refused=True)
    yield call("of another class", refused=True)
    yield call("with a window that is no pair", refused=True)


def _groups(_: SubjectSetting) -> Iterator[SubjectCall]:
    def call(*layers: Layer, refused: bool = False) -> SubjectCall:
        entries = {f"layer {number}": PerLayerParameters(*layer) for number, layer in enumerate(layers)}
        return subject_call(" and ".join(map(str, layers)) or "no layer", refused=refused, per_layer_params=entries)

    yield call((127, None, 0.5), (127, None, 0.5))
    yield call((127, None, 0.5), (127, 30.0, 0.5))
    yield call((-1, None, 0.5, True), (127, None, 0.5))
    yield call((127, None, 0.5), (63, None, 0.5))
    yield call((-1, 30.0, 0.5, True))
    yield call((127, None, 0.5), (127, None, 0.5, False, True, False), (127, None, 0.25))
    yield call(refused=True)


class DerivableBackend:
    """A backend to derive from."""

    kept = "inherited"

    @staticmethod
    def get_builder_cls() -> type:
        """Return a type that differs from every replacement."""
        return int


def _backend_facts(
    target: Any, *, name_prefix: str, attention_backend_cls: type[DerivableBackend], builder_cls: type
) -> dict[str, Any]:
    one, other = (target(name_prefix, attention_backend_cls, builder_cls) for _ in range(2))
    again = target("Again", one, float)
    try:
        on_an_instance: Any = one().get_builder_cls()
    except TypeError:
        on_an_instance = "raises TypeError"
    return {
        "name": one.__name__,
        "bases": list(one.__bases__),
        "builder": one.get_builder_cls(),
        "builder, on an instance": on_an_instance,
        "inherited": one.kept,
        "builder of the base": attention_backend_cls.get_builder_cls(),
        "two calls, two classes": one is not other,
        "derived again": [again.__name__, again.get_builder_cls(), [cls.__name__ for cls in again.__mro__]],
    }


def _backends(_: SubjectSetting) -> Iterator[SubjectCall]:
    for prefix in ("Local", ""):
        yield subject_call(
            f"prefix {prefix!r}", name_prefix=prefix, attention_backend_cls=DerivableBackend, builder_cls=str
        )


FAST: list[tuple[str, Any, Any]] = [("logits_indices_padded", Any, None), ("num_logits_indices", int, 0)]


def _metadata_facts(
    target: Any, *, name_prefix: str, metadata_cls: type, fields: list[tuple[str, Any, Any]], values: tuple[Any, ...]
) -> dict[str, Any]:
    made = target(name_prefix, metadata_cls, fields)
    one = made(*values)
    return {
        "name": made.__name__,
        "is a dataclass": is_dataclass(made),
        "bases": list(made.__bases__),
        "fields": _fields_of(made),
        "values": one,
        "equals an instance of the base": one == metadata_cls(*values),
    }


def _fields_of(kind: Any) -> list[str]:
    return [field.name for field in fields(kind)] if is_dataclass(kind) else []


def _metadata_subclass(_: SubjectSetting) -> Iterator[SubjectCall]:
    two = make_dataclass("Meta", [("a", int), ("b", int, 3)])
    one = make_dataclass("Meta", [("a", int, 1)])

    def call(
        prefix: str, base: type, added: list[tuple[str, Any, Any]], values: tuple[Any, ...], *, refused: bool = False
    ) -> SubjectCall:
        further = ", ".join(name for name, _, _ in added) or "nothing"
        return subject_call(
            f"{prefix!r} before {base.__name__}({', '.join(_fields_of(base))}), adding {further}",
            refused=refused,
            name_prefix=prefix,
            metadata_cls=base,
            fields=added,
            values=values,
        )

    yield call("Fast", two, FAST, (1,))
    yield call("", two, [], (5,))
    yield call("Fast", one, [("a", int, 7)], ())
    yield call("Fast", int, FAST, (), refused=True)


LAYERS = (
    Subject("PerLayerParameters", _parameters, _parameter_facts, is_function=False),
    Subject("get_per_layer_parameters", _layers),
    Subject("infer_global_hyperparameters", _groups),
    Subject("subclass_attention_backend", _backends, _backend_facts),
    Subject("subclass_attention_metadata", _metadata_subclass, _metadata_facts),
)


# Questions about the layout of the KV cache: an override, the environment variable, and a cached answer.
#
# The functions have global state, which is restored afterwards.

VARIABLE = "VLLM_KV_CACHE_LAYOUT"

Step = tuple[str, str | None]


@contextmanager
def _clean(get: Any, put: Any) -> Iterator[None]:
    """Remove override, environment variable and cached answer, before and afterwards; then restore the variable."""
    before = os.environ.pop(VARIABLE, None)
    try:
        put(None)
        get.cache_clear()
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        put(None)
        get.cache_clear()
        if before is not None:
            os.environ[VARIABLE] = before


def _walk(get: Any, put: Any, *, steps: list[Step]) -> list[Any]:
    """Return the result of each ``get`` and ``set`` among the steps; an exception counts as ``refused``."""
    answers: list[Any] = []
    with _clean(get, put):
        for action, value in steps:
            if action == "environment":
                os.environ[VARIABLE] = str(value)
            elif action == "clear":
                get.cache_clear()
            else:
                try:
                    answers.append(get() if action == "get" else put(value))
                except Exception:  # noqa: BLE001 (foreign code)
                    answers.append("refused")
    return answers


def _put(put: Any, get: Any, *, steps: list[Step]) -> list[Any]:
    return _walk(get, put, steps=steps)


def _call(*steps: Step) -> SubjectCall:
    text = ", ".join(action if value is None and action != "set" else f"{action} {value!r}" for action, value in steps)
    return subject_call(text, steps=list(steps))


GET, CLEAR = ("get", None), ("clear", None)


def _resolutions(_: SubjectSetting) -> Iterator[SubjectCall]:
    yield _call(GET)
    yield _call(("environment", "HND"), GET, ("set", "NHD"), GET, CLEAR, GET)
    yield _call(("set", "NHD"), ("environment", "nhd"), GET)
    yield _call(("environment", "nhd"), GET, ("environment", "HND"), GET)
    yield _call(("environment", ""), GET)


def _overrides(_: SubjectSetting) -> Iterator[SubjectCall]:
    yield _call(("set", "HND"), GET)
    yield _call(("set", "HND"), ("set", None), GET)
    yield _call(("set", "LBNHC"), GET)


def _values(_: SubjectSetting) -> Iterator[SubjectCall]:
    for value in ("NHD", "HND", "nhd", "", "LBNHC", " NHD"):
        yield subject_call(repr(value), value=value)


LAYOUT = (
    Subject("is_valid_kv_cache_layout", _values),
    Subject("get_kv_cache_layout", _resolutions, _walk, helpers=("set_kv_cache_layout",), is_function=False),
    Subject("set_kv_cache_layout", _overrides, _put, helpers=("get_kv_cache_layout",)),
)
