"""Capture and replay as a first-generation model runner plays them, over a kernel that reads what was captured.

The cache holds token ids. The kernel stores each new token in its slot and returns for every sequence the tokens it
finds through table and length, so that a wrong slot, length or row shows as a wrong history. Slots without a token are
poison. Tables grow, batches shrink and grow again, and stale table entries stay behind the rows.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attncheck.reference.v0 import AttentionMetadata, CommonAttentionState, CommonMetadataBuilder

BLOCK_SIZE = 4
SIZES = (4, 2, 1)
MAX_BLOCKS = 6
MAX_ENCODER_BLOCKS = 3
POISON = -999


@dataclass
class Metadata(AttentionMetadata):
    """What builder and capture pass, and the encoder's fields; the decode part holds views."""

    seq_lens: list[int] | None
    seq_lens_tensor: Tensor
    max_query_len: int
    max_prefill_seq_len: int
    max_decode_seq_len: int
    query_start_loc: Tensor | None
    seq_start_loc: Tensor | None
    context_lens_tensor: Tensor | None
    block_tables: Tensor
    use_cuda_graph: bool
    max_decode_query_len: int = 1
    encoder_seq_lens: Any = None
    encoder_seq_lens_tensor: Tensor | None = None
    max_encoder_seq_len: int | None = None
    num_encoder_tokens: int | None = None
    cross_slot_mapping: Tensor | None = None
    cross_block_tables: Tensor | None = None
    _decodes: Any = None

    @property
    def prefill_metadata(self):
        return self if self.num_prefills else None

    @property
    def decode_metadata(self):
        if self._decodes is None and self.num_decode_tokens:
            first = self.num_prefills
            self._decodes = SimpleNamespace(
                slot_mapping=self.slot_mapping[self.num_prefill_tokens :],
                seq_lens_tensor=self.seq_lens_tensor[first:],
                block_tables=self.block_tables[first:],
                encoder_seq_lens_tensor=self.encoder_seq_lens_tensor,
                cross_slot_mapping=self.cross_slot_mapping,
                cross_block_tables=self.cross_block_tables,
            )
        return self._decodes


class Builder(CommonMetadataBuilder[Metadata]):
    _metadata_cls = Metadata


@dataclass
class Sequence:
    seq_id: int
    tokens: list[int]
    table: list[int]
    encoder_tokens: list[int] = field(default_factory=list)
    encoder_table: list[int] = field(default_factory=list)


def read(cache: Tensor, table: Tensor, length: int) -> list[int]:
    return [int(cache[int(table[p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE]) for p in range(length)]


def kernel(cache: Tensor, tokens: Tensor, metadata: Any, slot_mapping: Tensor) -> list[list[int]]:
    """One decode a row: store, then answer with the history, and with the encoder's tokens if there are any."""
    for token, slot in zip(tokens.tolist(), slot_mapping.tolist(), strict=True):
        if slot >= 0:
            cache[slot] = token
    decodes = metadata.decode_metadata
    answers = [
        read(cache, table, length)
        for table, length in zip(decodes.block_tables, decodes.seq_lens_tensor.tolist(), strict=True)
    ]
    if decodes.cross_block_tables is not None:
        lengths = decodes.encoder_seq_lens_tensor.tolist()
        for answer, table, length in zip(answers, decodes.cross_block_tables, lengths, strict=True):
            answer.extend(read(cache, table, length))
    return answers


class GraphRunner:
    """One captured size: its state, its buffers, and a kernel bound to the tensors of the capture."""

    def __init__(self, state: Any, cache: Tensor, metadata: Metadata, is_encoder_decoder: bool) -> None:
        self.state, self.is_encoder_decoder = state, is_encoder_decoder
        self.tokens = torch.zeros(metadata.num_decode_tokens, dtype=torch.int64)
        self.replay = lambda: kernel(cache, self.tokens, metadata, metadata.slot_mapping)
        self.buffers = state.get_graph_input_buffers(metadata, is_encoder_decoder)
        self.addresses = {name: tensor.data_ptr() for name, tensor in self.buffers.items()}

    def run(self, tokens: list[int], metadata: Metadata) -> list[list[int]]:
        self.tokens[: len(tokens)] = torch.tensor(tokens)
        self.buffers["slot_mapping"].copy_(metadata.slot_mapping)
        self.state.prepare_graph_input_buffers(self.buffers, metadata, self.is_encoder_decoder)
        assert {name: tensor.data_ptr() for name, tensor in self.buffers.items()} == self.addresses
        return self.replay()


class ModelRunner:
    """The calls of a first-generation runner, in their order."""

    def __init__(self, is_encoder_decoder: bool = False) -> None:
        self.is_encoder_decoder = is_encoder_decoder
        self.device, self.pin_memory, self.max_seq_len_to_capture = torch.device("cpu"), False, BLOCK_SIZE * MAX_BLOCKS
        self.graph_block_tables = np.zeros((max(SIZES), MAX_BLOCKS), dtype=np.int32)
        self.attn_backend = SimpleNamespace(make_metadata=Metadata, get_name=lambda: "FLASH_ATTN")
        self.cache = torch.full((64 * BLOCK_SIZE,), POISON)
        self.free = list(range(63, 0, -1))
        self.source = SimpleNamespace(
            runner=self, sliding_window=None, block_size=BLOCK_SIZE, chunked_prefill_enabled=False, inter_data_list=[]
        )
        self.builder, self.state = Builder(self.source), CommonAttentionState(self)
        self.graphs: dict[int, GraphRunner] = {}
        self.capture()

    def get_max_block_per_batch(self) -> int:
        return MAX_ENCODER_BLOCKS

    def capture(self) -> None:
        with self.state.graph_capture(max(SIZES)):
            for size in SIZES:
                metadata = self.state.graph_capture_get_metadata_for_batch(size, self.is_encoder_decoder)
                metadata.enable_kv_scales_calculation = False
                clone = self.state.graph_clone(size)
                self.graphs[size] = GraphRunner(clone, self.cache, metadata, self.is_encoder_decoder)

    def prompt(self, seq_id: int, tokens: list[int], encoder_tokens: list[int]) -> Sequence:
        """A new sequence: its tokens stored by the slots of an eager step, the encoder's beside them."""
        sequence = Sequence(seq_id, list(tokens), [], encoder_tokens)
        self.grow(sequence.table, len(tokens))
        metadata = self.build(True, [sequence], context_lens=[0], pad=-1)
        self.cache[metadata.slot_mapping] = torch.tensor(tokens)
        self.grow(sequence.encoder_table, len(encoder_tokens))
        for p, token in enumerate(encoder_tokens):
            self.cache[sequence.encoder_table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE] = token
        return sequence

    def decode(self, sequences: list[Sequence], new_tokens: list[int]) -> list[list[int]]:
        for sequence, token in zip(sequences, new_tokens, strict=True):
            sequence.tokens.append(token)
            self.grow(sequence.table, len(sequence.tokens))
        size = min(size for size in SIZES if size >= len(sequences))
        context_lens = [len(sequence.tokens) - 1 for sequence in sequences]
        metadata = self.build(False, sequences, context_lens, pad=size - len(sequences))
        if self.is_encoder_decoder:
            self.add_encoder(metadata, sequences, size)
        return self.graphs[size].run(new_tokens, metadata)[: len(sequences)]

    def build(self, is_prompt: bool, sequences: list[Sequence], context_lens: list[int], pad: int) -> Metadata:
        seq_lens = [len(sequence.tokens) for sequence in sequences]
        query_lens = [seq_len - context for seq_len, context in zip(seq_lens, context_lens, strict=True)]
        self.builder.prepare()
        self.source.inter_data_list = [
            SimpleNamespace(
                is_prompt=is_prompt,
                prefix_cache_hit=False,
                block_tables={sequence.seq_id: sequence.table for sequence in sequences},
                multi_modal_placeholder_maps=None,
                seq_ids=[sequence.seq_id for sequence in sequences],
                input_tokens=[s.tokens[c:] for s, c in zip(sequences, context_lens, strict=True)],
                orig_seq_lens=seq_lens,
                seq_lens=seq_lens,
                query_lens=query_lens,
                context_lens=context_lens,
                curr_sliding_window_blocks=[0] * len(sequences),
            )
        ]
        self.state.begin_forward(None)
        padding = max(pad, 0)
        return self.builder.build([*seq_lens, *[1] * padding], query_lens, pad, len(sequences) + padding)

    def add_encoder(self, metadata: Metadata, sequences: list[Sequence], size: int) -> None:
        lengths = [len(sequence.encoder_tokens) for sequence in sequences]
        metadata.encoder_seq_lens_tensor = torch.ones(size, dtype=torch.int32)
        metadata.encoder_seq_lens_tensor[: len(lengths)] = torch.tensor(lengths)
        metadata.cross_slot_mapping = torch.empty(0, dtype=torch.int32)
        metadata.cross_block_tables = torch.zeros(size, MAX_ENCODER_BLOCKS, dtype=torch.int32)
        for row, sequence in enumerate(sequences):
            metadata.cross_block_tables[row, : len(sequence.encoder_table)] = torch.tensor(sequence.encoder_table)

    def grow(self, table: list[int], length: int) -> None:
        while len(table) * BLOCK_SIZE < length:
            table.append(self.free.pop())


@pytest.mark.parametrize("is_encoder_decoder", [False, True])
def test_replays_return_what_was_stored(is_encoder_decoder):
    runner = ModelRunner(is_encoder_decoder)
    lengths = {1: (3, 5), 2: (9, 12), 3: (4, 1), 4: (14, 7)}
    sequences = {
        seq_id: runner.prompt(
            seq_id,
            [seq_id * 100 + i for i in range(prompt)],
            [seq_id * 1000 + i for i in range(encoder)] if is_encoder_decoder else [],
        )
        for seq_id, (prompt, encoder) in lengths.items()
    }
    token = 5000
    for batch in ([4, 2, 1], [1, 3], [3], [3, 1], [2], [1, 2, 3, 4], [4, 3, 2], *[[3, 4]] * 5, [1, 2, 3, 4]):
        chosen = [sequences[seq_id] for seq_id in batch]
        new = list(range(token, token + len(batch)))
        token += len(batch)
        answers = runner.decode(chosen, new)
        assert answers == [sequence.tokens + sequence.encoder_tokens for sequence in chosen]
        assert [sequence.tokens[-1] for sequence in chosen] == new


def test_captured_sizes_share_their_buffers():
    graphs = ModelRunner(is_encoder_decoder=True).graphs
    shared = ("slot_mapping", "seq_lens_tensor", "block_tables")
    addresses = {size: [graph.addresses[name] for name in shared] for size, graph in graphs.items()}
    assert addresses[4] == addresses[2] == addresses[1]
    assert len(set(addresses[4])) == 3
    assert {len(graph.buffers) for graph in graphs.values()} == {6}


def test_stale_entries_are_there_and_never_read():
    runner = ModelRunner()
    long = runner.prompt(1, list(range(100, 117)), [])
    short = runner.prompt(2, [200], [])
    runner.decode([long], [500])
    assert runner.decode([short], [501]) == [[200, 501]]
    row = runner.graphs[1].buffers["block_tables"][0].tolist()
    assert row == [short.table[0], *long.table[1:], *[0] * (MAX_BLOCKS - len(long.table))]
    assert len(long.table) == 5


def test_the_graph_runner_must_copy_the_slots_itself():
    runner = ModelRunner()
    sequence = runner.prompt(1, [100, 101], [])
    sequence.tokens.append(102)
    metadata = runner.build(False, [sequence], [2], pad=0)
    graph = runner.graphs[1]
    graph.tokens[0] = 102
    graph.state.prepare_graph_input_buffers(graph.buffers, metadata)
    assert graph.replay() == [[100, 101, POISON]]
    graph.buffers["slot_mapping"].copy_(metadata.slot_mapping)
    assert graph.replay() == [[100, 101, 102]]
