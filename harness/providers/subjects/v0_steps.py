"""Questions about the first generation, one step at a time: the metadata builder, the state of captured graphs."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from attncheck.harness.providers.questions import Subject, SubjectCall, SubjectSetting, subject_call

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
    def call(
        text: str, groups: Sequence[Any], arguments: tuple[Any, ...], *, chunked: bool = False, **options: Any
    ) -> SubjectCall:
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
            chunked_prefill_enabled=chunked,
        )
        refused = options.get("refused", False)
        return subject_call(text, refused=refused, input_builder=input_builder, arguments=arguments)

    image = SimpleNamespace(src_ranges=[range(2)], src_len=2, dest_ranges=[range(1, 3)], dest_len=3)
    prompts = [_group(PROMPT, prompt=True), _group(CACHED, prompt=True, hit=True, maps={"image": image})]
    mixed = ([6, 11, 9, 14], [6, 3, 1, 1], -1, 4)
    yield call("two prompts and two decodes", [*prompts, _group(*DECODES)], mixed)
    yield call("the same, prefill in chunks", [*prompts, _group(*DECODES)], mixed, chunked=True)
    yield call("two decodes under a window", [_group(*DECODES, window=2)], ([8, 8], [1, 1], -1, 2), window=8)
    yield call("a prompt under a window", [_group((10, 10, 0, [3, 8, 1]), prompt=True)], ([10], [10], -1, 1), window=4)
    yield call("two decodes in a graph of four", [_group(*DECODES)], ([9, 14, 1, 1], [1, 1], 2, 4))
    yield call("two decodes in a graph of two", [_group(*DECODES)], ([9, 14], [1, 1], 0, 2))
    for tables in (None, {10: None}):
        text = f"a prompt whose tables are {tables}"
        yield call(text, [_group((10, 5, 0, []), prompt=True, tables=tables)], ([5], [5], -1, 1))
    yield call("a decode of two tokens", [_group((20, 9, 7, [2, 0, 5]))], ([9], [2], -1, 1), refused=True)


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


def _captures(setting: SubjectSetting) -> Iterator[SubjectCall]:
    def call(name: str, sizes: list[int], *, encoder: bool = False, refused: bool = False) -> SubjectCall:
        runner = SimpleNamespace(
            device=setting.device,
            graph_block_tables=np.arange(90, 110, dtype=np.int32).reshape(4, 5),
            max_seq_len_to_capture=2048,
            attn_backend=GraphStateBackend(name),
            get_max_block_per_batch=_three,
        )
        return subject_call(
            f"sizes {sizes} of {name}{' with an encoder' if encoder else ''}",
            refused=refused,
            runner=runner,
            sizes=sizes,
            step=_step(sizes[0], setting.device),
            encoder=encoder,
        )

    yield call("XFORMERS", [4, 2, 1])
    yield call("OTHER", [3])
    yield call("FLASH_ATTN", [4, 2], encoder=True)
    yield call("ROCM_FLASH", [4, 2], encoder=True, refused=True)
    yield call("OTHER", [2], encoder=True, refused=True)


def _three() -> int:
    return 3


v0 = partial(Subject, generation="v0", is_function=False)

SUBJECTS = (
    v0("CommonMetadataBuilder", _builds, _build),
    v0("CommonAttentionState", _captures, _capture),
)
