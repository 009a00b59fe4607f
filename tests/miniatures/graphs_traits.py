"""Attention with modifiers that is valid in a graph of any batch, and faults that one trait of a layer or cache shows.

Each fault is correct on plain layers.
"""

import torch

from attncheck.backends.mutants import graphs
from attncheck.backends.paged_metadata import PagedBuilder

Miniature, RowsImpl, PlannedImpl = graphs.Base, graphs.RowsImpl, graphs.PlannedImpl

SHORT = 64
"""Keys in the first part of ``SplitsUnderACap``."""


class ModifiedImpl(PlannedImpl):
    """Applies window, soft cap and ALiBi on the device, by the distance of each key from the row."""

    def attend_rows(self, query, caches, table, request, position, metadata):
        key, value, seen = graphs.gather(caches, table, request, position)
        distance = position[:, None] - torch.arange(seen.shape[1], device=seen.device)
        if self._window_size is not None:
            seen = seen & (distance < self._window_size)
        groups = query.float().unflatten(1, (key.shape[2], -1))
        scores = torch.einsum("tkgd,tnkd->tkgn", groups, key) * self.scale
        if self.logits_soft_cap is not None:
            scores = self.logits_soft_cap * (scores / self.logits_soft_cap).tanh()
        if (slopes := self.slopes_on(query.device)) is not None:
            scores = scores - slopes.unflatten(0, groups.shape[1:3])[..., None] * distance[:, None, None]
        scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
        return torch.einsum("tkgn,tnkd->tkgd", weights, value).flatten(1, 2), lse.flatten(1, 2)


class Modified(Miniature):
    """``ALWAYS``, with every modifier, dtype, page size and layout that it declares."""

    features = frozenset({"lse", "sliding_window", "logits_soft_cap", "alibi"})
    Impl = ModifiedImpl


def pages_of(metadata, block_size):
    """Return the pages of the longest request, a host number: a graph freezes its value at capture."""
    return -(-max(metadata.seq_lens) // block_size)


class WindowReadsALength(Modified):
    """A layer with a window gathers as many pages as the longest request had at capture."""

    class Impl(ModifiedImpl):
        def attend_rows(self, query, caches, table, request, position, metadata):
            if self._window_size is not None:
                table = table[:, : pages_of(metadata, caches[0].shape[1])]
            return super().attend_rows(query, caches, table, request, position, metadata)


class SplitsUnderACap(Modified):
    """Under a soft cap, capture decides whether there are keys beyond the first part."""

    class Impl(ModifiedImpl):
        def attend_rows(self, query, caches, table, request, position, metadata):
            if self.logits_soft_cap is not None and max(metadata.seq_lens) <= SHORT:
                table = table[:, : -(-SHORT // caches[0].shape[1])]
            return super().attend_rows(query, caches, table, request, position, metadata)


class ReadsALengthOfHND(Modified):
    """In HND layout, it gathers as many pages as the longest request had at capture."""

    class Impl(ModifiedImpl):
        def attend_rows(self, query, caches, table, request, position, metadata):
            _, token, head, _ = caches[0].stride()
            if token < head:
                table = table[:, : pages_of(metadata, caches[0].shape[1])]
            return super().attend_rows(query, caches, table, request, position, metadata)


class RowsOfHalf(Modified):
    """In float16, the rows of a request are a host number, so that unequal requests are wrong in a replay."""

    class Impl(ModifiedImpl):
        dtype = None

        def attend(self, layer, query, *rest):
            self.dtype = query.dtype
            super().attend(layer, query, *rest)

        def locate(self, metadata, num_rows):
            lens = {query_len for query_len in metadata.query_lens if query_len}
            if self.dtype != torch.float16 or len(lens) != 1 or 0 in metadata.query_lens:
                return super().locate(metadata, num_rows)
            return graphs.locate_uniform(metadata.common, num_rows, lens.pop())


class DraftsUnderALiBi(Modified):
    """Under ALiBi, drafts reuse the lengths of the previous step, so that each bias is wrong by one position."""

    class Builder(PagedBuilder):
        def __init__(self, *args):
            super().__init__(*args)
            most = self.vllm_config.scheduler_config.max_num_seqs
            self.lens, self.is_draft = torch.zeros(most, dtype=torch.int32, device=self.device), False

        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            metadata, common = super().build(common_prefix_len, common_attn_metadata, fast_build), common_attn_metadata
            lens = self.lens[: common.num_reqs]
            metadata.plan = lens if self.is_draft else lens.copy_(common.seq_lens)
            return metadata

        def build_for_drafting(self, common_attn_metadata, draft_index):
            self.is_draft = True
            metadata = self.build(0, common_attn_metadata, fast_build=True)
            self.is_draft = False
            return metadata

    class Impl(ModifiedImpl):
        def locate(self, metadata, num_rows):
            lens = None if self.alibi_slopes is None else metadata.plan
            return graphs.locate_by(metadata.common, num_rows, lens)
