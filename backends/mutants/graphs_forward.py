"""Operations of ``forward`` that a captured graph cannot hold, or freezes: one fault each.

Each is right without a graph, apart from effects of padding. Of those, NaN in padding rows of the output lowers no
level. The base has none of these faults.
"""

from dataclasses import replace

import torch

from attncheck.backends.contract import AttentionCGSupport
from attncheck.backends.mutants import graphs

Base, RowsImpl = graphs.Base, graphs.RowsImpl


class GathersTheLongest(RowsImpl):
    """Impl that gathers as many pages as ``longest`` keys need."""

    def longest(self, metadata):
        raise NotImplementedError

    def attend_rows(self, query, caches, table, request, position, metadata):
        pages = -(-self.longest(metadata) // caches[0].shape[1])
        return super().attend_rows(query, caches, table[:, :pages], request, position, metadata)


# Reads on the host.


class ItemForManyRequests(Base):
    """With more than four requests, reads the longest length back, to gather less: capturing a large graph fails."""

    class Impl(GathersTheLongest):
        def longest(self, metadata):
            common = metadata.common
            return common.seq_lens.max().item() if common.num_reqs > 4 else common.max_seq_len


class TolistForPrefill(Base):
    """Rows of drafts take the code path of prompts, which reads the lengths back."""

    level = AttentionCGSupport.UNIFORM_BATCH

    class Impl(RowsImpl):
        def locate(self, metadata, num_rows):
            common = metadata.common
            if common.max_query_len == 1:
                return graphs.locate_by(common, num_rows)
            starts, lens = common.query_start_loc.tolist(), common.seq_lens.tolist()
            return graphs.locate_on_host(
                replace(metadata, query_start_loc=tuple(starts), seq_lens=tuple(lens)), num_rows
            )


class BranchesOnTheData(Base):
    """Long contexts have a separate kernel, and a tensor's value decides which one is launched."""

    class Impl(GathersTheLongest):
        def longest(self, metadata):
            common = metadata.common
            return common.max_seq_len if (common.seq_lens > 8).any() else 8


class CopiesToTheHost(Base):
    """Fetches the last offset, to compute only the real rows."""

    class Impl(RowsImpl):
        def locate(self, metadata, num_rows):
            request, position = super().locate(metadata, num_rows)
            real = int(metadata.common.query_start_loc.cpu()[-1])
            position[real:] = graphs.NOWHERE
            return request, position


class CopiesFromTheHost(Base):
    """Copies a list to a tensor on the device in every call: a capture cannot hold a copy from pageable memory."""

    class Impl(RowsImpl):
        def attend_rows(self, query, *args):
            ones = torch.tensor([1.0] * self.num_heads, device=query.device)
            return super().attend_rows(query.float() * ones[:, None], *args)


class CopiesTheTwins(Base):
    """Copies the lengths from their host twin in ``forward``: a replay does not repeat that."""

    class Impl(RowsImpl):
        def locate(self, metadata, num_rows):
            common = metadata.common
            lens = common.seq_lens_cpu.to(common.seq_lens.device)
            return graphs.locate_by(common, num_rows, lens)


# Shapes that depend on data.


class ShapesByTheData(Base):
    """Computes only the real rows, whose number depends on data: ``nonzero``."""

    class Impl(RowsImpl):
        def attend_rows(self, query, caches, table, request, position, metadata):
            real = (position >= 0).nonzero().flatten()
            out, lse = super().attend_rows(query[real], caches, table, request[real], position[real], metadata)
            all_rows = out.new_zeros(len(query), *out.shape[1:]).index_copy_(0, real, out)
            return all_rows, lse.new_full((len(query), lse.shape[1]), -torch.inf).index_copy_(0, real, lse)


class SelectsSlots(Base):
    """Selects rows with a slot by ``masked_select``, and writes them."""

    class Impl(RowsImpl):
        def write(self, layer, key, value, key_cache, value_cache, slot_mapping):
            has_slot = slot_mapping >= 0
            slots = slot_mapping.masked_select(has_slot)
            rows = torch.arange(len(slot_mapping), device=slots.device).masked_select(has_slot)
            for new, cache in ((key, key_cache), (value, value_cache)):
                cache[slots // cache.shape[1], slots % cache.shape[1]] = new[rows].to(cache.dtype)


class WritesByMask(Base):
    """Writes the real rows into the output through a mask."""

    class Impl(RowsImpl):
        def finish(self, out, lse, output, output_lse, metadata, position):
            kept = output[: len(out)].nan_to_num()
            kept[position >= 0] = out[position >= 0].to(output.dtype)
            super().finish(kept, lse, output, output_lse, metadata, position)


# Numbers that the graph keeps.


class ReadsLengthsAsInts(Base):
    """The lengths in the metadata are host numbers: every replay attends with those of the dummies."""

    class Impl(RowsImpl):
        def locate(self, metadata, num_rows):
            common = metadata.common
            lens = [torch.full((), n, dtype=torch.int32, device=common.seq_lens.device) for n in metadata.seq_lens]
            return graphs.locate_by(common, num_rows, torch.stack(lens))


class TrustsTheHostMaximum(Base):
    """Gathers for the longest request of the step, which at capture is a dummy of one page."""

    class Impl(GathersTheLongest):
        def longest(self, metadata):
            return int(metadata.common.seq_lens_cpu.max())


class FreezesTheSplits(Base):
    """Computes as many splits of eight keys as the longest request has: the graph keeps the number of its dummies."""

    class Impl(RowsImpl):
        def attend_rows(self, query, caches, table, request, position, metadata):
            splits = -(-max(metadata.seq_lens) // 8)
            key, value, seen = graphs.gather(caches, table, request, position)
            parts = [
                graphs.attention(query, *(x[:, 8 * i : 8 * i + 8] for x in (key, value, seen)), self.scale)
                for i in range(splits)
            ]
            outs, lses = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
            lse = lses.logsumexp(0)
            return (outs * (lses - lse.masked_fill(lse == -torch.inf, 0)).exp()[..., None]).sum(0), lse


# Padding.


class DividesByTheLength(Base):
    """Divides by the number of keys and multiplies again: 0 / 0 in the rows of a padding request."""

    class Impl(RowsImpl):
        def attend_rows(self, query, caches, table, request, position, metadata):
            out, lse = super().attend_rows(query, caches, table, request, position, metadata)
            keys = (position + 1).float()[:, None, None]
            return out * (keys / keys), lse


class ReadsTheNullPage(Base):
    """Assumes that every row sees a key: a padding row sees the first key of the null page, whatever it holds."""

    class Impl(RowsImpl):
        def attend_rows(self, query, caches, table, request, position, metadata):
            query = query.masked_fill((position < 0)[:, None, None], 0)
            return super().attend_rows(query, caches, table, request, position.clamp(min=0), metadata)


class ScalesByTheWholeQuery(Base):
    """Divides the query by its largest element, padding rows included: their NaN reaches every row."""

    class Impl(RowsImpl):
        def attend_rows(self, query, *args):
            largest = query.float().abs().amax()
            return super().attend_rows((query.float() / largest) * largest, *args)


class WritesNaNIntoPadding(Base):
    """Writes NaN into rows of no request, so that any later reduction over all rows gives NaN."""

    class Impl(RowsImpl):
        def finish(self, out, lse, output, output_lse, metadata, position):
            out = out.masked_fill((position < 0)[:, None, None], torch.nan)
            super().finish(out, lse, output, output_lse, metadata, position)


# The cache, and a workspace.


class DummiesIntoTheNullPage(Base):
    """Writes a row without a slot to slot 0: capture leaves NaN in the page that every padding row reads."""

    class Impl(RowsImpl):
        def write(self, layer, key, value, key_cache, value_cache, slot_mapping):
            super().write(layer, key, value, key_cache, value_cache, slot_mapping.clamp(min=0))


class NegativeSlotsWrap(Base):
    """Writes a row without a slot to the last slot of the pool."""

    class Impl(RowsImpl):
        def write(self, layer, key, value, key_cache, value_cache, slot_mapping):
            for new, cache in ((key, key_cache), (value, value_cache)):
                place = slot_mapping // cache.shape[1], slot_mapping % cache.shape[1]
                cache[place] = new[: len(slot_mapping)].to(cache.dtype)


class WorkspaceMoves(Base):
    """Reallocates the workspace for a larger step: graphs captured before keep using freed memory."""

    class Impl(RowsImpl):
        workspace = None

        def attend_rows(self, query, *args):
            if self.workspace is None or len(self.workspace) < len(query):
                self.workspace = torch.empty_like(query, dtype=torch.float32)
            return super().attend_rows(self.workspace[: len(query)].copy_(query), *args)
