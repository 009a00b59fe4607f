"""Questions about the first generation, one sequence at a time: slots, placeholder maps, selectors, sizes of MLA."""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

from attncheck.harness.providers.questions import Subject, SubjectCall, SubjectSetting, subject_call

SEQUENCES = 4
"""Number of sequences of each batch that get a question each."""


def _empty_tables(_: SubjectSetting) -> Iterator[SubjectCall]:
    given: list[Any] = [None, {}, {3: None}, {3: None, 4: None}, {3: [0]}, {3: []}, {3: None, 4: [1]}, [], "tables"]
    for tables in given:
        yield subject_call(repr(tables), block_tables=tables)


def _starts(_: SubjectSetting) -> Iterator[SubjectCall]:
    for is_prompt, new, context in [(True, 10, 0), (False, 10, 0), (True, 10, 32), (False, 1, 40)]:
        for window in (None, 1, 8, 10, 64):
            yield subject_call(
                f"{'prompt' if is_prompt else 'decode'}, {new} new behind {context}, window {window}",
                is_prompt=is_prompt,
                query_len=new,
                context_len=context,
                sliding_window=window,
            )


def _slots(setting: SubjectSetting) -> Iterator[SubjectCall]:
    def call(text: str, lens: tuple[int, int, int], block_size: int, tables: Any, **options: Any) -> SubjectCall:
        seq_len, context_len, start_idx = lens
        return subject_call(
            f"{text}: {seq_len} tokens, context {context_len}, from {start_idx}, blocks of {block_size}",
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
    yield call("cyclic table", (10, 0, 2), 4, {3: [7, 2, 7]})
    yield call("profile run", (5, 2, 0), 4, None, profile=True)
    unfit: dict[str, Any] = {"a short table": {3: [7, 2]}, "no table": {3: None}, "another's table": {4: [1]}}
    for what, given in unfit.items():
        yield call(what, (10, 0, 0), 4, given, refused=True)


def _spans(_: SubjectSetting) -> Iterator[SubjectCall]:
    for start, end, size in [(0, 10, 4), (6, 10, 4), (9, 10, 4), (5, 5, 4), (0, 320, 16), (3, 7, 1)]:
        yield subject_call(
            f"positions {start} to {end}, blocks of {size}",
            slot_mapping=[7],
            block_table=[11, 2, 5, *range(50, 90)],
            range_start=start,
            range_end=end,
            block_size=size,
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
        yield subject_call(kind, attn_metadata=_metadata(), attn_type=kind)
    yield subject_call("decoder, no encoder", attn_metadata=_metadata(num_encoder_tokens=None), attn_type="decoder")
    for kind in ("encoder", "encoder_decoder"):
        text = f"{kind}, no count of its tokens"
        yield subject_call(text, refused=True, attn_metadata=_metadata(num_encoder_tokens=None), attn_type=kind)


def _lengths_and_tables(_: SubjectSetting) -> Iterator[SubjectCall]:
    for kind in ("decoder", "encoder", "encoder_decoder", "encoder_only"):
        for is_prompt in (True, False):
            yield subject_call(
                f"{kind}, {'prompt' if is_prompt else 'decode'}",
                refused=kind == "encoder_only",
                attn_metadata=_metadata(),
                is_prompt=is_prompt,
                attn_type=kind,
            )


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

SUBJECTS = (
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
