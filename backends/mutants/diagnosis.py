"""Faults with a characteristic trace in the output: wrong factors, neighbours' values, rows at regular distances."""

import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import torch

from attncheck.backends.candidates.reference import ReferenceImpl
from attncheck.backends.mutants.base import Base
from attncheck.backends.mutants.masks import MaskedImpl
from attncheck.reference import visible

LOG2E = math.log2(math.e)


class Altered(ReferenceImpl):
    """Impl that uses the parameters that ``altered`` returns."""

    def altered(self, params, metadata):
        raise NotImplementedError

    def params(self, metadata):
        return self.altered(super().params(metadata), metadata)


# Scores.


class ScoresToBaseTwo(Base):
    """Multiplies the scores by log2(e), but uses natural exponentials."""

    class Impl(Altered):
        def altered(self, params, metadata):
            return replace(params, scale=params.softmax_scale * LOG2E)


class CapToBaseTwo(Base):
    """Multiplies the soft cap by log2(e), but not the scores."""

    class Impl(Altered):
        def altered(self, params, metadata):
            return replace(params, logits_soft_cap=params.logits_soft_cap and params.logits_soft_cap * LOG2E)


class CapOfAnotherModel(Base):
    """Caps the scores at 30, whatever the layer's soft cap."""

    class Impl(Altered):
        def altered(self, params, metadata):
            return replace(params, logits_soft_cap=params.logits_soft_cap and 30.0)


class SlopesOfKVHeads(Base):
    """Uses, for every query head, the ALiBi slope at the index of its KV head."""

    class Impl(Altered):
        def altered(self, params, metadata):
            if params.alibi_slopes is None:
                return params
            slopes = tuple(params.alibi_slopes[head // params.group_size] for head in range(params.num_heads))
            return replace(params, alibi_slopes=slopes)


class SinksOfKVHeads(Base):
    """Uses, for every query head, the sink at the index of its KV head."""

    class Impl(Altered):
        def altered(self, params, metadata):
            if params.sinks is None:
                return params
            sinks = tuple(params.sinks[head // params.group_size] for head in range(params.num_heads))
            return replace(params, sinks=sinks)


class SinksOfFourParts(Base):
    """Counts the sinks in each of four parts of the keys."""

    class Impl(Altered):
        def altered(self, params, metadata):
            return replace(params, sinks=params.sinks and tuple(sink + math.log(4) for sink in params.sinks))


class SinksOfNoLayer(Base):
    """Adds 0.7 to the sink of head 1."""

    class Impl(Altered):
        def altered(self, params, metadata):
            sinks = params.sinks and (params.sinks[0], params.sinks[1] + 0.7, *params.sinks[2:])
            return replace(params, sinks=sinks)


class ScalesByKind(Base):
    """Doubles the scores of single-row requests, and halves those of the others."""

    class Impl(ReferenceImpl):
        factor = 1.0

        def params(self, metadata):
            honest = super().params(metadata)
            return replace(honest, scale=honest.softmax_scale * self.factor)

        def attend(self, *arguments):
            *given, output, output_lse = arguments
            metadata = given[-1]
            starts = metadata.common.query_start_loc.tolist()
            for self.factor in (2.0, 0.5):
                own, own_lse = output.clone(), None if output_lse is None else output_lse.clone()
                super().attend(*given, own, own_lse)
                for first, end in pairwise(starts):
                    if (end - first == 1) == (self.factor == 2.0):
                        output[first:end] = own[first:end]
                        if own_lse is not None:
                            output_lse[first:end] = own_lse[first:end]
            self.factor = 1.0


class MasksAfterTheSoftmax(Base):
    """Sums the weights over hidden keys as well."""

    class Impl(ReferenceImpl):
        sees_all = False

        def params(self, metadata):
            honest = super().params(metadata)
            return replace(honest, causal=False, window=(-1, -1)) if self.sees_all else honest

        def attend(self, *arguments):
            *given, output, output_lse = arguments
            lse, every = (torch.zeros(output.shape[:2], dtype=torch.float32) for _ in range(2))
            self.sees_all = True
            super().attend(*given, output, every)
            self.sees_all = False
            super().attend(*given, output, lse)
            rows = given[-1].num_rows
            output[:rows] *= (lse - every)[:rows, :, None].exp().nan_to_num().to(output.dtype)
            if output_lse is not None:
                output_lse[:rows] = every[:rows]


# Where keys are read.


class Elsewhere(ReferenceImpl):
    """Impl that reads by the block table that ``found`` returns."""

    def found(self, table):
        raise NotImplementedError

    def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
        if caches is not None:
            table = self.found(metadata.common.block_table_tensor)
            metadata = replace(metadata, common=replace(metadata.common, block_table_tensor=table))
        super().attend(layer, query, key, value, caches, metadata, output, output_lse)


class TableOfTheRequestBefore(Base):
    """Reads the block table one row too early, and the first request's own row for the first request."""

    class Impl(Elsewhere):
        def found(self, table):
            return table[(torch.arange(len(table)) - 1).clamp(min=0)]


class PagesInSixteenBits(Base):
    """Stores page numbers in 16 bits."""

    class Impl(Elsewhere):
        def found(self, table):
            return table % 65536


class EightColumns(Base):
    """Holds only 8 columns of the block table, and reads them repeatedly."""

    class Impl(Elsewhere):
        def found(self, table):
            return table[:, torch.arange(table.shape[1]) % 8]


class LosesOneKeyATile(Base):
    """Loses the first key of each tile of 32, except the first tile."""

    class Impl(MaskedImpl):
        def sees(self, params, q, k, **_):
            return visible(params, q, k) & ((k % 32 != 0) | (k == 0))


class LosesEverySecondTile(Base):
    """Skips every second run of 32 keys."""

    class Impl(MaskedImpl):
        def sees(self, params, q, k, **_):
            return visible(params, q, k) & (k // 32 % 2 == 0)


class WindowOfTheFirstRow(Base):
    """Begins the window of all rows of a request where that of the first row begins."""

    class Impl(MaskedImpl):
        def sees(self, params, q, k, *, context, **_):
            left, right = params.window
            open_left = replace(params, window=(-1, right))
            return visible(open_left, q, k) & ((k >= context - left) | (left < 0))


# Queries and scales.


class QueriesOfHalfTheChannels(Base):
    """Multiplies only the first half of the channels of query and key."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, *rest):
            half = query.clone()
            half[..., query.shape[-1] // 2 :] = 0
            super().attend(layer, half, *rest)


class QueriesOfTheRowBefore(Base):
    """Uses the query of the previous row, and for the first row of a request that of its last."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            moved, starts = query.clone(), metadata.common.query_start_loc.tolist()
            for first, end in pairwise(starts):
                moved[first:end] = query[first:end].roll(1, 0)
            super().attend(layer, moved, key, value, caches, metadata, output, output_lse)


class ValuesDividedByTheirScale(Base):
    """Divides value codes by v_scale."""

    class Impl(ReferenceImpl):
        def attend(self, layer, *rest):
            super().attend(SimpleNamespace(_k_scale=layer._k_scale, _v_scale=1 / layer._v_scale), *rest)


# Correct results, stored wrongly.


class Spoiled(ReferenceImpl):
    """Impl that computes the right result, then changes ``output`` by ``spoil``."""

    def spoil(self, output, metadata):
        raise NotImplementedError

    def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
        super().attend(layer, query, key, value, caches, metadata, output, output_lse)
        self.spoil(output[: metadata.num_rows], metadata)


class HalvesOfTheOutput(Base):
    """Stores the second half of the channels before the first."""

    class Impl(Spoiled):
        def spoil(self, output, metadata):
            output.copy_(output.roll(output.shape[-1] // 2, -1))


class EightHeads(Base):
    """Stores the first 8 heads instead of the later ones."""

    class Impl(Spoiled):
        def spoil(self, output, metadata):
            output[:, 8:] = output[:, : max(output.shape[1] - 8, 0)].clone()


class FirstRowOfEachTile(Base):
    """Stores zeros in the first row of each tile of 16 if a request has more than 16 rows."""

    class Impl(Spoiled):
        def spoil(self, output, metadata):
            starts = metadata.common.query_start_loc.tolist()
            for first, end in pairwise(starts):
                if end - first > 16:
                    output[first:end:16] = 0


class RowsAtPageStarts(Base):
    """Reverses the channels of rows at the first slot of a page of 16, and adds 1."""

    class Impl(Spoiled):
        def spoil(self, output, metadata):
            common = metadata.common
            starts, lens = common.query_start_loc.tolist(), common.seq_lens.tolist()
            for (first, end), num_keys in zip(pairwise(starts), lens, strict=True):
                at = torch.arange(num_keys - (end - first), num_keys) % 16 == 0
                output[first:end][at] = output[first:end][at].flip(-1) + 1


class OneChannel(Base):
    """Adds 1 to channel 7 of every row."""

    class Impl(Spoiled):
        def spoil(self, output, metadata):
            output[..., 7] += 1
