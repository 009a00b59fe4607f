"""``torch.nn.attention.flex_attention`` as a candidate: gathered pages, a block mask, modifiers as a score function.

Compiled on CUDA, where the rows of the whole step are one call; eager on CPU, where the score matrix is materialised
and a call holds only as many requests as keep it small. The requests of a call lie packed one after the other, and what
a row sees is an interval of packed keys: causal masks, windows and the borders between requests are all the same mask.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from attncheck.backends.base.gathering import UnpagedRequest, grouped_requests, unpaged_requests, write_pages
from attncheck.backends.contract import AttentionLayer, AttentionType, Conventions
from attncheck.backends.paged import PagedBackend, PagedImpl
from attncheck.backends.paged_metadata import PagedBuilder, PagedMetadata
from attncheck.reference.attention.params import AttentionParams

_RECOMPILE_LIMIT = 4096
"""A run examines many layers in one process; dynamo's limit of 8 variants is meant for one model."""

_EAGER_SCORES = 2**22
"""Scores of all heads that an eager call may materialise: 16 MiB. Requests are packed, and long ones cut, to that."""

_EAGER, _COMPILED = "eager", "as Inductor chooses: flex_attention or flex_decoding"
"""What runs on a CPU, and what runs where flex_attention is compiled."""

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class FlexBackend(PagedBackend):
    """Any head size, any block size, both layouts. Sinks are applied to the result by its LSE.

    No CUDA graph: requests are packed, and their pages gathered, by lengths from the host.
    """

    packing = "content"
    features = frozenset(
        {
            "sliding_window",
            "logits_soft_cap",
            "alibi",
            "alibi_non_causal",
            "sinks",
            "non_causal",
            "head_size_v",
            "lse",
            "kv_sharing",
            "fp8_kv",
            "fp8_per_head",
            "output_quant",
            "short_keys",
            "local",
            "tree",
        }
    )
    conventions = Conventions(padded_rows="untouched")
    supported_kv_cache_dtypes = ("auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2")
    supported_attn_types = tuple(AttentionType)

    @staticmethod
    def get_name() -> str:
        return "FLEX_ATTENTION"

    @staticmethod
    def get_impl_cls() -> type["FlexImpl"]:
        return FlexImpl

    @staticmethod
    def get_builder_cls() -> type["FlexBuilder"]:
        return FlexBuilder

    @staticmethod
    def get_metadata_cls() -> type["FlexMetadata"]:
        return FlexMetadata

    @classmethod
    def version(cls) -> str:
        return f"torch {torch.__version__}"


class FlexMetadata(PagedMetadata):
    """A step of the flex backend."""


class FlexBuilder(PagedBuilder):
    """Makes them."""

    backend = FlexBackend
    metadata_cls = FlexMetadata


@dataclass(frozen=True)
class _Call:
    """Requests packed for one call of the kernel.

    rows: the rows of query and output, in order. key, value: ``[keys, num_kv_heads, head size]``. own, low, high: per
    row, int64: the packed index of the row's own position, and the interval ``low <= k < high`` of keys it sees. In a
    tree of drafts, node: which of its rows each row is; it then sees of the interval's new keys only those in ``tree``
    (bool ``[Q, Q]``).
    """

    rows: list[slice]
    key: Tensor
    value: Tensor
    own: Tensor
    low: Tensor
    high: Tensor
    node: Tensor | None = None
    tree: Tensor | None = None

    def cut(self, cut: slice) -> "_Call":
        """The same keys for some of the rows only."""
        node = None if self.node is None else self.node[cut]
        return replace(self, own=self.own[cut], low=self.low[cut], high=self.high[cut], node=node)


class FlexImpl(PagedImpl):
    """One layer."""

    backend = FlexBackend
    metadata_cls = FlexMetadata

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
        found = unpaged_requests(params, metadata, layer, key, value, caches, query.dtype)
        limit = None if query.is_cuda else _EAGER_SCORES // self.num_heads
        for call in (_pack(params, pack) for pack in grouped_requests(found, limit)):
            out_qHD, lse_qH = self._attend_call(torch.cat([query[rows] for rows in call.rows]), call, limit)
            lengths = [rows.stop - rows.start for rows in call.rows]
            parts = zip(call.rows, torch.split(out_qHD, lengths), torch.split(lse_qH, lengths), strict=True)
            for rows, out, lse in parts:
                output[rows] = out.to(output.dtype)
                if output_lse is not None:
                    output_lse[rows] = lse

    def _attend_call(self, query_qHD: Tensor, call: _Call, limit: int | None) -> tuple[Tensor, Tensor]:
        """``(out [rows, num_heads, value head size], lse [rows, num_heads])``, cut by rows to keep within ``limit``."""
        if limit is None or len(query_qHD) * len(call.key) <= limit:
            return self._attend_rows(query_qHD, call)
        size = max(1, limit // len(call.key))
        cuts = [slice(first, first + size) for first in range(0, len(query_qHD), size)]
        outs, lses = zip(*(self._attend_rows(query_qHD[cut], call.cut(cut)) for cut in cuts), strict=True)
        return torch.cat(outs), torch.cat(lses)

    def _attend_rows(self, query_qHD: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
        """``(out [rows, num_heads, value head size], lse [rows, num_heads] float32)``."""
        num_rows, num_keys = len(query_qHD), len(call.key)
        if num_keys == 0:
            out_qHD = query_qHD.new_zeros(num_rows, self.num_heads, self.head_size_v)
            lse_qH = query_qHD.new_full((num_rows, self.num_heads), -torch.inf, dtype=torch.float32)
        else:
            tensors = [query_qHD, call.key, call.value]
            # The eager formulation rounds normalised probabilities, which costs twice what the fused kernel's rounding
            # does where one key dominates; sinks scale the result. In float32 either leaves one rounding, at the end.
            if self.sinks is not None or not query_qHD.is_cuda:
                tensors = [tensor.float() for tensor in tensors]
            query_HqD, key_HkD, value_HkD = (tensor.transpose(0, 1).unsqueeze(0) for tensor in tensors)
            with _as_intended(query_qHD.is_cuda):
                out_HqD, aux = _kernel(query_qHD.is_cuda)(
                    query_HqD,
                    key_HkD,
                    value_HkD,
                    score_mod=self._score_mod(call),
                    block_mask=_block_mask(call, num_rows, num_keys),
                    scale=self.scale,
                    enable_gqa=self.num_heads != self.num_kv_heads,
                    return_aux=AuxRequest(lse=True),
                )
            self.chosen_kernels.add(_COMPILED if query_qHD.is_cuda else _EAGER)
            out_qHD, lse_qH = out_HqD[0].transpose(0, 1), aux.lse[0].transpose(0, 1)
        if self.sinks is None:
            return out_qHD, lse_qH
        sinks = self.sinks.to(lse_qH.device)
        share = torch.sigmoid(lse_qH - sinks).where(lse_qH > -torch.inf, 0.0)  # of the keys in the denominator
        return out_qHD * share[:, :, None], torch.logaddexp(lse_qH, sinks.expand_as(lse_qH))

    def _score_mod(self, call: _Call) -> ScoreMod | None:
        """Cap, then ALiBi. Numbers travel as tensors, which a compiled kernel reads and is not compiled for."""
        device = call.own.device
        cap = None if self.logits_soft_cap is None else torch.tensor(self.logits_soft_cap, device=device)
        slopes = self.slopes_on(device)
        own = call.own
        if cap is None and slopes is None:
            return None

        def modified(score: Tensor, _batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            if cap is not None:
                score = cap * torch.tanh(score / cap)
            return score if slopes is None else score + _at(slopes, head) * (key - _at(own, row))

        return modified


def _pack(params: AttentionParams, pack: list[UnpagedRequest]) -> _Call:
    """Key index = position - first key + the keys packed before; a row's interval is cut to its own request's keys."""
    own, low, high = [], [], []
    packed = 0
    tree = pack[0].tree
    for piece in pack:
        index = piece.query_positions() - piece.first_key + packed
        left, right = params.window
        end = packed + len(piece.key)
        least = index - left if left >= 0 else torch.zeros_like(index)
        if params.attn_chunk_size is not None:
            position, chunk = piece.query_positions(), params.attn_chunk_size
            least = torch.maximum(least, index - (position - position // chunk * chunk))
        low.append(least.clamp(packed, end))
        reach = 0 if params.causal else right
        high.append((index + reach + 1 if reach >= 0 else torch.full_like(index, end)).clamp(packed, end))
        own.append(index)
        packed = end
    return _Call(
        rows=[piece.rows for piece in pack],
        key=torch.cat([piece.key for piece in pack]),
        value=torch.cat([piece.value for piece in pack]),
        own=torch.cat(own),
        low=torch.cat(low),
        high=torch.cat(high),
        node=None if tree is None else torch.cat([torch.arange(piece.num_rows, device=tree.device) for piece in pack]),
        tree=tree,
    )


def _block_mask(call: _Call, num_rows: int, num_keys: int) -> object:
    low, high = call.low, call.high

    def sees(_batch: Tensor, _head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        inside = (key >= _at(low, row)) & (key < _at(high, row))
        if call.node is None or call.tree is None:
            return inside
        # Which row of the tree the key belongs to; below 0: context.
        other = key - (_at(call.own, row) - _at(call.node, row))
        return inside & ((other < 0) | _at(call.tree, _at(call.node, row), other.clamp(0, len(call.tree) - 1)))

    make = torch.compile(create_block_mask, dynamic=True) if low.is_cuda else create_block_mask
    return make(sees, None, None, num_rows, num_keys, device=low.device)


@functools.cache
def _kernel(compiled: bool) -> Callable[..., Any]:
    """The fused kernel, or the eager formulation. A kernel that cannot be compiled is an error, never a fall-back."""
    if not compiled:
        return flex_attention
    fused: Callable[..., Any] = torch.compile(flex_attention, fullgraph=True, dynamic=True)
    return fused


def _at(values: Tensor, *index: Tensor) -> Tensor:
    """``values[index]`` in a modifier, by the operator: brackets take a detour that is most of an eager call's time."""
    found: Tensor = torch.ops.aten.index(values, index)
    return found


@contextlib.contextmanager
def _as_intended(compiled: bool) -> Iterator[None]:
    """Compiled: as many variants as a run has layers. Eager: no compiler at all, nor the advice to use one.

    flex_attention warns that it is not compiled and materialises the scores, and has the modifiers traced all the same.
    On CPU that is intended: what is examined there is the score and mask functions, and every request is small enough.
    """
    if compiled:
        with dynamo_config.patch(recompile_limit=_RECOMPILE_LIMIT, accumulated_recompile_limit=_RECOMPILE_LIMIT):
            yield
        return
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile", category=UserWarning)
        yield
