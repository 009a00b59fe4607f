"""Right backends of sparse attention in forms that no candidate has: slots, entries as they are, sparse layers alone."""

import pytest
import torch

from attncheck.backends.contract import Conventions
from attncheck.backends.kernel import kernel_backend
from attncheck.backends.mutants.plain import Base, PlainBackend, PlainImpl
from attncheck.backends.paged_metadata import topk_indices_of
from attncheck.harness.api import examine

CHECKS = "numerics,cache_write,containment,invariance,builder"


class GatheringImpl(PlainImpl):
    """Each row gathers the slots that it names from the cache, and sums over them as they are."""

    def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
        for row in range(metadata.num_rows):
            slots = metadata.topk_indices[row].long()
            slots = slots[slots >= 0]
            keys, values = (cache[slots // cache.shape[1], slots % cache.shape[1]].float() for cache in caches)
            none = torch.zeros(len(slots), dtype=torch.int64)
            scores = self.scores(query[row : row + 1], keys, none[:1], none)
            out, lse = self.state(scores, values, has_sinks=True)
            output[row], output_lse[row] = out[0].to(output.dtype), lse[0]


class GatheringSlots(Base):
    """As FlashMLA: the indices are slots, an indexer names no key twice, and no other layer is served."""

    conventions = Conventions(padded_rows="untouched", topk_indices_form="slots")
    is_sparse = classmethod(lambda cls: True)
    Impl = GatheringImpl


class WrongForm(GatheringSlots):
    """Declares positions, and reads slots."""

    conventions = Conventions(padded_rows="untouched")


class WithRepetitions(GatheringSlots):
    """Declares that a row may name a key twice, and sums over both."""

    conventions = Conventions(padded_rows="untouched", topk_indices_form="slots", any_topk_indices=True)


def outcomes(backend, suite="sparse", cases="decode,mixed.float32,padding,sinks", checks=CHECKS):
    examined = examine(backend, suite=suite, cases=cases, checks=checks)
    return {(record.case_id, record.check): record.outcome for record in examined.records}


def test_slots_are_given_to_a_backend_that_declares_them_and_repetitions_to_no_other():
    assert "sparse" in GatheringSlots.features
    assert set(outcomes(GatheringSlots).values()) == {"passed"}
    for wrong in (WrongForm, WithRepetitions):
        assert outcomes(wrong, cases="mixed.float32", checks="numerics") == {("mixed.float32", "numerics"): "failed"}


def test_a_class_of_sparse_layers_gets_no_other_case():
    found = outcomes(GatheringSlots, suite="decode", cases="*", checks="numerics")
    assert set(found.values()) == {"unsupported"}
    assert PlainBackend.is_sparse() is False


def gathered(query, key_cache, value_cache, metadata, params, out):
    """Reads as many entries of a row as an indexer names."""
    for row, position, slots in rows_of(metadata, key_cache.shape[1]):
        entries = topk_indices_of(metadata)[row].long()
        named = slots[entries[: min(len(entries), position + 1)]]
        scores, values = scores_and_values(query[row], key_cache, value_cache, named, params)
        out[row] = torch.einsum("hk,khd->hd", scores.softmax(1), values)


def masked(query, key_cache, value_cache, metadata, params, out):
    """Multiplies the values of old keys that no row chose by a weight of 0, as dense kernels with a mask do."""
    for row, position, slots in rows_of(metadata, key_cache.shape[1]):
        entries = topk_indices_of(metadata)[row].long()
        chosen = torch.zeros(position + 1, dtype=torch.bool)
        chosen[entries[entries >= 0]] = True
        scores, values = scores_and_values(query[row], key_cache, value_cache, slots[: position + 1], params)
        out[row] = torch.einsum("hk,khd->hd", scores.masked_fill(~chosen, -torch.inf).softmax(1), values)


def rows_of(metadata, size):
    """The number and position of each row, and the slots of its request's keys."""
    starts = metadata.query_start_loc.tolist()
    for request, num_keys in enumerate(metadata.seq_lens.tolist()):
        keys = torch.arange(num_keys)
        slots = metadata.block_table_tensor[request, keys // size].long() * size + keys % size
        for row in range(starts[request], starts[request + 1]):
            yield row, num_keys - starts[request + 1] + row, slots


def scores_and_values(query, key_cache, value_cache, slots, params):
    keys, values = (cache.flatten(0, 1)[slots].float() for cache in (key_cache, value_cache))
    group = query.shape[0] // keys.shape[1]
    scores = torch.einsum("hd,khd->hk", query.float(), keys.repeat_interleave(group, 1)) * params.softmax_scale
    return scores, values.repeat_interleave(group, 1)


@pytest.mark.parametrize("attend", [gathered, masked])
def test_functions_take_rows_as_an_indexer_names_them(attend):
    function = kernel_backend(attend, name=attend.__name__, features=["sparse"])
    assert set(outcomes(function, cases="mixed.float32,decode", checks="numerics,containment").values()) == {"passed"}
