"""The reference for latent attention as a candidate: float64 inside, rounded once at the end.

It uses the formulations that the harness's own reference does not use: attention in the latent space, and in pieces of
the context if the layer has a workspace and no indexer.
"""

from torch import Tensor

from attncheck.backends.contract import AttentionLayer, Conventions
from attncheck.backends.latent import LatentBackend, LatentBuilder, LatentImpl, LatentMetadata
from attncheck.reference.attention.mla import mla_attention_absorbed, mla_attention_chunked, mla_write_cache


class ReferenceMLABackend(LatentBackend):
    """Backend for any sizes and any block size. No CUDA graph: the reference reads lengths on the host."""

    features = LatentBackend.features | {"sparse"}
    conventions = Conventions(padded_rows="untouched", cache_strides="any", any_topk_indices=True)
    get_name = staticmethod(lambda: "REFERENCE_MLA")
    get_impl_cls = staticmethod(lambda: ReferenceMLAImpl)
    get_builder_cls = staticmethod(lambda: ReferenceMLABuilder)


class ReferenceMLABuilder(LatentBuilder):
    """Builder of :class:`LatentMetadata`."""

    backend = ReferenceMLABackend


class ReferenceMLAImpl(LatentImpl):
    """One layer."""

    backend = ReferenceMLABackend

    def write(self, layer: AttentionLayer, kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        mla_write_cache(kv_c, k_pe, kv_cache, slot_mapping, k_scale=layer._k_scale)

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        kv_cache: Tensor,
        metadata: LatentMetadata,
        output: Tensor,
        output_lse: Tensor | None,
    ) -> None:
        out, lse = self.answer(layer, query[: metadata.num_rows], kv_cache, metadata)
        output[: metadata.num_rows] = out.to(output.dtype)
        if output_lse is not None:
            output_lse[: metadata.num_rows] = lse.to(output_lse.dtype)

    def answer(
        self, layer: AttentionLayer, query: Tensor, kv_cache: Tensor, metadata: LatentMetadata
    ) -> tuple[Tensor, Tensor]:
        """Return output ``[rows, H, V]`` and LSE ``[rows, H]`` of the real rows, float64."""
        common, params, scale = metadata.common, self.params(metadata), layer._k_scale
        q_nope, q_pe = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        batch = common.block_table_tensor, common.seq_lens, common.query_start_loc
        arguments = (q_nope, q_pe, kv_cache, *self.projections, *batch, params)
        if metadata.workspace is not None and metadata.topk_indices is None:
            return mla_attention_chunked(*arguments, workspace=metadata.workspace, k_scale=scale)
        return mla_attention_absorbed(*arguments, k_scale=scale, topk_indices=metadata.topk_indices)
