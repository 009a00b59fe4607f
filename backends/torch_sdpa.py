"""``torch.nn.functional.scaled_dot_product_attention`` as a candidate: pages are gathered, one call a request.

A right and simple baseline for CPU and CUDA, and what a user of plain torch would write. Soft cap, sinks and the
log-sum-exp are out of SDPA's reach, and declared so. Must not know: the reference's code.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attncheck.backends.contract import AttentionLayer, AttentionType, Conventions
from attncheck.backends.gathering import Piece, pieces, write_pages
from attncheck.backends.paged import PagedBackend, PagedImpl
from attncheck.backends.paged_metadata import PagedBuilder, PagedMetadata
from attncheck.reference.params import AttentionParams


class SDPABackend(PagedBackend):
    """Any head size, any block size, both layouts; lengths are read on the host, so no graph."""

    packing = "split_second"
    features = frozenset(
        {
            "sliding_window",
            "alibi",
            "alibi_non_causal",
            "non_causal",
            "head_size_v",
            "kv_sharing",
            "fp8_kv",
            "fp8_per_head",
            "output_quant",
            "short_keys",
            "tree",
        }
    )
    conventions = Conventions(padded_rows="untouched")
    supported_kv_cache_dtypes = ("auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2")
    supported_attn_types = tuple(AttentionType)

    @staticmethod
    def get_name() -> str:
        return "TORCH_SDPA"

    @staticmethod
    def get_impl_cls() -> type["SDPAImpl"]:
        return SDPAImpl

    @staticmethod
    def get_builder_cls() -> type["SDPABuilder"]:
        return SDPABuilder

    @staticmethod
    def get_metadata_cls() -> type["SDPAMetadata"]:
        return SDPAMetadata

    @classmethod
    def version(cls) -> str:
        return f"torch {torch.__version__}"


class SDPAMetadata(PagedMetadata):
    """A step of the SDPA backend."""


class SDPABuilder(PagedBuilder):
    """Makes them."""

    backend = SDPABackend
    metadata_cls = SDPAMetadata


class SDPAImpl(PagedImpl):
    """One layer."""

    backend = SDPABackend
    metadata_cls = SDPAMetadata

    def write(
        self,
        layer: AttentionLayer,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        write_pages(layer, key, value, key_cache, value_cache, slot_mapping)

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
        params = self.params(metadata)
        for piece in pieces(params, metadata, layer, key, value, caches, query.dtype):
            output[piece.rows] = self._attend_piece(params, query[piece.rows], piece)

    def _attend_piece(self, params: AttentionParams, query: Tensor, piece: Piece) -> Tensor:
        """``[rows, num_heads, value head size]``. Rows that see nothing are 0, whatever the kernel makes of them."""
        if len(piece.key) == 0:
            return query.new_zeros(piece.num_rows, self.num_heads, self.head_size_v)
        # One prompt from its start: SDPA's own causal mask is the same (top left and bottom right coincide).
        is_plain = params.causal and params.window[0] < 0 and self.alibi_slopes is None and piece.tree is None
        is_prompt = is_plain and piece.first_position == 0
        seen = None if is_prompt else _seen(params, piece)
        mask = None if seen is None or bool(seen.all()) else seen
        # SDPA's CPU kernel masks before it scales: a scale of 0 or below would turn its -inf into NaN or +inf.
        signed = query if self.scale > 0 else query * (-1 if self.scale < 0 else 0)
        tensors = [signed, piece.key, piece.value]
        if self.alibi_slopes is not None and seen is not None:
            # The bias is a float mask; in half precision slope * distance would lose the distance, so all is float32.
            mask = self._alibi_mask(seen, piece)
            tensors = [tensor.float() for tensor in tensors]
        query_HqD, key_HkD, value_HkD = (tensor.transpose(0, 1).unsqueeze(0) for tensor in tensors)
        out_HqD = scaled_dot_product_attention(
            query_HqD,
            key_HkD,
            value_HkD,
            attn_mask=mask,
            is_causal=is_prompt,
            scale=abs(self.scale) or 1.0,
            enable_gqa=self.num_heads != self.num_kv_heads,
        )
        out_qHD = out_HqD.squeeze(0).transpose(0, 1)
        return out_qHD if seen is None else out_qHD.masked_fill(~seen.any(1)[:, None, None], 0.0)

    def _alibi_mask(self, seen: Tensor, piece: Piece) -> Tensor:
        """``slope * (key position - query position)``, -inf where a row does not see: ``[num_heads, rows, keys]``."""
        slopes = torch.tensor(self.alibi_slopes, dtype=torch.float32, device=seen.device)
        distance = piece.key_positions()[None, :] - piece.query_positions()[:, None]
        bias = slopes[:, None, None] * distance.to(torch.float32)
        return bias.masked_fill(~seen, -torch.inf)


def _seen(params: AttentionParams, piece: Piece) -> Tensor:
    """Which row sees which key: bool ``[rows, keys]``."""
    ahead = piece.key_positions()[None, :] - piece.query_positions()[:, None]
    left, right = params.window
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if params.causal:
        seen &= ahead <= 0
    if left >= 0:
        seen &= ahead >= -left
    if right >= 0:
        seen &= ahead <= right
    if piece.tree is not None:
        seen[:, -piece.num_rows :] &= piece.tree
    return seen
