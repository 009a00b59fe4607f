"""vLLM's CPU kernels of the indexer of sparse attention, on FP8 keys in vLLM's layout."""

from importlib import import_module

import pytest
import torch

from attncheck.backends.candidates.reference import ReferenceBackend
from attncheck.harness.api import examine

pytestmark = pytest.mark.vllm

INDEX_TOPK = 512
"""The only number of keys that ``topk_transform_512_cpu`` chooses."""


def vllm_indexer(query, weights, key, index_cache, block_table, seq_lens, query_start_loc, slot_mapping, *, index_topk):
    """As ``SparseAttnIndexer.forward_cpu``, each row with a length of its own. vLLM has no such writer for a CPU."""
    ops = import_module("vllm._custom_ops")
    block_size, size, blocks = index_cache.shape[1], key.shape[1], index_cache.view(len(index_cache), -1)
    codes = blocks[:, : block_size * size].view(torch.float8_e4m3fn).unflatten(1, (block_size, size))
    scales = blocks[:, block_size * size :].view(torch.float32)
    new = slot_mapping >= 0
    place = slot_mapping[new] // block_size, slot_mapping[new] % block_size
    scales[place] = key[new].float().abs().amax(dim=1) / 448
    codes[place] = (key[new].float() / scales[place][:, None]).to(torch.float8_e4m3fn)
    query_lens = query_start_loc.diff()
    rows = int(query_start_loc[-1])
    request = torch.arange(len(seq_lens)).repeat_interleave(query_lens)
    lens = (seq_lens[request] - query_start_loc[1:][request] + torch.arange(rows) + 1).int()
    table = block_table[request].contiguous()
    scores = ops.fp8_paged_mqa_logits_cpu(
        query[:rows], blocks, weights[:rows], lens, table, block_size, int(lens.max())
    )
    chosen = torch.full((len(query), index_topk), -1, dtype=torch.int32)
    if index_topk == INDEX_TOPK:
        ops.topk_transform_512_cpu(scores, lens, table, torch.empty_like(chosen[:rows]), block_size, chosen[:rows])
        return chosen
    for row, length in enumerate(lens.tolist()):
        best = scores[row, :length].topk(min(index_topk, length)).indices
        chosen[row, : len(best)] = best.int()
    return chosen


class WithIndexer(ReferenceBackend):
    functions = classmethod(lambda cls: {"sparse_attn_indexer": vllm_indexer})


def test_scores_and_choice_of_vllm_on_a_cpu_are_right():
    for seed in range(3):
        examined = examine(WithIndexer, suite="indexer", cases="fp8-sizes*", checks="numerics,containment", seed=seed)
        assert {record.outcome for record in examined.records} == {"passed"}
        assert len(examined.records) == 8
