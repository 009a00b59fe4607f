"""A scheduler and a model runner as first-generation code sees them: plain namespaces, and the batches of the tests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from attncheck.reference.v0 import CommonMetadataBuilder


@dataclass(frozen=True)
class Seq:
    """One sequence of a group; ``windowed`` is its length under the sliding window, by default the whole."""

    seq_id: int
    seq_len: int
    context_len: int
    table: Sequence[int] | None
    windowed: int | None = None
    window_blocks: int = 0


def _group(is_prompt: bool, *seqs: Seq, hit: bool = False, maps: Any = None, tables: Any = ...) -> SimpleNamespace:
    query_lens = [seq.seq_len - seq.context_len for seq in seqs]
    return SimpleNamespace(
        is_prompt=is_prompt,
        prefix_cache_hit=hit,
        block_tables={seq.seq_id: seq.table for seq in seqs} if tables is ... else tables,
        multi_modal_placeholder_maps=maps,
        seq_ids=[seq.seq_id for seq in seqs],
        input_tokens=[[7] * length for length in query_lens],
        orig_seq_lens=[seq.seq_len for seq in seqs],
        seq_lens=[seq.seq_len if seq.windowed is None else seq.windowed for seq in seqs],
        query_lens=query_lens,
        context_lens=[seq.context_len for seq in seqs],
        curr_sliding_window_blocks=[seq.window_blocks for seq in seqs],
    )


class Builder(CommonMetadataBuilder):
    """Metadata that is nothing but the keywords it was given."""

    _metadata_cls = SimpleNamespace


def _builder(
    *groups: SimpleNamespace,
    window: int | None = None,
    chunked: bool = False,
    array: Any = None,
    device: str = "cpu",
    kind: type[CommonMetadataBuilder] = Builder,
) -> Any:
    runner = SimpleNamespace(device=torch.device(device), pin_memory=False, graph_block_tables=array)
    return kind(
        SimpleNamespace(
            runner=runner,
            sliding_window=window,
            block_size=4,
            inter_data_list=list(groups),
            chunked_prefill_enabled=chunked,
        )
    )


def _image(src: range, src_len: int, dest: range, dest_len: int) -> SimpleNamespace:
    return SimpleNamespace(src_ranges=[src], src_len=src_len, dest_ranges=[dest], dest_len=dest_len)


@pytest.fixture(scope="session")
def seq() -> type[Seq]:
    return Seq


@pytest.fixture(scope="session")
def group() -> Callable[..., SimpleNamespace]:
    """``(is_prompt, *seqs, hit=False, maps=None, tables=...)``: one sequence group of the scheduler."""
    return _group


@pytest.fixture(scope="session")
def builder() -> Callable[..., Any]:
    """A builder over groups, blocks of 4, not yet prepared."""
    return _builder


@pytest.fixture(scope="session")
def image() -> Callable[[range, int, range, int], SimpleNamespace]:
    """``(src, src_len, dest, dest_len)``: a placeholder map of one range."""
    return _image


@pytest.fixture
def prompts() -> list[SimpleNamespace]:
    """Prompt A of 6 tokens; prompt B of 11 tokens, 8 of them cached, with an image."""
    maps = {"image": _image(range(2), 2, range(1, 3), 3)}
    return [
        _group(True, Seq(10, 6, 0, [3, 8])),
        _group(True, Seq(11, 11, 8, [1, 4, 9]), hit=True, maps=maps),
    ]


@pytest.fixture
def decodes() -> SimpleNamespace:
    """Two sequences that have come to 9 and 14 tokens."""
    return _group(False, Seq(20, 9, 8, [2, 0, 5]), Seq(21, 14, 13, [6, 7, 11, 12]))


@pytest.fixture
def array() -> np.ndarray:
    """A runner's 4 x 5 ``graph_block_tables``, 90 to 109: what earlier steps left."""
    return np.arange(90, 110, dtype=np.int32).reshape(4, 5)
