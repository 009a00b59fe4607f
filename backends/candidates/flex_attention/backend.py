"""``torch.nn.attention.flex_attention`` as a candidate: gathered pages, a block mask, modifiers as a score function.

On CUDA the function is compiled, and the rows of the whole step are one call. On CPU it runs eagerly and materialises
the score matrix, so a call holds only as many requests as keep that small. The requests of a call are packed one after
the other, and each row sees an interval of the packed keys. One mask therefore expresses causality, windows and the
borders between requests.

A compilation takes seconds, and torch recompiles for each number of heads, head size, scale, and length of 1. To avoid
that, KV heads are the batch dimension, each query head of a KV head adds a row, head sizes are rounded up, numbers are
passed as tensors, and no length is 1, except for one KV head with an odd number of query heads. So it compiles once for
each dtype, rounded head size, and combination of soft cap, ALiBi, tree and first keys.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
import torch._inductor.config as inductor_config
import torch.fx.experimental._config as shapes_config
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, FlexKernelOptions, flex_attention
from torch.nn.functional import pad

from attncheck.backends.base.gathering import grouped_requests, unpaged_requests, write_pages
from attncheck.backends.candidates.flex_attention.packing import BLOCK, Call, at, block_mask, pack_requests
from attncheck.backends.contract import AttentionLayer, AttentionType, Conventions
from attncheck.backends.paged import PagedBackend, PagedImpl
from attncheck.backends.paged_metadata import PagedBuilder, PagedMetadata

KERNEL_OPTIONS: FlexKernelOptions = {"BACKEND": "TRITON"}
"""Options that select torch's main compiled kernel for every shape.

By default torch uses flex_decoding for few rows, and up to 2.13 finds no configuration of it for many shapes.
"""

_COMPILED_ROWS = 2 * BLOCK
"""A compiled call has a multiple of this many rows: torch recompiles for one block, and for less than 128 rows."""

_COMPILED_SIZE = 64
"""Least head size of a compiled call. Smaller heads are padded, and share the kernel of this size."""

_RECOMPILE_LIMIT = 4096
"""Recompile limit of dynamo: a run examines many layers in one process, and the default of 8 is meant for one model."""

_EAGER_SCORES = 2**22
"""Maximum scores (of all heads) that an eager call materialises: 16 MiB. Requests are packed, or cut, to fit."""

_EAGER, _COMPILED = "eager", f"compiled, BACKEND {KERNEL_OPTIONS['BACKEND']}"
"""Names in records of the eager function (CPU) and of the compiled kernel."""

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class FlexBackend(PagedBackend):
    """Backend for any head size (padded to a power of two), any block size and both layouts.

    Sinks are applied to the result by its LSE. On CUDA the kernel is always that of :data:`KERNEL_OPTIONS`, never
    torch's choice. No CUDA graph: requests are packed, and their pages gathered, by lengths from the host.
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
            "mm_prefix",
            "rswa",
        }
    )
    conventions = Conventions(padded_rows="untouched", cache_strides="any")
    supported_kv_cache_dtypes = ("auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2")
    supported_attn_types = tuple(AttentionType)

    get_name = staticmethod(lambda: "FLEX_ATTENTION")
    get_impl_cls = staticmethod(lambda: FlexImpl)
    get_builder_cls = staticmethod(lambda: FlexBuilder)

    @classmethod
    def version(cls) -> str:
        return f"torch {torch.__version__}"


class FlexBuilder(PagedBuilder):
    """Builder of :class:`PagedMetadata`."""

    backend = FlexBackend


class FlexImpl(PagedImpl):
    """One layer."""

    backend = FlexBackend

    write = staticmethod(write_pages)

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
        for call in (pack_requests(params, requests) for requests in grouped_requests(found, limit)):
            out_qHD, lse_qH = self._attend_call(torch.cat([query[rows] for rows in call.rows]), call, limit)
            lengths = [rows.stop - rows.start for rows in call.rows]
            parts = zip(call.rows, torch.split(out_qHD, lengths), torch.split(lse_qH, lengths), strict=True)
            for rows, out, lse in parts:
                output[rows] = out.to(output.dtype)
                if output_lse is not None:
                    output_lse[rows] = lse

    def _attend_call(self, query_qHD: Tensor, call: Call, limit: int | None) -> tuple[Tensor, Tensor]:
        """Return ``(out [rows, num_heads, value head size], lse [rows, num_heads])``, in cuts within ``limit``."""
        if limit is None or len(query_qHD) * len(call.key) <= limit:
            return self._attend_rows(query_qHD, call)
        size = max(1, limit // len(call.key))
        cuts = [slice(first, first + size) for first in range(0, len(query_qHD), size)]
        outs, lses = zip(*(self._attend_rows(query_qHD[cut], call.cut(cut)) for cut in cuts), strict=True)
        return torch.cat(outs), torch.cat(lses)

    def _attend_rows(self, query_qHD: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Return ``(out [rows, num_heads, value head size], lse [rows, num_heads] float32)``, with sinks applied."""
        num_rows, num_keys = len(query_qHD), len(call.key)
        if num_keys == 0:
            out_qHD = query_qHD.new_zeros(num_rows, self.num_heads, self.head_size_v)
            lse_qH = query_qHD.new_full((num_rows, self.num_heads), -torch.inf, dtype=torch.float32)
        else:
            out_qHD, lse_qH = self._attend_keys(query_qHD, call)
            self.chosen_kernels.add(_COMPILED if query_qHD.is_cuda else _EAGER)
        if self.sinks is None:
            return out_qHD, lse_qH
        sinks = self.sinks.to(lse_qH.device)
        share = torch.sigmoid(lse_qH - sinks).where(lse_qH > -torch.inf, 0.0)  # share of the keys in the denominator
        return out_qHD * share[:, :, None], torch.logaddexp(lse_qH, sinks.expand_as(lse_qH))

    def _attend_keys(self, query_qHD: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Return the same results without sinks."""
        is_compiled, num_rows = query_qHD.is_cuda, len(query_qHD)
        # A batch of one KV head has a kernel of its own. Two copies of the head, each for half the query heads, do not.
        copies = 2 if self.num_kv_heads == 1 and self.num_heads % 2 == 0 else 1
        group = self.num_heads // (self.num_kv_heads * copies)
        call = call.of_keys(copies).of_heads(group, _COMPILED_ROWS if is_compiled else 1)
        tensors = [query_qHD.unflatten(1, (-1, group)).transpose(1, 2).flatten(0, 1), call.key, call.value]
        tensors[0] = pad(tensors[0], (0, 0, 0, 0, 0, len(call.own) - len(tensors[0])))
        size = 1 << (max(self.head_size, self.head_size_v) - 1).bit_length()
        size = max(size, _COMPILED_SIZE if is_compiled else 16)
        tensors = [pad(tensor, (0, size - tensor.shape[-1])) for tensor in tensors]
        # The eager formulation rounds normalised probabilities. If one key dominates, that costs twice the rounding of
        # the fused kernel; sinks scale the result. In float32 either has one rounding, at the end.
        if self.sinks is not None or not is_compiled:
            tensors = [tensor.float() for tensor in tensors]
        with _as_intended(is_compiled):
            out_hrD, aux = _kernel(is_compiled)(
                *(tensor.transpose(0, 1).unsqueeze(1) for tensor in tensors),
                score_mod=self._score_mod(call, group),
                block_mask=block_mask(call),
                scale=1.0,
                return_aux=AuxRequest(lse=True),
                kernel_options=KERNEL_OPTIONS,
            )
        out_qHD, lse_qH = (
            found[:, 0, : num_rows * group].unflatten(1, (num_rows, group)).transpose(0, 1).flatten(1, 2)
            for found in (out_hrD[..., : self.head_size_v], aux.lse)
        )
        return out_qHD, lse_qH

    def _score_mod(self, call: Call, group: int) -> ScoreMod:
        """Return a score function that applies scale, cap, then ALiBi."""
        # Numbers are passed as tensors: a compiled kernel reads them instead of being specialised for them.
        own = call.own
        scale = torch.full((), self.scale, device=own.device)
        cap = None if self.logits_soft_cap is None else torch.full((), self.logits_soft_cap, device=own.device)
        slopes = self.slopes_on(own.device)
        if slopes is not None:  # [KV heads, rows]; torch recompiles for rows that are cut off
            slopes = slopes.view(-1, group).repeat(1, -(-len(own) // group))[:, : len(own)].contiguous()

        def modified(score: Tensor, kv_head: Tensor, _head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            score = score * scale
            if cap is not None:
                score = cap * torch.tanh(score / cap)
            return score if slopes is None else score + at(slopes, kv_head, row) * (key - at(own, row))

        return modified


@functools.cache
def _kernel(compiled: bool) -> Callable[..., Any]:
    """Return the fused kernel or the eager formulation; a failing compilation is an error, without fallback."""
    if not compiled:
        return flex_attention
    fused: Callable[..., Any] = torch.compile(flex_attention, fullgraph=True, dynamic=True)
    return fused


@contextlib.contextmanager
def _as_intended(compiled: bool) -> Iterator[None]:
    """Set up torch for one call.

    Compiled: allow as many variants as a run has layers, and none for two lengths that happen to be equal. Compile in
    this process: a variant has one kernel, and Inductor's own processes take seconds to start.

    Eager: disable the compiler and the warning that advises using it. flex_attention warns if it is not compiled and
    materialises the scores, and traces the modifiers all the same. On CPU that is intended: only the score and mask
    functions are examined there, and every request is small enough.
    """
    if compiled:
        limits = {"recompile_limit": _RECOMPILE_LIMIT, "accumulated_recompile_limit": _RECOMPILE_LIMIT}
        with (
            dynamo_config.patch(limits),
            inductor_config.patch(compile_threads=1),
            shapes_config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
        ):
            yield
        return
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile", category=UserWarning)
        yield
