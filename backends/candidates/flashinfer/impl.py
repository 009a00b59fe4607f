"""Runs the parts of a step through the wrappers that were planned for them."""

import torch
from torch import Tensor

from attncheck.backends.base.layer import Call
from attncheck.backends.candidates.flashinfer.backend import FlashInferBackend
from attncheck.backends.candidates.flashinfer.metadata import FlashInferMetadata, PlannedRows
from attncheck.backends.candidates.flashinfer.settings import LayerSettings
from attncheck.backends.contract import AttentionLayer
from attncheck.backends.paged import PagedImpl
from attncheck.backends.paged_metadata import PagedMetadata


class FlashInferImpl(PagedImpl):
    """One layer.

    Raise ``RuntimeError`` for metadata whose plan a later step has replaced, and if a graph captures a step whose plan
    cannot be refilled.
    """

    backend = FlashInferBackend
    metadata_cls = FlashInferMetadata

    def write(
        self,
        layer: AttentionLayer,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        from attncheck.backends.candidates.triton_unified.cache import reshape_and_cache

        k_scale, v_scale = layer._k_scale, layer._v_scale
        reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        caches: tuple[Tensor, Tensor] | None,
        metadata: PagedMetadata,
        output: Tensor,
        output_lse: Tensor | None,
    ) -> None:
        """Run each part; the LSE has base 2, as in the library."""
        for part in _parts(metadata):
            rows = part.rows
            lse = None if output_lse is None else output_lse[rows]
            if caches is not None:
                _run(part, query[rows], _paged(part, caches), output=output[rows], lse=lse, **_scales(layer, caches[0]))
            elif key is not None and value is not None:
                _run(part, query[rows], _dense(key[rows]), _dense(value[rows]), output=output[rows], lse=lse)
            else:
                raise RuntimeError("neither a cache nor keys and values to attend to")
            self.chosen_kernels.add(part.planned.kernels)

    def _refuse_wrong_step(self, call: Call[PagedMetadata]) -> None:
        super()._refuse_wrong_step(call)
        query, output, metadata = call.query, call.output, call.metadata
        name, own = self.backend.get_name(), LayerSettings.of(self, query.dtype)
        if output.dtype != query.dtype:
            raise ValueError(f"{name}: output has dtype {output.dtype}, and query {query.dtype}")
        for part in _parts(metadata):
            if not part.is_current:
                raise RuntimeError(f"{name}: attn_metadata of an earlier step: its builder has planned another since")
            if _is_captured(query) and not part.planned.is_for_graphs:
                raise RuntimeError(f"{name}: a graph is captured of a step that was planned for no graph")
            if part.settings != own:
                raise ValueError(f"{name}: planned for {part.settings}, run for {own}")


def _is_captured(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _parts(metadata: PagedMetadata) -> tuple[PlannedRows, ...]:
    if not isinstance(metadata, FlashInferMetadata):
        raise TypeError(f"attn_metadata is a {type(metadata).__qualname__}, not a {FlashInferMetadata.__qualname__}")
    return metadata.parts


def _paged(part: PlannedRows, caches: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return both caches as ``[blocks, block size, num_kv_heads, head size]``; for ``HND``, heads before tokens."""
    key_cache, value_cache = caches
    if part.kv_layout == "NHD":
        return key_cache, value_cache
    return key_cache.transpose(1, 2), value_cache.transpose(1, 2)


def _scales(layer: AttentionLayer, cache: Tensor) -> dict[str, float]:
    """Return the scales of FP8 codes; a graph may freeze these numbers, because they belong to the layer."""
    return {"k_scale": layer._k_scale_float, "v_scale": layer._v_scale_float} if cache.itemsize == 1 else {}


def _run(
    part: PlannedRows,
    query: Tensor,
    *keys: Tensor | tuple[Tensor, Tensor],
    output: Tensor,
    lse: Tensor | None,
    **scales: float,
) -> None:
    # The kernels write contiguous rows, whatever the strides of a tensor.
    out, out_lse = output.contiguous(), None if lse is None else lse.contiguous()
    part.planned.wrapper.run(_dense(query), *keys, out=out, lse=out_lse, return_lse=lse is not None, **scales)
    if out is not output:
        output.copy_(out)
    if lse is not None and out_lse is not None and out_lse is not lse:
        lse.copy_(out_lse)


def _dense(rows: Tensor) -> Tensor:
    """Return rows whose last dimension is contiguous, as the kernels require."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()
