"""Why ``xformers_vllm`` promises no CUDA graph: what breaks first where one is promised all the same."""

import pytest
import torch

from attncheck.backends.candidates.xformers.availability import unavailable_reasons
from attncheck.backends.candidates.xformers_vllm.backend import XFormersAttentionBackend
from attncheck.backends.contract import AttentionCGSupport
from attncheck.cases.loader import load_suite
from attncheck.harness.checks.cudagraph.check import GraphLevelCheck
from attncheck.harness.checks.findings import Broken

if reasons := unavailable_reasons("cpu"):
    pytest.skip("; ".join(reasons), allow_module_level=True)

from attncheck.backends.candidates.xformers_vllm.builder import XFormersAttentionMetadataBuilder


class PromisingBuilder(XFormersAttentionMetadataBuilder):
    cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


class EarlyBuilder(PromisingBuilder):
    """Makes the views before ``forward`` asks for them."""

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


def test_the_views_read_the_device_in_forward():
    found = finding(PromisingBuilder)
    assert isinstance(found, Broken)
    assert "declared UNIFORM_SINGLE_TOKEN_DECODE, measured NEVER" in found.summary
    assert "host read: .item()" in found.summary


def test_without_that_the_bias_of_the_capture_is_frozen():
    found = finding(EarlyBuilder)
    assert isinstance(found, Broken)
    assert "metadata.attn_bias.k_seqinfo.seqlen_py[0] was 1 at capture" in found.meaning
