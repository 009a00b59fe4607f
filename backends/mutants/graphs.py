"""Four honest backends, each of which a CUDA graph holds at exactly the level it declares, and three that claim more.

What all graph miniatures share is here too: plain causal attention in float32, of which every row is computed on its
own from tensors on the device. Other files of miniatures load this one by its path.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from attncheck.backends.contract import AttentionCGSupport
from attncheck.backends.paged import PagedBackend, PagedImpl
from attncheck.backends.paged_metadata import PagedBuilder, PagedMetadata

NOWHERE = -1
"""The position of a row that belongs to no request: it sees no key."""


def locate(starts, seq_lens, num_rows):
    """``(request, position)`` of each row, from the device's own offsets and lengths; no request: NOWHERE."""
    rows = torch.arange(num_rows, dtype=torch.int32, device=starts.device)
    request = torch.searchsorted(starts[1:], rows, right=True).clamp(max=len(seq_lens) - 1)
    position = seq_lens[request] - starts[1:][request] + rows
    return request, position.masked_fill(rows >= starts[-1], NOWHERE)


def locate_by(common, num_rows, seq_lens=None):
    """The same by common metadata, or with other lengths than theirs."""
    return locate(common.query_start_loc, common.seq_lens if seq_lens is None else seq_lens, num_rows)


def locate_uniform(common, num_rows, query_len):
    """The same where every request has ``query_len`` rows, a number of the host: row ``t`` is of ``t // query_len``."""
    starts, seq_lens = common.query_start_loc, common.seq_lens
    rows = torch.arange(num_rows, dtype=torch.int32, device=starts.device)
    request = (rows // query_len).clamp(max=len(seq_lens) - 1)
    position = seq_lens[request] - query_len + rows % query_len
    return request, position.masked_fill(rows >= starts[-1], NOWHERE)


def locate_on_host(metadata, num_rows, first=0):
    """The same from the host's numbers, of the rows of request ``first`` and all behind it: a graph keeps them."""
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
    """What each row's request holds at positions 0, 1, ...: float32 key and value ``[rows, keys, heads, size]``, seen.

    Pages behind the row's position are not looked up, and slots behind it count as zeros, whatever they hold.
    """
    block_size, position = caches[0].shape[1], position[:, None]
    pages = torch.arange(table.shape[1], device=table.device) * block_size
    blocks = table[request].masked_fill(pages > position, 0)
    seen = torch.arange(table.shape[1] * block_size, device=table.device) <= position
    hidden = ~seen[..., None, None]
    key, value = (cache[blocks].flatten(1, 2).masked_fill(hidden, 0).float() for cache in caches)
    return key, value, seen


def attention(query, key, value, seen, scale):
    """Output ``[rows, heads, size]`` and log-sum-exp ``[rows, heads]`` in float32; a row that sees nothing: 0, -inf."""
    groups = query.float().unflatten(1, (key.shape[2], -1))
    scores = torch.einsum("tkgd,tnkd->tkgn", groups, key) * scale
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    return torch.einsum("tkgn,tnkd->tkgd", weights, value).flatten(1, 2), lse.flatten(1, 2)


def write_rows(new, caches, slots):
    """Row ``t`` to ``slots[t]``. Rows without a slot repeat the first that has one; without any, nothing changes."""
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
    """One layer, row by row. Subclasses replace a step of it."""

    metadata_cls = PagedMetadata

    def write(self, layer, key, value, key_cache, value_cache, slot_mapping):
        write_rows((key, value), (key_cache, value_cache), slot_mapping)

    def locate(self, metadata, num_rows):
        return locate_by(metadata.common, num_rows)

    def attend_rows(self, query, caches, table, request, position, metadata):
        return attention(query, *gather(caches, table, request, position), self.scale)

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
    """A step, and what its builder adds for ``forward``; None: nothing."""

    plan: object = None


class PlannedImpl(RowsImpl):
    """Reads what its builder added."""

    metadata_cls = Planned


class Base(PagedBackend):
    """Nothing of a step is read on the host: a graph serves any batch that fits."""

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


# Honest: each is held at exactly the level it declares.


class RowByRow(Base):
    """``ALWAYS``: the base itself."""


class EqualRows(Base):
    """``UNIFORM_BATCH``: how many rows a request has is a number of the host, and the graph keeps it.

    A batch of unequal requests is laid out on the host.
    """

    level = AttentionCGSupport.UNIFORM_BATCH

    class Impl(RowsImpl):
        def locate(self, metadata, num_rows):
            lens = [n for n in metadata.query_lens if n]
            if len(set(lens)) != 1 or any(metadata.query_lens[len(lens) :]):
                return locate_on_host(metadata, num_rows)
            return locate_uniform(metadata.common, num_rows, lens[0])


class RowPerRequest(Base):
    """``UNIFORM_SINGLE_TOKEN_DECODE``: a decode has a kernel of its own, all else is laid out on the host."""

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


# Claims.


class ClaimsSingleDecode(HostLengths):
    """Promises decodes: every replay attends with the lengths of the capture."""

    level = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


class ClaimsUniformBatch(RowPerRequest):
    """Promises the verification of drafts, which it lays out on the host."""

    level = AttentionCGSupport.UNIFORM_BATCH


class ClaimsAlways(EqualRows):
    """Promises mixed batches: every replay cuts the rows as the capture's dummies were cut."""

    level = AttentionCGSupport.ALWAYS


class ClaimsByTheConfig(RowPerRequest):
    """The attribute is right; the method that engines ask instead promises everything."""

    class Builder(PagedBuilder):
        @classmethod
        def get_cudagraph_support(cls, vllm_config, kv_cache_spec):
            return AttentionCGSupport.ALWAYS
