"""``num_gpu_blocks`` of a builder's config is the number of pages of every pool that ``forward`` gets with its metadata.

vLLM's FlexAttention sizes its masks by it.
"""

import pytest

import attncheck
from attncheck.backends.candidates.reference import ReferenceBackend
from attncheck.backends.candidates.torch_sdpa import SDPABackend
from attncheck.backends.impl import get_current_vllm_config
from attncheck.reports.run_file.records import FALLEN_SHORT

SUITE = """\
suite: pools
description: batches whose checks use several pools
defaults:
  layer: {num_heads: 2, num_kv_heads: 1, head_size: 16, dtype: float32}
cases:
  - {id: padded, batch: {requests: q1s20_q1s35, padding: {requests: 1, tokens: 2}}}
  - {id: window, batch: q5s37_q1s40, layer: {sliding_window: 20}}
  - {id: plain, batch: q1s40_q1s7_q20, matrix: {layer.scale: [0.1, 0.2]}}
  - {id: full, batch: q1s40_q1s7_q20, cache: {num_blocks: 7}}
  - {id: large, batch: q1s40_q20, cache: {num_blocks: 60}}
  - {id: far, batch: q1s40, cache: {first_block: 70000, block_size: 8}}
  - {id: layers, batch: q1s40_q20, layers: [{sliding_window: 8}]}
  - {id: after, batch: q1s20, after: [3q1s200]}
  - {id: encoder, batch: q20, layer: {attn_type: encoder_only, causal: false}}
  - {id: shared, batch: q1s20_q20, layer: {kv_sharing: true}}
  - {id: micro, batch: 2q1s20_2q9s12, path: {micro_batch: {cuts: [8]}}}
  - {id: ranks, batch: 2q1s40, path: {dcp: {size: 2}}}
  - {id: chunks, batch: q5s37, layer: {attn_chunk_size: 16}, path: local}
"""


def sized(base, *, has_codec=True):
    """Return ``base`` with a ``forward`` that refuses a pool of another size than its metadata's builder was given."""

    class Builder(base.get_builder_cls()):
        def build(self, *args, **keywords):
            made = super().build(*args, **keywords)
            made.num_gpu_blocks = self.vllm_config.cache_config.num_gpu_blocks
            return made

    class Impl(base.get_impl_cls()):
        def __init__(self, *args, **keywords):
            super().__init__(*args, **keywords)
            assert get_current_vllm_config().cache_config.num_gpu_blocks is None

        def forward(self, layer, query, key, value, cache, metadata, **more):
            if metadata is not None:
                axis = 1 if base.packing == "split_first" and cache.numel() else 0
                pages = cache.shape[axis] or 1  # 1 without a cache
                assert metadata.num_gpu_blocks == pages, f"{metadata.num_gpu_blocks} of {tuple(cache.shape)}"
            return super().forward(layer, query, key, value, cache, metadata, **more)

    class Sized(base):
        get_builder_cls = staticmethod(lambda: Builder)
        get_impl_cls = staticmethod(lambda: Impl)

        @classmethod
        def kv_cache_codec(cls, layer, cache):
            return super().kv_cache_codec(layer, cache) if has_codec else None

    return Sized


@pytest.mark.parametrize(
    ("backend", "cases", "checks"),
    [
        (sized(ReferenceBackend), "*", "numerics,containment,invariance"),
        (sized(ReferenceBackend), "window", "cache_write,features,determinism,builder"),
        (sized(ReferenceBackend, has_codec=False), "plain*", "cache_write,invariance"),
        (sized(SDPABackend), "padded", "cudagraph"),  # its graphs are replayed
    ],
)
def test_every_pool_has_the_pages_that_its_builder_was_given(backend, cases, checks, tmp_path):
    suite = tmp_path / "pools.yaml"
    suite.write_text(SUITE)
    seen = attncheck.examine(backend, str(suite), cases=cases, checks=checks, device="cpu")
    assert not [record for record in seen.records if record.outcome in FALLEN_SHORT]
    assert {record.check for record in seen.records if record.outcome == "passed"} == set(checks.split(","))
