"""Right backends of sparse attention in forms that no candidate has: slots, entries as they are, sparse layers alone."""

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


def test_a_function_can_take_the_indices():
    def attend(query, key_cache, value_cache, metadata, params, out):
        starts, lens = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        size = key_cache.shape[1]
        for request, num_keys in enumerate(lens):
            for row in range(starts[request], starts[request + 1]):
                named = topk_indices_of(metadata)[row].long()
                named = named[: min(len(named), num_keys - starts[request + 1] + row + 1)]
                slots = metadata.block_table_tensor[request, named // size].long() * size + named % size
                keys, values = (cache.flatten(0, 1)[slots].float() for cache in (key_cache, value_cache))
                group = query.shape[1] // keys.shape[1]
                keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
                scores = torch.einsum("hd,khd->hk", query[row].float(), keys) * params.softmax_scale
                out[row] = torch.einsum("hk,khd->hd", scores.softmax(1), values)

    function = kernel_backend(attend, name="chosen", features=["sparse"])
    assert set(outcomes(function, cases="mixed.float32", checks="numerics,containment").values()) == {"passed"}
