"""Correct backends of other constructions, written on the bare contract; none may cause an alarm.

Each keeps something in its own way: tables that the first call makes, a plan in buffers of the builder, one metadata
object for all steps, numpy copies of lengths, a workspace of partial results.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from attncheck.backends.contract import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    Conventions,
)

ROWS_AT_ONCE = 32


def positions(common):
    """Return ``(request, position)`` of each row, on the device; -1 for a row of no request."""
    starts, count = common.query_start_loc, common.num_actual_tokens
    row = torch.arange(count, dtype=starts.dtype, device=starts.device)
    request = torch.searchsorted(starts[1:], row, right=True).clamp(max=common.num_reqs - 1)
    at = common.seq_lens[request] - starts[request + 1] + row
    return request, at.masked_fill(row >= starts[-1], -1)


@dataclass
class Step:
    """What ``forward`` reads. ``request`` and ``position`` of each row: None if ``forward`` computes them."""

    common: Any
    table: torch.Tensor
    request: Any = None
    position: Any = None


class Builder(AttentionMetadataBuilder):
    cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        drafts = vllm_config.speculative_config
        if drafts is not None and drafts.speculative_token_tree is not None:
            raise NotImplementedError("a tree of drafts")

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        common = common_attn_metadata
        if not common.causal:
            raise NotImplementedError("attention without a causal mask")
        return Step(common, common.block_table_tensor)


class Impl(AttentionImpl):
    """Scores of each row with all slots of its table, a few rows at once."""

    def __init__(
        self,
        num_heads,
        head_size,
        scale,
        num_kv_heads=None,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="auto",
        logits_soft_cap=None,
        attn_type="decoder",
        kv_sharing_target_layer_name=None,
        *,
        sinks=None,
    ):
        if attn_type != "decoder" or kv_cache_dtype not in ("auto", "float16", "bfloat16", "float32"):
            raise NotImplementedError(f"{attn_type}, {kv_cache_dtype}")
        if kv_sharing_target_layer_name is not None:
            raise NotImplementedError("a shared cache")
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads or num_heads, head_size
        self.scale, self.cap, self.window = scale, logits_soft_cap, sliding_window
        self.slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes)
        self.sinks = sinks

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        has_slot, size = slot_mapping >= 0, kv_cache.shape[2]
        if not len(slot_mapping):
            return
        rows = torch.cat([key, value], -1)[: len(slot_mapping)]
        first = has_slot.int().argmax(0, keepdim=True)
        source = torch.where(has_slot, torch.arange(len(rows), device=rows.device), first)
        slots, rows = slot_mapping[source].clamp(min=0), rows[source]
        place = (slots // size, slice(None), slots % size)
        kv_cache[place] = torch.where(has_slot.any(), rows, kv_cache[place])

    def forward(
        self,
        layer,
        query,
        key,
        value,
        kv_cache,
        attn_metadata,
        output=None,
        output_scale=None,
        output_block_scale=None,
        output_lse=None,
    ):
        if attn_metadata is None:
            return output.fill_(0)
        step = attn_metadata
        if step.position is None:
            step = Step(step.common, step.table, *positions(step.common))
        for first in range(0, len(step.position), ROWS_AT_ONCE):
            rows = slice(first, min(first + ROWS_AT_ONCE, len(step.position)))
            self.rows(query[rows], kv_cache, step, rows, output[rows], None if output_lse is None else output_lse[rows])
        return output

    def scored(self, query, kv_cache, table, position):
        size, count = kv_cache.shape[2], len(query)
        at = self.slots(table.shape[1] * size, table.device)
        distance = position[:, None] - at
        seen = distance >= 0
        if self.window is not None:
            seen = seen & (distance < self.window)
        pages = table.long().masked_fill(~seen.unflatten(1, (-1, size)).any(-1), 0)
        held = kv_cache[pages].transpose(1, 2).flatten(2, 3).float()  # [n, KV heads, keys, 2 D]
        held = held.masked_fill(~seen[:, None, :, None], 0.0)
        grouped = query.float().reshape(count, self.num_kv_heads, -1, self.head_size)
        scores = grouped @ held[..., : self.head_size].mT * self.scale
        if self.cap:
            scores = self.cap * torch.tanh(scores / self.cap)
        if self.slopes is not None:
            scores = scores - self.per_head(self.slopes, query) * distance[:, None, None]
        return scores.masked_fill(~seen[:, None, None], -math.inf), held[..., self.head_size :]

    def slots(self, count, device):
        return torch.arange(count, device=device)

    def per_head(self, numbers, query):
        for name in ("slopes", "sinks"):
            if numbers is getattr(self, name) and numbers.device != query.device:
                setattr(self, name, numbers.to(query.device))
                numbers = getattr(self, name)
        return numbers.float().view(1, self.num_kv_heads, -1, 1)

    def rows(self, query, kv_cache, step, rows, output, output_lse):
        scores, values = self.scored(query, kv_cache, step.table[step.request[rows]], step.position[rows])
        lse = scores.logsumexp(-1, keepdim=True)
        if self.sinks is not None:
            is_row = (step.position[rows] >= 0)[:, None, None, None]
            lse = torch.where(is_row, torch.logaddexp(lse, self.per_head(self.sinks, query)), lse)
        weights = (scores - lse.masked_fill(lse == -math.inf, 0)).exp()
        output.copy_((weights @ values).flatten(1, 2))
        if output_lse is not None:
            output_lse.copy_(lse.flatten(1))


class Plain(AttentionBackend):
    """The base itself, without state."""

    Impl, Builder = Impl, Builder
    accept_output_buffer = True
    forward_includes_kv_cache_update = False
    features = frozenset({"sliding_window", "logits_soft_cap", "alibi", "sinks", "lse"})
    supported_kv_cache_dtypes = ("auto",)
    supported_layouts = ("NHD", "HND")
    supported_attn_types = ("decoder",)

    @classmethod
    def get_name(cls):
        return cls.__name__.upper()

    @classmethod
    def get_impl_cls(cls):
        return cls.Impl

    @classmethod
    def get_builder_cls(cls):
        return cls.Builder


class LazyTables(Plain):
    """The first call that needs more makes tables of positions and slopes on its device, and keeps them."""

    class Impl(Impl):
        table = None

        def slots(self, count, device):
            if self.table is None or len(self.table) < count or self.table.device != device:
                self.table = torch.arange(max(count, 1024)).to(device)
            return self.table[:count]


class PlanInBuilder(Plain):
    """The builder plans rows on the host, in pinned buffers where there are any, and copies them into its own.

    It computes positions from ``seq_lens_cpu``, and therefore declares that these must be exact.
    """

    conventions = Conventions(host_lens="exact")

    class Builder(Builder):
        def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)
            rows, reqs = vllm_config.scheduler_config.max_num_batched_tokens, vllm_config.scheduler_config.max_num_seqs
            pages = -(-vllm_config.model_config.max_model_len // kv_cache_spec.block_size)
            pinned = device.type == "cuda"
            self.host = torch.zeros(2, rows, dtype=torch.int32, pin_memory=pinned)
            self.plan = torch.zeros(2, rows, dtype=torch.int32, device=device)
            self.table = torch.zeros(reqs, pages, dtype=torch.int32, device=device)

        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            super().build(common_prefix_len, common_attn_metadata, fast_build)
            common, count = common_attn_metadata, common_attn_metadata.num_actual_tokens
            starts, lens = common.query_start_loc_cpu.numpy(), common.seq_lens_cpu.numpy()
            plan = self.host.numpy()
            plan[0, :count], plan[1, :count] = 0, -1
            for request in range(common.num_reqs):
                first, stop = starts[request], starts[request + 1]
                plan[0, first:stop] = request
                plan[1, first:stop] = range(lens[request] - (stop - first), lens[request])
            self.plan[:, :count].copy_(self.host[:, :count], non_blocking=True)
            width = min(self.table.shape[1], common.block_table_tensor.shape[1])
            table = self.table[: common.num_reqs, :width].copy_(common.block_table_tensor[: common.num_reqs, :width])
            return Step(common, table, self.plan[0, :count], self.plan[1, :count])


class OneMetadata(Plain):
    """The builder has one metadata object, which each build fills again in place."""

    class Builder(Builder):
        step = None

        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            new = super().build(common_prefix_len, common_attn_metadata, fast_build)
            if self.step is None:
                self.step = new
            vars(self.step).update(vars(new))
            return self.step


class NumpyMirrors(Plain):
    """The builder copies lengths and tables to numpy, and ``forward`` loops over requests on the host."""

    class Builder(Builder):
        cudagraph_support = AttentionCGSupport.NEVER

        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            step = super().build(common_prefix_len, common_attn_metadata, fast_build)
            step.starts = common_attn_metadata.query_start_loc_cpu.numpy().copy()
            step.lens = common_attn_metadata.seq_lens_cpu.numpy().copy()
            step.pages = common_attn_metadata.block_table_tensor.cpu().numpy().copy()
            return step

    class Impl(Impl):
        def forward(self, layer, query, key, value, kv_cache, attn_metadata, output=None, *rest, output_lse=None):
            if attn_metadata is None:
                return output.fill_(0)
            step, size = attn_metadata, kv_cache.shape[2]
            for request, seq_len in enumerate(step.lens.tolist()):
                first, stop = step.starts[request : request + 2].tolist()
                for start in range(first, stop, ROWS_AT_ONCE):
                    rows = slice(start, min(start + ROWS_AT_ONCE, stop))
                    table = torch.from_numpy(step.pages[request, : -(-seq_len // size)]).to(query.device)
                    owner = torch.zeros(stop, dtype=torch.int64, device=query.device)
                    many = Step(step.common, table[None], owner, positions(step.common)[1])
                    lse = None if output_lse is None else output_lse[rows]
                    self.rows(query[rows], kv_cache, many, rows, output[rows], lse)
            return output


class HeadsFirst(Plain):
    """Results are computed heads first in a buffer of the impl, and copied through a permuted view of the output."""

    class Impl(Impl):
        buffer = None

        def rows(self, query, kv_cache, step, rows, output, output_lse):
            shape = (self.num_heads, ROWS_AT_ONCE, self.head_size)
            if self.buffer is None or self.buffer.device != output.device:
                self.buffer = torch.empty(shape, device=output.device)
            scores, values = self.scored(query, kv_cache, step.table[step.request[rows]], step.position[rows])
            highest = scores.amax(-1, keepdim=True)
            if self.sinks is not None:
                sinks = self.per_head(self.sinks, query).expand_as(highest)
                highest = torch.maximum(highest, sinks)
            highest = highest.clamp(min=torch.finfo(torch.float32).min)
            weights = torch.exp(scores - highest)
            total = weights.sum(-1, keepdim=True)
            if self.sinks is not None:
                total = total + torch.exp(sinks - highest) * (step.position[rows] >= 0)[:, None, None, None]
            part = self.buffer[:, : len(query)]
            part.copy_(((weights @ values) / total.clamp(min=1e-30)).flatten(1, 2).transpose(0, 1))
            output.transpose(0, 1).copy_(part)
            if output_lse is not None:
                lse = (highest + total.log()).masked_fill(total == 0, -math.inf)
                output_lse.T.copy_(lse.flatten(1).T)


class SplitDecode(Plain):
    """Keys are split in equal parts; partial results lie in a workspace of the impl until they are combined."""

    SPLITS = 3

    class Impl(Impl):
        workspace = None

        def rows(self, query, kv_cache, step, rows, output, output_lse):
            scores, values = self.scored(query, kv_cache, step.table[step.request[rows]], step.position[rows])
            size, count = -(-scores.shape[-1] // SplitDecode.SPLITS), len(query)
            parts = list(zip(scores.split(size, -1), values.split(size, -2), strict=True))
            if self.workspace is None or self.workspace.device != query.device:
                shape = (SplitDecode.SPLITS, ROWS_AT_ONCE, self.num_heads, self.head_size + 1)
                self.workspace = torch.empty(shape, device=query.device)
            for number, (some, held) in enumerate(parts):
                lse = some.logsumexp(-1, keepdim=True)
                weights = (some - lse.masked_fill(lse == -math.inf, 0)).exp()
                self.workspace[number, :count, :, 0] = lse.flatten(1)
                self.workspace[number, :count, :, 1:] = (weights @ held).flatten(1, 2)
            partial = self.workspace[: len(parts), :count]
            lses = partial[..., 0]
            lse = lses.logsumexp(0)
            if self.sinks is not None:
                sinks = self.per_head(self.sinks, query).flatten()
                lse = torch.where((step.position[rows] >= 0)[:, None], torch.logaddexp(lse, sinks), lse)
            shares = (lses - lse.masked_fill(lse == -math.inf, 0)).exp()
            output.copy_((partial[..., 1:] * shares[..., None]).sum(0))
            if output_lse is not None:
                output_lse.copy_(lse)
