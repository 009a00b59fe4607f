"""Faults that depend on state kept from earlier batches, other layers or other micro-batches; right in isolation."""

from dataclasses import replace
from typing import ClassVar

import torch

from attncheck.backends.candidates.reference import ReferenceBuilder, ReferenceImpl
from attncheck.backends.mutants.base import Base, fits_in_memory
from attncheck.backends.mutants.stale import ChangesMetadata


def with_lengths(common, seq_lens):
    """Return the metadata with other lengths on the device."""
    return replace(common, seq_lens=seq_lens.to(common.seq_lens.dtype))


# Consecutive batches.


class PlansForTheLongest(Base):
    """Plans for the longest batch so far: rows of a shorter batch lose their last keys."""

    class Impl(ChangesMetadata):
        longest = 0

        def changed(self, common):
            own = int(common.seq_lens.max())
            self.longest = max(self.longest, own)
            return common if self.longest < own + 8 else with_lengths(common, (common.seq_lens - 1).clamp(min=1))


class KeepsTheMostRequests(Base):
    """Counts the requests of the largest batch so far: in a smaller batch, the last request is treated as padding."""

    class Impl(ReferenceImpl):
        most = 0

        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            requests = list(metadata.requests())
            self.most = max(self.most, len(requests))
            if len(requests) < self.most:
                output[requests[-1][1] : requests[-1][2]] = 0


class StaysSplit(Base):
    """Keys stay split after a step that had many: in a later step with few keys the last split is not merged."""

    class Impl(ChangesMetadata):
        is_split = False

        def changed(self, common):
            if int(common.seq_lens.max()) >= 512:
                self.is_split = True
                return common
            return with_lengths(common, (common.seq_lens - 4).clamp(min=1)) if self.is_split else common


class DecodesAsItPrefilled(Base):
    """A prompt sets a flag that is never reset: later decodes see no key of their own step."""

    class Impl(ChangesMetadata):
        had_prompt = False

        def changed(self, common):
            if common.max_query_len > 1:
                self.had_prompt = True
                return common
            return with_lengths(common, (common.seq_lens - 1).clamp(min=1)) if self.had_prompt else common


class PrefillsAsItDecoded(Base):
    """A workspace for decodes has one row per request: a prefill after a decode writes only each request's last row."""

    class Impl(ReferenceImpl):
        had_decodes = False

        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            if max(metadata.query_lens) == 1:
                self.had_decodes = True
            elif self.had_decodes:
                for _, start, end, _ in metadata.requests():
                    output[start : end - 1] = 0


class KeepsTheDecodeTable(Base):
    """The path for decodes keeps the block table of its first step; prefills read their own."""

    class Impl(ChangesMetadata):
        table = None

        def changed(self, common):
            if common.max_query_len > 1:
                return common
            if self.table is None:
                self.table = common.block_table_tensor.clone()
            rows, pages = common.block_table_tensor.shape
            if self.table.shape[0] < rows or self.table.shape[1] < pages:
                return common
            return replace(
                common, block_table_tensor=self.table[:rows, :pages] % (int(common.block_table_tensor.max()) + 1)
            )


# Continued requests.


class KeepsThePagesOfARequest(Base):
    """A continued request keeps its pages: a page that it gains is not read."""

    class Builder(ReferenceBuilder):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.known = {}

        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            common, size = common_attn_metadata, self.kv_cache_spec.block_size
            lens = common.seq_lens.tolist()
            query_lens = common.query_start_loc_cpu.diff().tolist()
            for row, (pages, new) in enumerate(zip(common.block_table_tensor.tolist(), query_lens, strict=True)):
                had, self.known[tuple(pages[:2])] = self.known.get(tuple(pages[:2]), 0), lens[row]
                if had > size and had == lens[row] - new:
                    lens[row] = min(lens[row], -(-had // size) * size)
            changed = with_lengths(common, torch.tensor(lens, device=common.seq_lens.device))
            return super().build(common_prefix_len, changed, fast_build)


class PredictsLengths(Base):
    """Increments the lengths of the same requests by the rows of the previous step instead of those of this one."""

    class Impl(ChangesMetadata):
        known = None

        def changed(self, common):
            first = common.block_table_tensor[:, 0].tolist()
            query_lens = common.query_start_loc.diff()
            was, self.known = self.known, (first, common.seq_lens.clone(), query_lens)
            if was is None or was[0] != first or not bool((was[1] + query_lens == common.seq_lens).all()):
                return common
            return with_lengths(common, torch.minimum(was[1] + was[2], common.seq_lens))


# Layers of a step.


class KeepsTheMaskInMetadata(Base):
    """The first layer of a step stores its window and scale in the metadata, and all later layers use them."""

    class Impl(ReferenceImpl):
        def params(self, metadata):
            if not hasattr(metadata, "params"):
                metadata.params = super().params(metadata)
            return metadata.params


class ShortensTheMetadata(Base):
    """The first layer of a step subtracts its own rows from the lengths in the metadata."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            lens = torch.tensor(metadata.seq_lens, device=query.device)
            own = replace(metadata, common=with_lengths(metadata.common, lens))
            super().attend(layer, query, key, value, caches, own, output, output_lse)
            metadata.seq_lens = tuple(max(1, n - 1) for n in metadata.seq_lens)


class GathersOnceAStep(Base):
    """Keeps gathered keys in the metadata, and uses them for every layer of the step."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            if caches is not None and fits_in_memory(caches[0]):
                if not hasattr(metadata, "gathered") or metadata.gathered[0].shape != caches[0].shape:
                    metadata.gathered = tuple(cache.clone() for cache in caches)
                caches = metadata.gathered
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)


class WritesForSharingLayers(Base):
    """A layer that shares another's cache stores the keys that it is given."""

    class Impl(ReferenceImpl):
        def __init__(self, *arguments, **keywords):
            super().__init__(*arguments, **keywords)
            self.kv_sharing_target_layer_name = None

        def _wrong_keys(self, key, value, metadata):
            return []


class ScaleOfTheLatestLayer(Base):
    """Keeps the scale in the class, so every layer uses that of the layer constructed last."""

    class Impl(ReferenceImpl):
        latest: ClassVar = {}

        def __init__(self, *arguments, **keywords):
            super().__init__(*arguments, **keywords)
            type(self).latest[self.head_size] = self.scale

        def params(self, metadata):
            return replace(super().params(metadata), scale=type(self).latest[self.head_size])


class TableOfTheLatestGroup(Base):
    """All builders of the process share one buffer for block tables: the group built last overwrites it."""

    class Builder(ReferenceBuilder):
        tables = torch.zeros(64, 128, dtype=torch.int32)

        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            table = common_attn_metadata.block_table_tensor
            rows, pages = table.shape
            if rows > 64 or pages > 128 or table.device.type != "cpu":
                return super().build(common_prefix_len, common_attn_metadata, fast_build)
            self.tables[:rows, :pages] = table
            common = replace(common_attn_metadata, block_table_tensor=self.tables[:rows, :pages])
            return super().build(common_prefix_len, common, fast_build)


# Micro-batches in flight.


class OnePlanForAllBuilders(Base):
    """Finds a plan by the number of rows and requests only: of two equal micro-batches one gets the other's."""

    class Builder(ReferenceBuilder):
        plans: ClassVar = {}

        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            made = super().build(common_prefix_len, common_attn_metadata, fast_build)
            shape = made.common.num_reqs, made.common.num_actual_tokens, tuple(made.common.block_table_tensor.shape)
            self.plans[shape] = made.common.seq_lens.clone()
            return made

    class Impl(ChangesMetadata):
        def changed(self, common):
            shape = common.num_reqs, common.num_actual_tokens, tuple(common.block_table_tensor.shape)
            return with_lengths(common, OnePlanForAllBuilders.Builder.plans[shape])


class BoundOfTheLatestBuild(Base):
    """Keeps the bound of all lengths in the impl's class: keys beyond that of the batch built last are not read."""

    class Builder(ReferenceBuilder):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            BoundOfTheLatestBuild.Impl.bound = common_attn_metadata.max_seq_len
            return super().build(common_prefix_len, common_attn_metadata, fast_build)

    class Impl(ChangesMetadata):
        bound = 0

        def changed(self, common):
            return with_lengths(common, common.seq_lens.clamp(max=self.bound))
