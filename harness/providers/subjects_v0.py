"""Subjects of the v0 utilities: sequences and steps."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from attncheck.harness.providers.provider import Subject, SubjectCall, SubjectSetting, subject_call

# Questions about the first generation, one sequence at a time: slots, placeholder maps, selectors, sizes of MLA.

SEQUENCES = 4
"""Number of sequences of each batch that get a question each."""


def _empty_tables(_: SubjectSetting) -> Iterator[SubjectCall]:
    given: list[Any] = [None, {}, {3: None}, {3: None, 4: None}, {3: [0]}, {3: []}, {3: None, 4: [1]}, [], "tables"]
    for tables in given:
        yield subject_call(repr(tables), block_tables=tables)


def _starts(_: SubjectSetting) -> Iterator[SubjectCall]:
    lengths = [(True, 10, 0), (False, 10, 0), (True, 10, 32), (False, 1, 40)]
    for (is_prompt, new, context), window in product(lengths, (None, 1, 8, 10, 64)):
        yield subject_call("a sequence", is_prompt=is_prompt, query_len=new, context_len=context, sliding_window=window)


def _slots(setting: SubjectSetting) -> Iterator[SubjectCall]:
    def call(about: str, lens: tuple[int, int, int], block_size: int, tables: Any, **options: Any) -> SubjectCall:
        seq_len, context_len, start_idx = lens
        return subject_call(
            about,
            refused=options.get("refused", False),
            is_profile_run=options.get("profile", False),
            slot_mapping=[7],
            seq_id=3,
            seq_len=seq_len,
            context_len=context_len,
            start_idx=start_idx,
            block_size=block_size,
            block_tables=tables,
        )

    for batch in setting.batches:
        tables = batch.metadata(setting.device).block_table_tensor.tolist()
        lengths = zip(batch.query_lens, batch.seq_lens, strict=True)
        for row, (new, total) in enumerate(list(lengths)[:SEQUENCES]):
            for start in dict.fromkeys((0, total - new // 2, total - new - 1)):
                if start >= 0:
                    lens = (total, total - new, start)
                    yield call(f"{batch}, request {row}", lens, batch.block_size, {3: tables[row], 9: None})
    long = list(range(50, 120))
    for count in (254, 255, 256, 257, 1000):
        yield call("long table", (count, 0, 0), 16, {3: long})
    for context, start in ((16, 16), (17, 0), (256, 272), (320, 512)):
        yield call("long table behind context", (1024, context, start), 16, {3: long})
    yield call("cyclic table", (10, 0, 2), 4, {3: [7, 2, 7]})
    yield call("profile run", (5, 2, 0), 4, None, profile=True)
    unfit: dict[str, Any] = {"a short table": {3: [7, 2]}, "no table": {3: None}, "another's table": {4: [1]}}
    for what, given in unfit.items():
        yield call(what, (10, 0, 0), 4, given, refused=True)


def _spans(_: SubjectSetting) -> Iterator[SubjectCall]:
    table = [11, 2, 5, *range(50, 90)]
    for start, end, size in [(0, 10, 4), (6, 10, 4), (4, 12, 4), (5, 5, 4), (0, 320, 16), (16, 336, 16), (3, 7, 1)]:
        yield subject_call(
            "positions", slot_mapping=[7], block_table=table, range_start=start, range_end=end, block_size=size
        )


def _map(src: list[range], src_len: int, dest: list[range], dest_len: int) -> SimpleNamespace:
    return SimpleNamespace(src_ranges=src, src_len=src_len, dest_ranges=dest, dest_len=dest_len)


ONE = _map([range(2)], 2, [range(1, 3)], 5)
OTHER = _map([range(1, 4)], 4, [range(3)], 3)


def _extend(target: Any, *, others: list[Any]) -> dict[str, Any]:
    made = target()
    for other in others:
        made.extend(other)
    state = {name: getattr(made, name) for name in ("src_ranges", "src_len", "dest_ranges", "dest_len")}
    return {**state, "index map": made.index_map()}


def _maps(_: SubjectSetting) -> Iterator[SubjectCall]:
    yield subject_call("an empty map", others=[])
    yield subject_call("one map", others=[ONE])
    yield subject_call("two maps", others=[ONE, OTHER])
    yield subject_call("two rows for three", refused=True, others=[_map([range(2)], 2, [range(3)], 5)])


TYPES = ("decoder", "encoder", "encoder_only", "encoder_decoder")

METADATA: dict[str, Any] = {
    "num_prefill_tokens": 12,
    "num_decode_tokens": 3,
    "num_encoder_tokens": 20,
    "seq_lens_tensor": "lengths",
    "max_prefill_seq_len": 12,
    "max_decode_seq_len": 40,
    "block_tables": "tables",
    "encoder_seq_lens": [],
    "encoder_seq_lens_tensor": "encoder lengths",
    "max_encoder_seq_len": 0,
    "cross_slot_mapping": "cross slots",
    "cross_block_tables": "cross tables",
    "is_all_encoder_attn_metadata_set": True,
}


def _metadata(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**METADATA, **changes})


def _token_counts(_: SubjectSetting) -> Iterator[SubjectCall]:
    for kind in TYPES:
        yield subject_call("all counts", attn_metadata=_metadata(), attn_type=kind)
    for kind in ("decoder", "encoder", "encoder_decoder"):
        uncounted = _metadata(num_encoder_tokens=None)
        yield subject_call(
            "no count of encoder tokens", refused=kind != "decoder", attn_metadata=uncounted, attn_type=kind
        )


def _lengths_and_tables(_: SubjectSetting) -> Iterator[SubjectCall]:
    for kind, is_prompt in product(TYPES, (True, False)):
        refused = kind == "encoder_only"
        yield subject_call("a step", refused=refused, attn_metadata=_metadata(), is_prompt=is_prompt, attn_type=kind)


def _presence(_: SubjectSetting, names: tuple[str, ...]) -> Iterator[SubjectCall]:
    yield subject_call("all there", attn_metadata=_metadata())
    for name in names:
        missing = False if name.startswith("is_") else None
        yield subject_call(f"{name} is {missing}", attn_metadata=_metadata(**{name: missing}))


ENCODER = ("encoder_seq_lens", "encoder_seq_lens_tensor", "max_encoder_seq_len")
CROSS = ("is_all_encoder_attn_metadata_set", "cross_slot_mapping", "cross_block_tables")

SIZES = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 96}


def _mla_configs(_: SubjectSetting) -> Iterator[SubjectCall]:
    for rank in ({}, {"q_lora_rank": None}, {"q_lora_rank": 1536}):
        config = SimpleNamespace(hf_text_config=SimpleNamespace(**SIZES, **rank), hf_config=SimpleNamespace())
        yield subject_call(f"{rank or 'no q_lora_rank'}", model_config=config)
    config = SimpleNamespace(hf_text_config=SimpleNamespace(kv_lora_rank=512))
    yield subject_call("a size is missing", refused=True, model_config=config)


def _dims(target: Any, *, sizes: tuple[int | None, ...]) -> dict[str, Any]:
    return {"fields": target(*sizes), "equal to its twin": target(*sizes) == target(*sizes)}


def _mla_dims(_: SubjectSetting) -> Iterator[SubjectCall]:
    for rank in (None, 1536):
        yield subject_call(f"by position, q_lora_rank {rank}", sizes=(rank, 512, 128, 64, 96))


v0 = partial(Subject, generation="v0")

V0_SEQUENCES = (
    v0("is_block_tables_empty", _empty_tables),
    v0("compute_slot_mapping_start_idx", _starts),
    v0("compute_slot_mapping", _slots),
    v0("_compute_slot_mapping_python", _spans),
    v0("_compute_slot_mapping_numpy", _spans),
    v0("MultiModalPlaceholderMap", _maps, _extend, is_function=False),
    v0("get_num_prefill_decode_query_kv_tokens", _token_counts),
    v0("get_seq_len_block_table_args", _lengths_and_tables),
    v0("is_all_encoder_attn_metadata_set", partial(_presence, names=ENCODER)),
    v0("is_all_cross_attn_metadata_set", partial(_presence, names=CROSS)),
    v0("MLADims", _mla_dims, _dims, is_function=False),
    v0("get_mla_dims", _mla_configs),
)


# Questions about the first generation, one step at a time: the metadata builder, the state of captured graphs.

Row = tuple[int, int, int, Sequence[int]]
"""A sequence: id, length, context length, block table."""

PROMPT: Row = (10, 6, 0, [3, 8])
CACHED: Row = (11, 11, 8, [1, 4, 9])
DECODES: tuple[Row, ...] = ((20, 9, 8, [2, 0, 5]), (21, 14, 13, [6, 7, 11, 12]))


def _group(*rows: Row, prompt: bool = False, hit: bool = False, window: int = 0, **more: Any) -> SimpleNamespace:
    """Return the scheduler's data of one group; ``window`` limits lengths and tables to this many blocks of 4."""
    lens = [length for _, length, _, _ in rows]
    new = [length - context for _, length, context, _ in rows]
    return SimpleNamespace(
        is_prompt=prompt,
        prefix_cache_hit=hit,
        block_tables=more.get("tables", {name: table for name, _, _, table in rows}),
        multi_modal_placeholder_maps=more.get("maps"),
        seq_ids=[name for name, _, _, _ in rows],
        input_tokens=[[7] * count for count in new],
        orig_seq_lens=lens,
        seq_lens=[min(length, 4 * window) for length in lens] if window else lens,
        query_lens=new,
        context_lens=[context for _, _, context, _ in rows],
        curr_sliding_window_blocks=[window] * len(rows),
    )


def _build(target: Any, *, input_builder: SimpleNamespace, arguments: tuple[Any, ...]) -> Any:
    """Run two steps of one builder, since nothing of the first may remain in the second; return the latter."""

    class Builder(target):  # type: ignore[misc]
        _metadata_cls = SimpleNamespace

    builder = Builder(input_builder)
    for _ in range(2):
        builder.prepare()
        metadata = builder.build(*arguments)
    return metadata


def _builds(setting: SubjectSetting) -> Iterator[SubjectCall]:
    def call(text: str, groups: Sequence[Any], *arguments: Any, refused: bool = False, **options: Any) -> SubjectCall:
        runner = SimpleNamespace(
            device=setting.device,
            pin_memory=False,
            graph_block_tables=np.arange(90, 110, dtype=np.int32).reshape(4, 5),
        )
        input_builder = SimpleNamespace(
            runner=runner,
            sliding_window=options.get("window"),
            block_size=4,
            inter_data_list=list(groups),
            chunked_prefill_enabled=options.get("chunked", False),
        )
        return subject_call(text, refused=refused, input_builder=input_builder, arguments=arguments)

    image = SimpleNamespace(src_ranges=[range(2)], src_len=2, dest_ranges=[range(1, 3)], dest_len=3)
    prompts = [_group(PROMPT, prompt=True), _group(CACHED, prompt=True, hit=True, maps={"image": image})]
    mixed = [*prompts, _group(*DECODES)]
    yield call("two prompts and two decodes", mixed, [6, 11, 9, 14], [6, 3, 1, 1], -1, 4)
    yield call("the same, prefill in chunks", mixed, [6, 11, 9, 14], [6, 3, 1, 1], -1, 4, chunked=True)
    yield call("two decodes under a window", [_group(*DECODES, window=2)], [8, 8], [1, 1], -1, 2, window=8)
    yield call("a prompt under a window", [_group((10, 10, 0, [3, 8, 1]), prompt=True)], [10], [10], -1, 1, window=4)
    yield call("two decodes in a graph of four", [_group(*DECODES)], [9, 14, 1, 1], [1, 1], 2, 4)
    yield call("two decodes in a graph of two", [_group(*DECODES)], [9, 14], [1, 1], 0, 2)
    for tables in (None, {10: None}):
        without = _group((10, 5, 0, []), prompt=True, tables=tables)
        yield call(f"a prompt whose tables are {tables}", [without], [5], [5], -1, 1)
    yield call("a decode of two tokens", [_group((20, 9, 7, [2, 0, 5]))], [9], [2], -1, 1, refused=True)


class GraphStateBackend:
    """A backend with the methods that the graph state calls; metadata with decodes only are their own decode part."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get_name(self) -> str:
        """Return the name, which the state reads if a model has an encoder."""
        return self.name

    def make_metadata(self, **keywords: Any) -> SimpleNamespace:
        """Return the keywords as attributes."""
        return SimpleNamespace(**keywords)


def _capture(target: Any, *, runner: SimpleNamespace, sizes: list[int], step: Any, encoder: bool) -> dict[str, Any]:
    """Capture every size, the largest first, then refill the buffers of the largest as a replay would."""
    state = target(runner)
    captured = []
    with state.graph_capture(max(sizes)):
        for size in sizes:
            metadata = state.graph_capture_get_metadata_for_batch(size, is_encoder_decoder_model=encoder)
            seen = SimpleNamespace(**vars(metadata), decode_metadata=metadata)
            buffers = state.get_graph_input_buffers(seen, is_encoder_decoder_model=encoder)
            captured.append((metadata, buffers))
        clone = state.graph_clone(sizes[-1])
    before = deepcopy([[vars(metadata), buffers] for metadata, buffers in captured])
    (_, largest), (smallest, _) = captured[0], captured[-1]
    state.prepare_graph_input_buffers(largest, step, is_encoder_decoder_model=encoder)
    return {
        "captured": before,
        "clone": [type(clone) is type(state), clone._is_graph_capturing],
        "after the refill": largest,
        "the smallest size sees it": [smallest.seq_lens_tensor, smallest.block_tables],
        "is capturing": state._is_graph_capturing,
        "does nothing": state.begin_forward(None),
    }


def _step(size: int, device: torch.device) -> SimpleNamespace:
    """Return the metadata of a step with ``size`` decodes, which is its own decode part."""
    ints = partial(torch.tensor, dtype=torch.int32, device=device)
    step = SimpleNamespace(
        seq_lens_tensor=ints([9, 14, 3, 1][:size]),
        block_tables=ints(np.arange(20).reshape(4, 5)[:size]),
        encoder_seq_lens_tensor=ints([5, 6, 7, 8][:size]),
        cross_slot_mapping=ints([]),
        cross_block_tables=ints(np.arange(12).reshape(4, 3)[:size]),
    )
    step.decode_metadata = SimpleNamespace(**vars(step))
    return step


CAPTURES: tuple[tuple[str, list[int], bool, bool], ...] = (
    ("XFORMERS", [4, 2, 1], False, False),
    ("OTHER", [3], False, False),
    ("FLASH_ATTN", [4, 2], True, False),
    ("ROCM_FLASH", [4, 2], True, True),
    ("OTHER", [2], True, True),
)
"""Name of the backend, sizes of the graphs, whether the model has an encoder, and whether it must be refused."""


def _captures(setting: SubjectSetting) -> Iterator[SubjectCall]:
    for name, sizes, encoder, refused in CAPTURES:
        runner = SimpleNamespace(
            device=setting.device,
            graph_block_tables=np.arange(90, 110, dtype=np.int32).reshape(4, 5),
            max_seq_len_to_capture=2048,
            attn_backend=GraphStateBackend(name),
            get_max_block_per_batch=_three,
        )
        step = _step(sizes[0], setting.device)
        text = f"sizes {sizes} of {name}"
        yield subject_call(text, refused=refused, runner=runner, sizes=sizes, step=step, encoder=encoder)


def _three() -> int:
    return 3


v0_class = partial(Subject, generation="v0", is_function=False)

V0_STEPS = (
    v0_class("CommonMetadataBuilder", _builds, _build),
    v0_class("CommonAttentionState", _captures, _capture),
)
