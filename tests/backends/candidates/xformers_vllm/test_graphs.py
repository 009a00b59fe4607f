"""Why ``xformers_vllm`` promises no CUDA graph: what breaks first where one is promised all the same."""

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.backends.candidates.xformers.backend import library_reasons
from attncheck.backends.candidates.xformers_vllm.backend import XFormersAttentionBackend
from attncheck.backends.contract import AttentionCGSupport
from attncheck.cases.loader import load_suite
from attncheck.harness.checks.cudagraph.check import GraphLevelCheck
from attncheck.harness.checks.findings import Broken

if reasons := library_reasons("cpu"):
    pytest.skip("; ".join(reasons), allow_module_level=True)

from attncheck.backends.candidates.xformers_vllm.builder import XFormersAttentionMetadataBuilder


class PromisingBuilder(XFormersAttentionMetadataBuilder):
    cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


class EarlyBuilder(PromisingBuilder):
    """Makes the views before ``forward`` reads them."""

    def build(self, *arguments, **options):
        step = super().build(*arguments, **options)
        assert step.decode_metadata is not None or step.prefill_metadata is not None
        return step


def finding(builder):
    class Promising(XFormersAttentionBackend):
        @staticmethod
        def get_builder_cls():
            return builder

    (case,) = (case for case in load_suite("xformers") if case.id == "graph")
    return GraphLevelCheck(0, torch.device("cpu")).examine(Promising, case)


def test_the_views_read_the_device_in_forward(plain):
    found = finding(PromisingBuilder)
    assert isinstance(found, Broken)
    assert plain(found.summary) == snapshot(
        "declared UNIFORM_SINGLE_TOKEN_DECODE, measured NEVER: probe 'decode' broke: forward cannot be captured (8 requests of 1 token each): host read: .item() at src/attncheck/backends/candidates/xformers_vllm/builder.py:N in _view; host read: .item() at src/attncheck/backends/candidates/xformers_vllm/builder.py:N in _view"
    )
    assert "UNIFORM_SINGLE_TOKEN_DECODE" in found.summary


def test_without_that_the_bias_of_the_capture_is_frozen():
    found = finding(EarlyBuilder)
    assert isinstance(found, Broken)
    assert found.meaning == snapshot(
        "the same step is right without a graph: numbers are frozen at capture, such as these: metadata.max_seq_len was 80 at capture and is 35 now; metadata.attn_bias.k_seqinfo.max_seqlen was 1 at capture and is 35 now; metadata.attn_bias.k_seqinfo.seqlen_py[0] was 1 at capture and is 15 now"
    )
    assert "attn_bias" in found.meaning
    assert "k_seqinfo" in found.meaning
    assert "seqlen_py" in found.meaning
