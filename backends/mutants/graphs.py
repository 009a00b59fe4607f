"""Four correct backends, each with exactly the CUDA graph level it declares, and four that claim more.

This module also has the code that all graph mutants share: plain causal attention in float32, which computes every row
separately from tensors on the device.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from attncheck.backends.contract import AttentionCGSupport
from attncheck.backends.paged import PagedBackend, PagedImpl
from attncheck.backends.paged_metadata import PagedBuilder, PagedMetadata

NOWHERE = -1
"""Position of a row that belongs to no request; it sees no key."""
_ROWS_AT_ONCE = 16


def locate(starts, seq_lens, num_rows):
    """Return ``(request, position)`` of each row from offsets and lengths on the device; NOWHERE for no request."""
    rows = torch.arange(num_rows, dtype=torch.int32, device=starts.device)
    request = torch.searchsorted(starts[1:], rows, right=True).clamp(max=len(seq_lens) - 1)
    position = seq_lens[request] - starts[1:][request] + rows
    return request, position.masked_fill(rows >= starts[-1], NOWHERE)


def locate_by(common, num_rows, seq_lens=None):
    """Return the same from common metadata, optionally with other lengths."""
    return locate(common.query_start_loc, common.seq_lens if seq_lens is None else seq_lens, num_rows)


def locate_uniform(common, num_rows, query_len):
    """Return the same for ``query_len`` rows per request, a host number: row ``t`` is of ``t // query_len``."""
    starts, seq_lens = common.query_start_loc, common.seq_lens
    rows = torch.arange(num_rows, dtype=torch.int32, device=starts.device)
    request = (rows // query_len).clamp(max=len(seq_lens) - 1)
    position = seq_lens[request] - query_len + rows % query_len
    return request, position.masked_fill(rows >= starts[-1], NOWHERE)


def locate_on_host(metadata, num_rows, first=0):
    """Return the same from host numbers, for the rows of request ``first`` and later ones; a graph freezes them."""
    device = metadata.common.seq_lens.device
    begin = metadata.query_start_loc[first]
    requests, positions = [], []
    for request, start, end, seq_len in metadata.requests():
        if request >= first:
            requests.append(torch.full((end - start,), request, device=device))
            positions.append(torch.arange(seq_len - (end - start), seq_len, device=device))
    padding = num_rows - max(begin, metadata.num_rows)
    requests.append(torch.zeros(padding, dtype=torch.int64, device=device))
    positions.append(torch.full((padding,), NOWHERE, device=device))
    return torch.cat(requests), torch.cat(positions)


def gather(caches, table, request, position):
    """Return each row's keys and values at positions 0, 1, ... (float32 ``[rows, keys, heads, size]``), and a mask.

    Pages beyond the row's position are not looked up. Values beyond it are 0; keys are left for the mask.
    """
    block_size, position = caches[0].shape[1], position[:, None]
    pages = torch.arange(table.shape[1], device=table.device) * block_size
    blocks = table[request].masked_fill(pages > position, 0)
    seen = torch.arange(table.shape[1] * block_size, device=table.device) <= position
    key, value = (cache[blocks].flatten(1, 2) for cache in caches)
    return key.float(), value.masked_fill_(~seen[..., None, None], 0).float(), seen


def attention(query, key, value, seen, scale):
    """Return output ``[rows, heads, size]`` and LSE ``[rows, heads]`` in float32; 0 and -inf if a row sees nothing."""
    groups = query.float().unflatten(1, (key.shape[2], -1))
    # A product for each head reads keys and values where they are; einsum would copy them.
    scores = torch.stack([groups[:, k] @ key[:, :, k].mT for k in range(key.shape[2])], dim=1) * scale
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    out = torch.stack([weights[:, k] @ value[:, :, k] for k in range(value.shape[2])], dim=1)
    return out.flatten(1, 2), lse.flatten(1, 2)


def write_rows(new, caches, slots):
    """Write row ``t`` to ``slots[t]``; rows without a slot repeat the first with one. Without any, write nothing."""
    if not len(slots):
        return
    has_slot = slots >= 0
    first = has_slot.int().argmax(0, keepdim=True)
    source = torch.where(has_slot, torch.arange(len(slots), device=slots.device), first)
    target, has_any = slots.index_select(0, source).clamp(min=0), has_slot.any()
    place = target // caches[0].shape[1], target % caches[0].shape[1]
    for rows, cache in zip(new, caches, strict=True):
        cache[place] = torch.where(has_any, rows.index_select(0, source).to(cache.dtype), cache[place])


class RowsImpl(PagedImpl):
    """One layer, computed row by row; subclasses replace single steps."""

    metadata_cls = PagedMetadata

    def write(self, layer, key, value, key_cache, value_cache, slot_mapping):
        write_rows((key, value), (key_cache, value_cache), slot_mapping)

    def locate(self, metadata, num_rows):
        return locate_by(metadata.common, num_rows)

    def attend_rows(self, query, caches, table, request, position, metadata):
        # Few rows at once: keys are gathered for each row.
        parts = zip(*(rows.split(_ROWS_AT_ONCE) for rows in (query, request, position)), strict=True)
        pairs = (attention(part, *gather(caches, table, *where), self.scale) for part, *where in parts)
        return tuple(torch.cat(each) for each in zip(*pairs, strict=True))

    def finish(self, out, lse, output, output_lse, metadata, position):
        output[: len(out)] = out.to(output.dtype)
        if output_lse is not None:
            output_lse[: len(lse)] = lse

    def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
        num_rows = metadata.common.num_actual_tokens
        request, position = self.locate(metadata, num_rows)
        table = metadata.common.block_table_tensor
        out, lse = self.attend_rows(query[:num_rows], caches, table, request, position, metadata)
        self.finish(out, lse, output, output_lse, metadata, position)


@dataclass
class Planned(PagedMetadata):
    """Metadata of one step, with data that the builder adds for ``forward``; None if it adds nothing."""

    plan: object = None


class PlannedImpl(RowsImpl):
    """Impl that reads what its builder added."""

    metadata_cls = Planned


class Base(PagedBackend):
    """Backend that reads nothing of a step on the host, so that a graph is right for any batch that fits."""

    features = frozenset({"lse"})
    level: ClassVar = AttentionCGSupport.ALWAYS
    Impl = RowsImpl
    Builder = PagedBuilder

    @classmethod
    def get_name(cls):
        return cls.__name__.upper()

    @classmethod
    def get_impl_cls(cls):
        return type("Impl", (cls.Impl,), {"backend": cls})

    @classmethod
    def get_builder_cls(cls):
        own = {"backend": cls, "metadata_cls": cls.Impl.metadata_cls, "cudagraph_support": cls.level}
        return type("Builder", (cls.Builder,), own)

    @classmethod
    def get_metadata_cls(cls):
        return cls.Impl.metadata_cls


# Correct: each has exactly the level that it declares.


class RowByRow(Base):
    """``ALWAYS``: the base itself."""


class EqualRows(Base):
    """``UNIFORM_BATCH``: the number of rows per request is a host number, which the graph keeps.

    Batches of unequal requests are laid out on the host.
    """

    level = AttentionCGSupport.UNIFORM_BATCH

    class Impl(RowsImpl):
        def locate(self, metadata, num_rows):
            lens = [n for n in metadata.query_lens if n]
            if len(set(lens)) != 1 or any(metadata.query_lens[len(lens) :]):
                return locate_on_host(metadata, num_rows)
            return locate_uniform(metadata.common, num_rows, lens[0])


class RowPerRequest(Base):
    """``UNIFORM_SINGLE_TOKEN_DECODE``: decodes have a separate kernel, all other steps are laid out on the host."""

    level = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    class Impl(RowsImpl):
        def locate(self, metadata, num_rows):
            if max(metadata.query_lens) > 1 or 0 in metadata.query_lens[: metadata.num_rows]:
                return locate_on_host(metadata, num_rows)
            return locate_uniform(metadata.common, num_rows, 1)


class HostLengths(Base):
    """``NEVER``: every step is laid out on the host."""

    level = AttentionCGSupport.NEVER

    class Impl(RowsImpl):
        def locate(self, metadata, num_rows):
            return locate_on_host(metadata, num_rows)


# Faulty: each claims a higher level than it has.


class ClaimsSingleDecode(HostLengths):
    """Claims single-token decodes, but every replay attends with the lengths of the capture."""

    level = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


class ClaimsUniformBatch(RowPerRequest):
    """Claims the verification of drafts, which it lays out on the host."""

    level = AttentionCGSupport.UNIFORM_BATCH


class ClaimsAlways(EqualRows):
    """Claims mixed batches, but every replay splits the rows as the capture's dummies were split."""

    level = AttentionCGSupport.ALWAYS


class ClaimsByTheConfig(RowPerRequest):
    """The class attribute is right, but the method that engines call instead claims every batch."""

    class Builder(PagedBuilder):
        @classmethod
        def get_cudagraph_support(cls, vllm_config, kv_cache_spec):
            return AttentionCGSupport.ALWAYS
