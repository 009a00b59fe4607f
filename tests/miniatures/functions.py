"""Backends with wrong functions besides attention: merging states, short convolution, moving pages.

The base class is correct and computes in float32, as kernels do. Each other class changes a few lines.
``test_functions.py`` names the check that must fail for it.
"""

import torch
from torch.nn.functional import conv1d, pad, silu

from attncheck.backends.mutants.plain import Base
from attncheck.reference import reshape_and_cache, swap_blocks


class Miniature(Base):
    """The reference, with functions composed of the methods below."""

    @classmethod
    def functions(cls):
        return {
            "merge_attn_states": cls.merge,
            "causal_conv1d": cls.convolve,
            "reshape_and_cache": cls.write,
            "copy_blocks": cls.copy,
            "swap_blocks": cls.swap,
        }

    # Merging.

    @classmethod
    def merge(cls, out_a, lse_a, out_b, lse_b):
        highest = torch.maximum(lse_a, lse_b)
        w_a, w_b = cls.weigh(lse_a, highest), cls.weigh(lse_b, highest)
        total = w_a + w_b
        out = cls.part(out_a, w_a) + cls.part(out_b, w_b)
        out = out / total.masked_fill(total == 0, 1.0)[..., None]
        return out.to(out_a.dtype), highest + total.log()

    @staticmethod
    def weigh(lse, highest):
        return torch.exp(lse - highest.masked_fill(highest.isinf(), 0.0))

    @staticmethod
    def part(out, weight):
        return (out.float() * weight[..., None]).masked_fill((weight == 0)[..., None], 0.0)

    # Convolution: lengths are read on the host, sequences are processed one by one.

    @classmethod
    def convolve(
        cls, x, weight, bias, states, query_start_loc, cache_indices, has_initial_state, *, activation, pad_id
    ):
        y, past = torch.zeros_like(x), weight.shape[1] - 1
        starts = query_start_loc.tolist()
        for r, line in enumerate(cache_indices.tolist()):
            first, last = starts[r], starts[r + 1]
            if not cls.is_live(line, pad_id, last - first):
                continue
            before = cls.remembered(states[line], past, bool(has_initial_state[r]), x, first)
            tape = torch.cat([before, x[first:last].T], dim=1)
            z = conv1d(tape.float()[None], cls.taps(weight).float()[:, None], groups=len(tape))[0].T
            z = z if bias is None else z + bias.float()
            y[first:last] = (z if activation is None else silu(z)).to(x.dtype)
            cls.remember(states[line], tape, past, last - first)
        return y

    @staticmethod
    def is_live(line, pad_id, length):
        return line != pad_id and length > 0

    @staticmethod
    def remembered(state, past, is_there, x, first):
        return state[:, :past].clone() if is_there else torch.zeros_like(state[:, :past])

    @staticmethod
    def taps(weight):
        return weight

    @staticmethod
    def remember(state, tape, past, length):
        state[:, :past] = tape[:, tape.shape[1] - past :]

    # Pages are copied one by one, since no case reads a page that it also writes.

    write = staticmethod(reshape_and_cache)
    swap = staticmethod(swap_blocks)

    @classmethod
    def copy(cls, caches, mapping):
        for cache in caches:
            for source, destination in mapping.tolist():
                cache[destination] = cache[source]


# Merging.


class AveragesOutputs(Miniature):
    """Weighs both states equally."""

    @classmethod
    def merge(cls, out_a, lse_a, out_b, lse_b):
        return (out_a + out_b) / 2, super().merge(out_a, lse_a, out_b, lse_b)[1]


class WeighsInBaseTwo(Miniature):
    """Treats natural log-sum-exps as if they were to base 2."""

    @staticmethod
    def weigh(lse, highest):
        return torch.exp2(lse - highest.masked_fill(highest.isinf(), 0.0))


class CountsEmptyStates(Miniature):
    """Gives an empty state the weight of one whose log-sum-exp is 0."""

    @classmethod
    def merge(cls, out_a, lse_a, out_b, lse_b):
        return super().merge(out_a, lse_a.nan_to_num(neginf=0.0), out_b, lse_b.nan_to_num(neginf=0.0))


class SubtractsInfinities(Miniature):
    """Computes -inf - -inf where both states are empty."""

    @staticmethod
    def weigh(lse, highest):
        return torch.exp(lse - highest)


class SubtractsNoMaximum(Miniature):
    """Computes exp without subtracting the maximum, so that it may overflow."""

    @classmethod
    def merge(cls, out_a, lse_a, out_b, lse_b):
        total = lse_a.exp() + lse_b.exp()
        out = out_a.float() * lse_a.exp()[..., None] + out_b.float() * lse_b.exp()[..., None]
        out = torch.where((total > 0)[..., None], out / total[..., None], 0.0)
        return out.to(out_a.dtype), total.log()


class SwapsWeights(Miniature):
    """Gives each state the weight of the other."""

    @classmethod
    def merge(cls, out_a, lse_a, out_b, lse_b):
        return super().merge(out_a, lse_b, out_b, lse_a)


class FavoursTheFirst(Miniature):
    """Returns the first output where both states are empty, whatever it contains."""

    @classmethod
    def merge(cls, out_a, lse_a, out_b, lse_b):
        out, lse = super().merge(out_a, lse_a, out_b, lse_b)
        return torch.where(lse.isinf()[..., None], out_a, out), lse


class MultipliesByZero(Miniature):
    """Declares merge_nan, but multiplies by a weight of 0, so that NaN remains."""

    @staticmethod
    def part(out, weight):
        return out.float() * weight[..., None]


class MergesLseToBaseTwo(Miniature):
    """Returns a log-sum-exp to base 2, although the inputs are natural."""

    @classmethod
    def merge(cls, out_a, lse_a, out_b, lse_b):
        out, lse = super().merge(out_a, lse_a, out_b, lse_b)
        return out, lse / torch.log(torch.tensor(2.0))


class MergesInPlace(Miniature):
    """Overwrites its first argument with the merged output."""

    @classmethod
    def merge(cls, out_a, lse_a, out_b, lse_b):
        out, lse = super().merge(out_a, lse_a, out_b, lse_b)
        out_a.copy_(out)
        return out, lse


class ReturnsOnlyTheOutput(Miniature):
    """Returns no log-sum-exp."""

    @classmethod
    def merge(cls, out_a, lse_a, out_b, lse_b):
        return super().merge(out_a, lse_a, out_b, lse_b)[0]


class RefusesToMerge(Miniature):
    """Offers a function that is not implemented."""

    @classmethod
    def merge(cls, out_a, lse_a, out_b, lse_b):
        raise NotImplementedError("not in this build")


# Convolution.


class ReversesTaps(Miniature):
    """Convolves with reversed taps, as in mathematics, instead of correlating."""

    @staticmethod
    def taps(weight):
        return weight.flip(1)


class KeepsOnlyNewRows(Miniature):
    """Zeroes the older part of the state after a sequence that is shorter than the state."""

    @staticmethod
    def remember(state, tape, past, length):
        kept = min(length, past)
        state[:, :past] = pad(tape[:, tape.shape[1] - kept :], (past - kept, 0))


class KeepsShortStates(Miniature):
    """Leaves the state as it was after a sequence that is shorter than it."""

    @staticmethod
    def remember(state, tape, past, length):
        if length >= past:
            Miniature.remember(state, tape, past, length)


class RemembersPadding(Miniature):
    """Lets rows of padding behind the last sequence enter its state."""

    @classmethod
    def convolve(cls, x, weight, bias, states, query_start_loc, cache_indices, has_initial_state, **options):
        arguments = (x, weight, bias, states, query_start_loc, cache_indices, has_initial_state)
        last = int((cache_indices != options["pad_id"]).nonzero()[-1])
        line, past = int(cache_indices[last]), weight.shape[1] - 1
        before = cls.remembered(states[line], past, bool(has_initial_state[last]), x, 0)
        y = super().convolve(*arguments, **options)
        tape = torch.cat([before, x[int(query_start_loc[last]) :].T], dim=1)
        cls.remember(states[line], tape, past, tape.shape[1] - past)
        return y


class ForgetsInChunks(Miniature):
    """Uses no state where a sequence has several rows."""

    @classmethod
    def convolve(cls, x, weight, bias, states, query_start_loc, cache_indices, has_initial_state, **options):
        remembers = has_initial_state & (query_start_loc.diff() == 1)
        return super().convolve(x, weight, bias, states, query_start_loc, cache_indices, remembers, **options)


class RemembersWhatNeverWas(Miniature):
    """Uses the state line of a new sequence, whatever it contains."""

    @staticmethod
    def remembered(state, past, is_there, x, first):
        return state[:, :past].clone()


class LooksAtNeighbours(Miniature):
    """Lets a new sequence continue the previous one."""

    @staticmethod
    def remembered(state, past, is_there, x, first):
        before = Miniature.remembered(state, past, is_there, x, first)
        if not is_there and first >= past > 0:
            before = x[first - past : first].T.clone()
        return before


class UpdatesPaddedLines(Miniature):
    """Treats the index of padding as a line."""

    @staticmethod
    def is_live(line, pad_id, length):
        return length > 0


class ReadsSpareColumns(Miniature):
    """Takes the last columns of the buffer as the state."""

    @staticmethod
    def remembered(state, past, is_there, x, first):
        return state[:, state.shape[1] - past :].clone() if is_there else torch.zeros_like(state[:, :past])


class WritesSpareColumns(Miniature):
    """Writes zeros to the columns of the buffer beyond the state."""

    @staticmethod
    def remember(state, tape, past, length):
        Miniature.remember(state, tape, past, length)
        state[:, past:] = 0


class StatesInBfloat16(Miniature):
    """Rounds the state to bfloat16."""

    @staticmethod
    def remember(state, tape, past, length):
        Miniature.remember(state, tape.bfloat16(), past, length)


class KeepsFirstLines(Miniature):
    """Uses the cache lines of the first call for every call with the same shapes."""

    @classmethod
    def convolve(cls, x, weight, bias, states, query_start_loc, cache_indices, has_initial_state, **options):
        if not hasattr(cls, "lines"):
            cls.lines = {}
        kept = cls.lines.setdefault((x.shape, x.dtype, tuple(query_start_loc.tolist())), cache_indices.clone())
        return super().convolve(x, weight, bias, states, query_start_loc, kept, has_initial_state, **options)


# Pages.


class SwapsBothWays(Miniature):
    """Also copies the destination's old contents to the source."""

    @staticmethod
    def swap(src, dst, mapping):
        for source, destination in mapping.tolist():
            held = dst[destination].clone()
            dst[destination] = src[source]
            src[source] = held


class CopiesToTheNextPage(Miniature):
    """Copies to the page after the destination."""

    @classmethod
    def copy(cls, caches, mapping):
        super().copy(caches, mapping + torch.tensor([0, 1]))


class CopiesKeysOnly(Miniature):
    """Copies the first cache only."""

    @classmethod
    def copy(cls, caches, mapping):
        super().copy(caches[:1], mapping)


class CopiesEachSourceOnce(Miniature):
    """Copies each source to only one of its destinations."""

    @classmethod
    def copy(cls, caches, mapping):
        super().copy(caches, torch.tensor(list(dict(mapping.tolist()).items())))


class WritesPaddingRows(Miniature):
    """Writes rows of slot -1 to the last slot."""

    @staticmethod
    def write(key, value, key_cache, value_cache, slot_mapping, *, k_scale, v_scale):
        size = key_cache.shape[1]
        for rows, cache in ((key, key_cache), (value, value_cache)):
            cache[slot_mapping // size, slot_mapping % size] = rows[: len(slot_mapping)].to(cache.dtype)


class ScalesWhatItWrites(Miniature):
    """Divides by the scales of a cache that needs none."""

    @staticmethod
    def write(key, value, key_cache, value_cache, slot_mapping, *, k_scale, v_scale):
        reshape_and_cache(key / k_scale, value / v_scale, key_cache, value_cache, slot_mapping)
