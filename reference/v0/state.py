"""The graph state that most first-generation backends inherit: inputs of captured decode graphs, and their refilling.

The behaviour is vLLM's. Runner and metadata may be any objects with the attributes named here.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.v0.contract import AttentionState

STR_NOT_IMPL_ENC_DEC_ROCM_HIP = "Models with an encoder and a decoder do not run on ROCm/HIP at present."
"""Message of callers that reject encoder-decoder models on ROCm/HIP."""

_CAPTURE_CROSS_ATTENTION = ("XFORMERS", "FLASH_ATTN", "ROCM_FLASH")
_REPLAY_CROSS_ATTENTION = ("XFORMERS", "FLASH_ATTN")

_DECODE_INPUTS = ("seq_lens_tensor", "block_tables")
_CROSS_INPUTS = ("encoder_seq_lens_tensor", "cross_slot_mapping", "cross_block_tables")


class CommonAttentionState(AttentionState):
    """Buffers that all captured decode graphs of one model runner share, refilled before each replay.

    Capture, inside ``graph_capture``, from the largest size to the smallest: ``graph_capture_get_metadata_for_batch``,
    ``graph_clone``, the capture itself, ``get_graph_input_buffers``. Replay: the graph runner copies tokens, positions
    and ``slot_mapping`` into its buffers, and ``prepare_graph_input_buffers`` copies the rest.

    Of the runner it reads ``device``, ``graph_block_tables`` (a 2-D array), ``max_seq_len_to_capture``,
    ``attn_backend`` (``make_metadata``, ``get_name``) and ``get_max_block_per_batch()``. Methods raise
    :class:`~attncheck.errors.ReferenceArgumentError` for an invalid value, ``RuntimeError`` for a call in the wrong
    order.
    """

    _graph_slot_mapping: Tensor
    _graph_seq_lens: Tensor
    _graph_block_tables: Tensor

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self._is_graph_capturing = False

    @contextmanager
    def graph_capture(self, max_batch_size: int) -> Iterator[None]:
        """Return a context in which the state is capturing and holds buffers for up to ``max_batch_size`` sequences.

        Slots are int64, all -1. Lengths are int32, all 1. Tables are a copy of the runner's ``graph_block_tables``. On
        exit, also by an exception, the state drops the buffers; the graphs keep them alive. Each entry allocates new
        ones.
        """
        if self._is_graph_capturing:
            raise RuntimeError("graph_capture is open already")
        if max_batch_size < 1:
            raise ReferenceArgumentError("max_batch_size", max_batch_size, "at least 1")
        device = self.runner.device
        self._graph_slot_mapping = torch.full((max_batch_size,), -1, dtype=torch.int64, device=device)
        self._graph_seq_lens = torch.ones(max_batch_size, dtype=torch.int32, device=device)
        self._graph_block_tables = torch.tensor(self.runner.graph_block_tables, device=device)
        self._is_graph_capturing = True
        try:
            yield
        finally:
            self._is_graph_capturing = False
            del self._graph_slot_mapping, self._graph_seq_lens, self._graph_block_tables

    def graph_clone(self, batch_size: int) -> Self:
        """Return a new state of this class on the same runner, not capturing and without buffers; only during capture.

        ``batch_size`` is not used.
        """
        self._require_capturing("graph_clone")
        return type(self)(self.runner)

    def graph_capture_get_metadata_for_batch(self, batch_size: int, is_encoder_decoder_model: bool = False) -> Any:
        """Return metadata of ``batch_size`` decodes and nothing else, from ``make_metadata``; only during capture.

        ``slot_mapping``, ``seq_lens_tensor`` and ``block_tables`` are views of the start of the buffers, so that all
        sizes share storage. For an encoder-decoder model, ``_update_captured_metadata_for_enc_dec_model`` adds its
        fields; only some backends can capture cross attention.
        """
        self._require_capturing("graph_capture_get_metadata_for_batch")
        largest = min(len(self._graph_slot_mapping), len(self._graph_block_tables))
        if not 1 <= batch_size <= largest:
            required = f"1 to {largest}, what graph_capture and graph_block_tables have room for"
            raise ReferenceArgumentError("batch_size", batch_size, required)
        if is_encoder_decoder_model:
            self._require_backend(_CAPTURE_CROSS_ATTENTION)
        attn_metadata = self.runner.attn_backend.make_metadata(
            num_prefills=0,
            num_prefill_tokens=0,
            num_decode_tokens=batch_size,
            slot_mapping=self._graph_slot_mapping[:batch_size],
            multi_modal_placeholder_index_maps=None,
            enable_kv_scales_calculation=True,
            seq_lens=None,
            seq_lens_tensor=self._graph_seq_lens[:batch_size],
            max_query_len=1,
            max_decode_query_len=1,
            max_prefill_seq_len=0,
            max_decode_seq_len=self.runner.max_seq_len_to_capture,
            query_start_loc=None,
            seq_start_loc=None,
            context_lens_tensor=None,
            block_tables=self._graph_block_tables[:batch_size],
            use_cuda_graph=True,
        )
        if is_encoder_decoder_model:
            self._update_captured_metadata_for_enc_dec_model(batch_size=batch_size, attn_metadata=attn_metadata)
        return attn_metadata

    def get_graph_input_buffers(self, attn_metadata: Any, is_encoder_decoder_model: bool = False) -> dict[str, Tensor]:
        """Return the tensors of captured metadata that a replay refills, by name, not copied.

        They are ``slot_mapping`` of the metadata, and ``seq_lens_tensor`` and ``block_tables`` of its decodes. For an
        encoder-decoder model, ``_add_additional_input_buffers_for_enc_dec_model`` adds its tensors.
        """
        if is_encoder_decoder_model:
            self._require_backend(_CAPTURE_CROSS_ATTENTION)
        decodes = _decodes_of(attn_metadata)
        input_buffers = {"slot_mapping": attn_metadata.slot_mapping}
        input_buffers |= {name: getattr(decodes, name) for name in _DECODE_INPUTS}
        if is_encoder_decoder_model:
            self._add_additional_input_buffers_for_enc_dec_model(
                attn_metadata=attn_metadata, input_buffers=input_buffers
            )
        return input_buffers

    def prepare_graph_input_buffers(
        self, input_buffers: dict[str, Tensor], attn_metadata: Any, is_encoder_decoder_model: bool = False
    ) -> None:
        """Copy a step's lengths and tables into the buffers, in place; shapes must be equal.

        The graph runner copies ``slot_mapping``. For an encoder-decoder model,
        ``_prepare_input_buffers_for_enc_dec_model`` copies its tensors; fewer backends support this than the capture.
        Everything is checked before the first copy.
        """
        if is_encoder_decoder_model:
            self._require_backend(_REPLAY_CROSS_ATTENTION)
        decodes = _decodes_of(attn_metadata)
        _require_same_shapes(input_buffers, decodes, _DECODE_INPUTS)
        if is_encoder_decoder_model:
            self._prepare_input_buffers_for_enc_dec_model(attn_metadata, input_buffers)
        _copy(input_buffers, decodes, _DECODE_INPUTS)

    def begin_forward(self, model_input: Any) -> None:
        """Do nothing: the inputs of the graphs need no preparation before the metadata is built."""

    def _update_captured_metadata_for_enc_dec_model(self, batch_size: int, attn_metadata: Any) -> None:
        """Set the fields of cross attention on metadata for a capture: encoders of one token, tables of ones.

        The slots are empty: the encoder's keys are written in the prompt's step, and a decode stores none.
        ``encoder_seq_lens`` is a tensor here, but a list elsewhere.
        """

        def ones(*shape: int) -> Tensor:
            return torch.ones(shape, dtype=torch.int32, device=self.runner.device)

        attn_metadata.cross_slot_mapping = ones(0)
        attn_metadata.cross_block_tables = ones(batch_size, self.runner.get_max_block_per_batch())
        attn_metadata.encoder_seq_lens = ones(batch_size)
        attn_metadata.encoder_seq_lens_tensor = ones(batch_size)
        attn_metadata.max_encoder_seq_len = self.runner.max_seq_len_to_capture
        attn_metadata.num_encoder_tokens = 0

    def _add_additional_input_buffers_for_enc_dec_model(
        self, attn_metadata: Any, input_buffers: dict[str, Tensor]
    ) -> None:
        """Add the lengths, slots and tables of cross attention to the dict, by name, not copied."""
        decodes = _decodes_of(attn_metadata)
        input_buffers.update({name: getattr(decodes, name) for name in _CROSS_INPUTS})

    def _prepare_input_buffers_for_enc_dec_model(self, attn_metadata: Any, input_buffers: dict[str, Tensor]) -> None:
        """Copy a step's lengths, slots and tables of cross attention into the buffers, in place."""
        decodes = _decodes_of(attn_metadata)
        _require_same_shapes(input_buffers, decodes, _CROSS_INPUTS)
        _copy(input_buffers, decodes, _CROSS_INPUTS)

    def _require_capturing(self, name: str) -> None:
        if not self._is_graph_capturing:
            raise RuntimeError(f"{name} means something inside graph_capture only")

    def _require_backend(self, known: Collection[str]) -> None:
        name = self.runner.attn_backend.get_name()
        if name not in known:
            raise ReferenceArgumentError(
                "attn_backend", name, f"one of {', '.join(known)} for an encoder-decoder model"
            )


def _decodes_of(attn_metadata: Any) -> Any:
    decodes = attn_metadata.decode_metadata
    if decodes is None:
        raise ReferenceArgumentError("attn_metadata.decode_metadata", None, "there: graphs hold decodes")
    return decodes


def _require_same_shapes(input_buffers: dict[str, Tensor], decodes: Any, names: Collection[str]) -> None:
    """Raise if a tensor is absent on either side, or its shape differs, because ``copy_`` would broadcast it."""
    for name in names:
        if name not in input_buffers:
            raise ReferenceArgumentError("input_buffers", list(input_buffers), f"with a tensor {name}")
        shape, wanted = getattr(getattr(decodes, name), "shape", None), input_buffers[name].shape
        if shape != wanted:
            found = None if shape is None else tuple(shape)
            raise ReferenceArgumentError(f"{name}.shape", found, f"{tuple(wanted)}, as its buffer's")


def _copy(input_buffers: dict[str, Tensor], decodes: Any, names: Collection[str]) -> None:
    for name in names:
        input_buffers[name].copy_(getattr(decodes, name), non_blocking=True)
