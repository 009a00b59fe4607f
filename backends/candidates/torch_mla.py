"""Latent attention in plain torch as a candidate: the algorithm of an engine, without its kernels.

Requests with few new rows are computed in the latent space, directly on the cache rows, as are all rows whose keys an
indexer chose: each gathers its own. For other requests, keys and values are up-projected, with the context in pieces of
at most the workspace; the pieces are merged by their LSE. Values
that an engine stores between its kernels have the layer's dtype; scores and sums are float32.
"""

import itertools

import torch
from torch import Tensor

from attncheck.backends.base.gathering import decode_fp8, encode_fp8, token_places
from attncheck.backends.contract import AttentionLayer, Conventions
from attncheck.backends.latent import LatentBackend, LatentBuilder, LatentImpl, LatentMetadata

DECODE_ROWS = 4
"""Maximum new rows of a decode request: one token, and drafts to verify."""

State = tuple[Tensor, Tensor]
"""Attention state over some keys: output ``[rows, H, Dv]`` and LSE ``[rows, H]``, float32."""


class TorchMLABackend(LatentBackend):
    """Backend for any sizes and any block size. No CUDA graph: gathering and chunking follow lengths from the host."""

    features = LatentBackend.features | {"sparse"}
    conventions = Conventions(padded_rows="untouched", cache_strides="any", any_topk_indices=True)
    get_name = staticmethod(lambda: "TORCH_MLA")
    get_impl_cls = staticmethod(lambda: TorchMLAImpl)
    get_builder_cls = staticmethod(lambda: TorchMLABuilder)

    @classmethod
    def version(cls) -> str:
        return f"torch {torch.__version__}"


class TorchMLABuilder(LatentBuilder):
    """Builder of :class:`LatentMetadata`."""

    backend = TorchMLABackend


class TorchMLAImpl(LatentImpl):
    """One layer."""

    backend = TorchMLABackend

    def write(self, layer: AttentionLayer, kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        rows = (slot_mapping >= 0).nonzero().squeeze(1)
        slots, size = slot_mapping[rows], kv_cache.shape[1]
        new = torch.cat([kv_c[rows], k_pe[rows]], dim=-1)
        stored = encode_fp8(new, layer._k_scale, kv_cache.dtype) if kv_cache.itemsize == 1 else new.to(kv_cache.dtype)
        kv_cache[slots // size, slots % size] = stored

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        kv_cache: Tensor,
        metadata: LatentMetadata,
        output: Tensor,
        output_lse: Tensor | None,
    ) -> None:
        for request, start, end, seq_len in metadata.requests():
            places = token_places(metadata.common.block_table_tensor[request], 0, seq_len, kv_cache)
            tokens = kv_cache[places]
            first = seq_len - (end - start)
            tokens = decode_fp8(tokens, layer._k_scale, query.dtype) if tokens.itemsize == 1 else tokens.to(query.dtype)
            if metadata.topk_indices is not None:
                out, lse = self._of_chosen(query[start:end], tokens, metadata.topk_indices[start:end])
            elif end - start <= DECODE_ROWS:
                out, lse = self._absorbed(query[start:end], tokens, first, metadata)
            else:
                out, lse = self._up_projected(query[start:end], tokens, first, metadata)
            output[start:end] = out.to(output.dtype)
            if output_lse is not None:
                output_lse[start:end] = lse

    def _absorbed(self, query: Tensor, tokens: Tensor, first: int, metadata: LatentMetadata) -> State:
        """Attend in the latent space to all ``tokens [n, L + E]`` at once; query positions begin at ``first``."""
        seen = _seen(first, len(query), 0, len(tokens), metadata.common.causal, query.device)
        keys = tokens[:, None]
        out_latent, lse = _attend(self._in_latent_space(query), keys, keys[..., : self.kv_lora_rank], seen, self.scale)
        return self._out_of_latent_space(out_latent, query.dtype), lse

    def _of_chosen(self, query: Tensor, tokens: Tensor, topk_indices: Tensor) -> State:
        """Attend in the latent space, each row to the tokens that ``topk_indices [q, K]`` name; negative for none."""
        projected = self._in_latent_space(query)
        states = []
        for row, named in enumerate(topk_indices):
            keys = tokens[named[named >= 0].long().unique(), None]
            all_keys = torch.ones(1, len(keys), dtype=torch.bool, device=keys.device)
            values = keys[..., : self.kv_lora_rank]
            states.append(_attend(projected[row, None], keys, values, all_keys, self.scale))
        out_latent, lse = (torch.cat(parts) for parts in zip(*states, strict=True))
        return self._out_of_latent_space(out_latent, query.dtype), lse

    def _in_latent_space(self, query: Tensor) -> Tensor:
        """Return the projected query, ``[q, H, L + E]``, in its own dtype."""
        w_uk, _ = self.projections
        q_nope, q_pe = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        q_latent = torch.einsum("qhp,lhp->qhl", q_nope.float(), w_uk.float()).to(query.dtype)
        return torch.cat([q_latent, q_pe], dim=-1)

    def _out_of_latent_space(self, out_latent: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the output ``[q, H, V]`` in float32; as between kernels, the latent one is rounded to ``dtype``."""
        _, w_uv = self.projections
        return torch.einsum("qhl,lhv->qhv", out_latent.to(dtype).float(), w_uv.float())

    def _up_projected(self, query: Tensor, tokens: Tensor, first: int, metadata: LatentMetadata) -> State:
        """Attend to the new tokens, then to the context piece by piece; every row sees its whole context."""
        context, end = max(first, 0), len(tokens)
        step = max(1, metadata.workspace or context)
        edges = [*range(0, context, step), context]
        state = self._piece(query, tokens, (context, end), first, metadata.common.causal)
        for lo, hi in itertools.pairwise(edges):
            state = _merge(state, self._piece(query, tokens, (lo, hi), first, causal=False))
        return state

    def _piece(self, query: Tensor, tokens: Tensor, span: tuple[int, int], first: int, causal: bool) -> State:
        """Attend to the tokens at positions ``lo <= j < hi``."""
        lo, hi = span
        latent, k_pe = tokens[lo:hi].split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        projected = self.kv_b_proj(latent)[0].unflatten(-1, (self.num_heads, -1))
        k_nope, value = projected.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        key = torch.cat([k_nope, k_pe[:, None].expand(-1, self.num_heads, -1)], dim=-1)
        seen = _seen(first, len(query), lo, hi, causal, query.device)
        return _attend(query, key, value, seen, self.scale)


def _seen(first: int, rows: int, lo: int, hi: int, causal: bool, device: torch.device) -> Tensor:
    """Return which rows, at positions from ``first`` on, see which tokens ``lo <= j < hi``; ``[rows, hi - lo]``."""
    positions = torch.arange(first, first + rows, device=device)
    keys = torch.arange(lo, hi, device=device)
    return keys[None, :] <= positions[:, None] if causal else torch.ones(rows, hi - lo, dtype=torch.bool, device=device)


def _attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float) -> State:
    """Attend with ``query [q, H, D]``, ``key [n, H, D]`` and ``value [n, H, Dv]`` (or one KV head for all heads).

    A row that sees no key gets output 0 and LSE -inf.
    """
    heads = query.shape[1]
    key, value = (x.float().expand(-1, heads, -1) for x in (key, value))
    scores_HqN = torch.einsum("qhd,nhd->hqn", query.float(), key) * scale
    scores_HqN = scores_HqN.masked_fill(~seen, -torch.inf)
    if not len(key):
        empty = query.new_zeros(len(query), heads, value.shape[-1], dtype=torch.float32)
        return empty, torch.full_like(empty[..., 0], -torch.inf)
    top_Hq1 = scores_HqN.amax(-1, keepdim=True)
    top_Hq1 = top_Hq1.masked_fill(top_Hq1 == -torch.inf, 0.0)
    weights_HqN = torch.exp(scores_HqN - top_Hq1)
    total_Hq1 = weights_HqN.sum(-1, keepdim=True)
    out = torch.einsum("hqn,nhv->qhv", weights_HqN, value) / total_Hq1.transpose(0, 1).masked_fill(
        total_Hq1.transpose(0, 1) == 0, 1.0
    )
    return out, (top_Hq1 + total_Hq1.log()).squeeze(-1).T


def _merge(a: State, b: State) -> State:
    """Return the state over the keys of both; a state without keys has LSE -inf and does not contribute."""
    top = torch.maximum(a[1], b[1])
    shift = top.masked_fill(top == -torch.inf, 0.0)
    weight_a, weight_b = (torch.exp(lse - shift)[..., None] for _, lse in (a, b))
    total = weight_a + weight_b
    out = (a[0] * weight_a + b[0] * weight_b) / total.masked_fill(total == 0, 1.0)
    return out, shift + total.squeeze(-1).log()
