"""Subjects of the contract, of kernels, layers and layouts."""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass, make_dataclass
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from attncheck.harness.providers.batches import ProviderBatch
from attncheck.harness.providers.provider import Subject, SubjectCall, SubjectSetting, subject_call
from attncheck.reference import CommonAttentionMetadata, PerLayerParameters

# Questions about the classes and constants of the contract: CUDA-graph levels, common metadata, the builder's base.


def _once(about: str) -> Callable[[SubjectSetting], list[SubjectCall]]:
    """Return the one question about a constant or class."""
    return lambda _: [subject_call(about)]


def _or_raised(value: Callable[[], Any]) -> Any:
    """Return the value, or the name of the exception that it raises."""
    try:
        return value()
    except (TypeError, ValueError) as error:
        return f"raises {type(error).__name__}"


def _levels(target: Any) -> dict[str, Any]:
    return {
        "members": {level.name: level.value for level in target},
        "NEVER < ALWAYS": _or_raised(lambda: target.NEVER < target.ALWAYS),
        "the level of 2": target(2).name,
        "the level of 4": _or_raised(lambda: target(4)),
    }


def _fields(target: Any, **given: Any) -> dict[str, Any]:
    """Return the fields in the constructor's order, or those of an instance made with positional arguments."""
    if given:
        made = target(*given["values"])
        return {"values": {name: getattr(made, name) for name in given["names"]}, "causal": made.causal}
    optional = {field.name: field.default for field in fields(target) if field.default is not MISSING}
    own = {field.name for field in fields(CommonAttentionMetadata)}
    return {
        "required": [field.name for field in fields(target) if field.default is MISSING],
        "optional": optional,
        "order of the optional": [name for name in optional if name in own],
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


def _builder_facts(target: Any) -> dict[str, Any]:
    names, device = ["layer"], torch.device("cpu")
    config = SimpleNamespace(speculative_config=None)
    one = _builder_of(target)("spec", names, config, device)
    return {
        "abstract methods": sorted(target.__abstractmethods__),
        "made without them": _or_raised(lambda: bool(target("spec", names, config, device))),
        "subscriptable": _or_raised(lambda: bool(target[int])),
        "arguments are kept": [one.kv_cache_spec, one.layer_names is names, one.vllm_config is config, one.device],
        "reorder_batch_threshold": target.reorder_batch_threshold,
        "build_for_cudagraph_capture": one.build_for_cudagraph_capture("metadata"),
        "build_for_drafting": one.build_for_drafting("metadata", 3),
    }


def _level(target: Any) -> str:
    """Return the attribute's name, or that of the class method's result that replaces it in newer versions."""
    if hasattr(target, "cudagraph_support"):
        return target.cudagraph_support.name  # type: ignore[no-any-return]
    return target.get_cudagraph_support(SimpleNamespace(), SimpleNamespace()).name  # type: ignore[no-any-return]


def _cascade(target: Any) -> Any:
    one = _builder_of(target)("spec", [], None, torch.device("cpu"))
    return one.use_cascade_attention(512, np.array([1, 1]), 8, 2, False, False, False, 108)


def _threshold(arguments: tuple[Any, ...], vllm_config: Any) -> Callable[[Any], dict[str, Any]]:
    def read(target: Any) -> dict[str, Any]:
        one = _builder_of(target)("spec", [], vllm_config, torch.device("cpu"))
        one._init_reorder_batch_threshold(*arguments)
        return {"of the instance": one.reorder_batch_threshold, "of the class": type(one).reorder_batch_threshold}

    return read


def _config(speculative: int | None, *, ranks: int = 1, parallel_drafting: bool = False) -> SimpleNamespace:
    """Return the config that the threshold depends on; ``speculative`` of -1 means no speculative config."""
    tokens = SimpleNamespace(num_speculative_tokens=speculative, parallel_drafting=parallel_drafting)
    return SimpleNamespace(
        speculative_config=None if speculative == -1 else tokens,
        parallel_config=SimpleNamespace(decode_context_parallel_size=ranks),
        use_v2_model_runner=not parallel_drafting,
    )


THRESHOLD_ROWS: tuple[tuple[tuple[Any, ...], str, SimpleNamespace | None, str], ...] = (
    ((), "no speculative config", _config(-1), ""),
    ((1, True), "3 speculative tokens", _config(3), ""),
    ((4, True), "1 speculative token", _config(1), ""),
    ((2, False), "7 speculative tokens", _config(7), ""),
    ((None, True), "3 speculative tokens", _config(3), ""),
    ((1, True), "None speculative tokens", _config(None), ""),
    ((1, True), "0 speculative tokens", _config(0), ""),
    ((3, True), "no speculative config", _config(-1), ""),
    ((None, True), "the config not to be looked at", None, "config not needed"),
    ((2, False), "the config not to be looked at", None, "config not needed"),
    ((4, False), "two ranks of decode context parallelism", _config(-1, ranks=2), "context parallelism"),
    ((None, False), "two ranks of decode context parallelism", _config(-1, ranks=2), "context parallelism"),
    ((1, True), "3 tokens drafted in parallel", _config(3, parallel_drafting=True), "parallel drafting"),
)
"""Arguments of ``_init_reorder_batch_threshold``, the builder's config in words and as an object, and the tag."""


def _builders(_: SubjectSetting) -> Iterator[SubjectCall]:
    yield subject_call("its methods and attributes", read=_builder_facts)
    yield subject_call("cudagraph_support", read=_level)
    yield subject_call("use_cascade_attention", "use_cascade_attention", read=_cascade)
    for arguments, words, config, tag in THRESHOLD_ROWS:
        text = f"_init_reorder_batch_threshold{arguments}, {words}"
        yield subject_call(text, tag, read=_threshold(arguments, config))


def _read(target: Any, *, read: Callable[[Any], Any]) -> Any:
    return read(target)


def _names_and_defaults(target: Any) -> list[Any]:
    return [[name, default] for name, _, default in target]


CONTRACT = (
    Subject("AttentionCGSupport", _once("its members"), _levels, is_function=False),
    Subject("CommonAttentionMetadata", _metadata_fields, _fields, is_function=False),
    Subject("AttentionMetadataBuilder", _builders, _read, is_function=False),
    Subject("KVSharingFastPrefillMetadata", _protocol, _is_fast_prefill, is_function=False),
    Subject("PAD_SLOT_ID", _once("its value"), lambda target: target, is_function=False),
    Subject("KVCacheLayoutType", _once("its values"), get_args, is_function=False),
    Subject(
        "KV_SHARING_FAST_PREFILL_METADATA_FIELDS",
        _once("names and defaults"),
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
    def call(*starts: int, tags: tuple[str, ...] = ()) -> SubjectCall:
        given = torch.tensor(starts, dtype=torch.int32, device=setting.device)
        text = f"start locations {' '.join(map(str, starts)) or 'none'}"
        return subject_call(text, *tags, refused=bool(tags), query_start_loc_p=given)

    for batch in setting.batches:
        yield subject_call(batch, query_start_loc_p=batch.offsets().to(setting.device))
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
    def call(about: object, lens: Tensor, size: int, rank: Any, stripe: int, *tags: str) -> SubjectCall:
        return subject_call(
            about,
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
            yield call(batch, lens, size, rank, stripe)
        yield call(f"{batch}, the rank as a tensor", lens, 4, one, 2)
        yield subject_call(batch, seq_lens=lens)
    for length, size, rank, stripe in IMPOSSIBLE:
        yield call(f"length {length}", one * length, size, rank, stripe, "malformed")
    yield call("length 5, the rank as a tensor", one * 5, 1, one, 1, "malformed")


def _numbered(*shape: int) -> Tensor:
    """Return a tensor whose elements all differ, so that a wrong order shows."""
    return torch.arange(math.prod(shape), dtype=torch.float32).view(shape)


def _viewed(target: Any, **arguments: Any) -> dict[str, Any]:
    """Return the result, which is a view, since callers write through it, and its strides."""
    made = target(**arguments)
    return {"result": made, "strides": list(made.stride())}


QUERIES: tuple[tuple[tuple[int, ...], int, bool], ...] = (
    ((6, 2, 8), 3, False),
    ((4, 2, 8), 1, False),
    ((0, 2, 8), 3, False),
    ((8, 1, 4), 8, False),
    ((7, 2, 8), 3, True),
    ((7, 8), 7, True),
    ((7, 2, 8), 0, True),
)
"""Shape of the queries, batch size, and whether they must be refused."""


def _queries(setting: SubjectSetting) -> Iterator[SubjectCall]:
    for shape, size, refused in QUERIES:
        query = _numbered(*shape).to(setting.device)
        yield subject_call(list(shape), refused=refused, query=query, batch_size=size)
    half = _numbered(6, 2, 16).to(setting.device)[..., :8]
    yield subject_call("[6, 2, 8], half of wider rows", query=half, batch_size=3)


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
        about: object, lens: Tensor, mode: str, page: int, drafts: int, width: int, *, refused: bool = False
    ) -> SubjectCall:
        return subject_call(
            f"{about}, blocks of {page}, {drafts} speculative blocks, {width} columns",
            refused=refused,
            block_table=_numbered(len(lens), width).to(setting.device, torch.int32),
            seq_lens=lens,
            kv_cache_spec=SimpleNamespace(block_size=page, num_speculative_blocks=drafts),
            mamba_cache_mode=mode,
        )

    for batch in setting.batches:
        lens, page = batch.metadata(setting.device).seq_lens, batch.block_size
        blocks = max(1, -(-max(batch.seq_lens) // page))
        yield call(batch, lens, "none", page, 1, 2)
        for drafts in (0, 2):
            yield call(batch, lens, "align", page, drafts, blocks + drafts)
            yield call(batch, lens, "align", page, drafts, blocks + drafts + 3)
    lens = torch.tensor([9], dtype=torch.int32, device=setting.device)
    yield call("length 9", lens, "align", 4, 1, 3, refused=True)


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
                f"{batch}, {text}", mm_prefix_range=ranges, num_seqs=batch.num_reqs, device=setting.device
            )


def _range_rows(setting: SubjectSetting) -> Iterator[SubjectCall]:
    for batch in setting.batches:
        fitting = [(text, ranges, batch.num_tokens + batch.num_reqs % 3) for text, ranges in _prefix_ranges(batch)]
        for text, ranges, rows in [*fitting, ("a range of all", {0: [(0, 99)]}, batch.num_tokens - 1)]:
            yield subject_call(
                f"{batch}, {text}, a buffer of {rows} rows",
                refused=rows < batch.num_tokens,
                out=np.full((rows, 2), 77, dtype=np.int32),
                mm_prefix_range=ranges,
                query_start_loc_cpu=batch.offsets(),
                seq_lens_cpu=batch.metadata(torch.device("cpu")).seq_lens_cpu,
            )


KERNELS = (
    Subject("compute_causal_conv1d_metadata", _conv1d, _programs),
    Subject("mamba_get_block_table_tensor", _state_blocks),
    Subject("get_dcp_local_seq_lens", _local_lens),
    Subject("compute_mm_prefix_range_tensor", _range_tables),
    Subject("fill_mm_prefix_query_ranges", _range_rows),
    Subject("reshape_query_for_spec_decode", _queries, _viewed),
    Subject("reshape_attn_output_for_spec_decode", _outputs, _viewed),
)


# Questions about layers: their parameters for a plan step, and classes derived from their backends and metadata.

Layer = tuple[Any, ...]
"""Constructor arguments of one layer's parameters: window, cap, scale, sinks, verdicts."""


ONE_FIELD_APART: tuple[Layer, ...] = (
    (1, None, 0.5),
    (2, None, 0.5),
    (1, 30.0, 0.5),
    (1, 0.0, 0.5),
    (1, None, 0.25),
    (1, None, 0.5, True),
)
"""A layer, and layers that differ from it in one field."""


def _parameter_facts(target: Any, *, arguments: Layer) -> dict[str, Any]:
    one = target(*arguments)
    first, *others = ONE_FIELD_APART
    by_name = dict(zip(("window_left", "logits_soft_cap", "sm_scale"), first, strict=True))
    return {
        "fields": one,
        "equals": {str(other): one == target(*other) for other in (first, *others)},
        "by keyword": target(**by_name),
    }


def _parameters(_: SubjectSetting) -> Iterator[SubjectCall]:
    for arguments in [(1, None, 0.5), (1, None, 0.5, False, True, False), (1, 0.0, 0.5), (-1, 30.0, 0.125, True)]:
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
    "e": Impl(sliding_window=None, logits_soft_cap=None, scale=0.5, sinks=()),
    "without a scale": Impl(sliding_window=(3, 0)),
    "of another class": OtherImpl(),
    "with a window that is no pair": Impl(sliding_window=127, scale=0.5),
}


LAYER_ROWS: tuple[tuple[tuple[str, ...], str, bool], ...] = (
    (("c", "no attention", "a", "b"), "", False),
    (("d", "e"), "", False),
    ((), "", False),
    (("a", "unknown"), "an unknown layer", True),
    (("without a scale",), "", True),
    (("of another class",), "", True),
    (("with a window that is no pair",), "", True),
)
"""Names of layers, the tag, and whether they must be refused."""


def _layers(_: SubjectSetting) -> Iterator[SubjectCall]:
    context = {name: SimpleNamespace(impl=impl) for name, impl in IMPLS.items()} | {"no attention": SimpleNamespace()}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
    for names, tag, refused in LAYER_ROWS:
        text = f"layers {', '.join(names) or 'none'}"
        yield subject_call(text, tag, refused=refused, vllm_config=config, layer_names=list(names), cls_=Impl)


def _in_order(target: Any, **arguments: Any) -> dict[str, Any]:
    made = target(**arguments)
    return {"layers": made, "in order": list(made)}


GROUPS: tuple[tuple[Layer, ...], ...] = (
    ((127, None, 0.5), (127, None, 0.5)),
    ((127, None, 0.5), (127, 30.0, 0.5)),
    ((-1, None, 0.5, True), (127, None, 0.5)),
    ((127, None, 0.5), (63, None, 0.5)),
    ((-1, 30.0, 0.5, True),),
    ((127, None, 0.5), (127, None, 0.5, False, True, False), (127, None, 0.25)),
    (),
)


def _groups(_: SubjectSetting) -> Iterator[SubjectCall]:
    first, *others = ONE_FIELD_APART
    unequal = (group for other in others for group in ((first, other), (other, first, first), (first, first, other)))
    for group in (*GROUPS, *unequal):
        entries = {f"layer {number}": PerLayerParameters(*layer) for number, layer in enumerate(group)}
        text = " and ".join(map(str, group)) or "no layer"
        yield subject_call(text, refused=not group, per_layer_params=entries)


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
    return {
        "name": one.__name__,
        "bases": list(one.__bases__),
        "builder": one.get_builder_cls(),
        "builder, on an instance": _or_raised(one().get_builder_cls),
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
    rows: tuple[tuple[str, type, list[tuple[str, Any, Any]], tuple[int, ...]], ...] = (
        ("Fast", two, FAST, (1,)),
        ("", two, [], (5,)),
        ("Fast", one, [("a", int, 7)], ()),
        ("Fast", int, FAST, ()),
    )
    for prefix, base, added, values in rows:
        yield subject_call(
            f"{base.__name__}({', '.join(_fields_of(base))}), adding {', '.join(name for name, _, _ in added)}",
            refused=not is_dataclass(base),
            name_prefix=prefix,
            metadata_cls=base,
            fields=added,
            values=values,
        )


LAYERS = (
    Subject("PerLayerParameters", _parameters, _parameter_facts, is_function=False),
    Subject("get_per_layer_parameters", _layers, _in_order),
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


GET, CLEAR = ("get", None), ("clear", None)


def _walks(*walks: tuple[Step, ...]) -> Callable[[SubjectSetting], list[SubjectCall]]:
    texts = [", ".join(f"{action} {value!r}" for action, value in steps) for steps in walks]
    return lambda _: [subject_call(text, steps=list(steps)) for text, steps in zip(texts, walks, strict=True)]


RESOLUTIONS = _walks(
    (GET,),
    (("environment", "HND"), GET, ("set", "NHD"), GET, CLEAR, GET),
    (("set", "NHD"), ("environment", "nhd"), GET),
    (("environment", "nhd"), GET, ("environment", "HND"), GET),
    (("environment", ""), GET),
)

OVERRIDES = _walks(
    (("set", "HND"), GET),
    (("set", "HND"), ("set", None), GET),
    (("set", "LBNHC"), GET),
)


def _values(_: SubjectSetting) -> Iterator[SubjectCall]:
    for value in ("NHD", "HND", "nhd", "", "LBNHC", " NHD"):
        yield subject_call("is it valid", value=value)


LAYOUT = (
    Subject("is_valid_kv_cache_layout", _values),
    Subject("get_kv_cache_layout", RESOLUTIONS, _walk, helpers=("set_kv_cache_layout",), is_function=False),
    Subject(
        "set_kv_cache_layout",
        OVERRIDES,
        lambda put, get, steps: _walk(get, put, steps=steps),
        helpers=("get_kv_cache_layout",),
    ),
)
