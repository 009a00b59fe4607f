"""A recording: each real batch of an engine counted, written as a case file with its frequency.

The engine is a stand-in: layers, builders and common metadata by vLLM's names.
"""

import os
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import attncheck
from attncheck.cases.loader import load_file
from attncheck.errors import QuestionError
from attncheck.harness.recording import recorder
from attncheck.harness.recording.plugin import EngineRecording
from attncheck.harness.recording.traffic import Batch, LayerKind, RecordingSettings, Traffic, settings_of, shared_prefix
from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import CacheSpec, RequestSpec


class Attention:
    """What the recording reads of vLLM's layer of that name."""

    def __init__(self, **different):
        self.num_heads, self.num_kv_heads, self.head_size, self.head_size_v = 8, 2, 64, 64
        self.attn_type, self.sliding_window, self.kv_cache_dtype = "decoder", None, "auto"
        self.kv_sharing_target_layer_name = None
        self._k_scale_float = self._v_scale_float = 1.0
        self.impl = SimpleNamespace(scale=64**-0.5, logits_soft_cap=0, alibi_slopes=None, sinks=None)
        for name, value in different.items():
            setattr(self.impl if hasattr(self.impl, name) else self, name, value)


class Builder:
    def __init__(self, block_size):
        self.kv_cache_spec = SimpleNamespace(block_size=block_size)
        self.built = []

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        self.built.append((common_prefix_len, common_attn_metadata))
        return "metadata"

    def build_for_cudagraph_capture(self, common_attn_metadata):
        return self.build(0, common_attn_metadata)

    def build_for_drafting(self, common_attn_metadata, draft_index):
        return self.build(0, common_attn_metadata, fast_build=True)

    def update_block_table(self, metadata, blk_table, slot_mapping):
        return f"{metadata} with another table"


class AttentionGroup:
    block_size = 16
    backend = SimpleNamespace(get_name=lambda: "CPU_ATTN")

    def __init__(self, *layer_names):
        self.layer_names = list(layer_names)
        self.metadata_builders = []

    def create_metadata_builders(self, vllm_config, device):
        self.metadata_builders = [Builder(self.block_size)]


def config(layers, **different):
    values = {
        "model_config": SimpleNamespace(dtype=torch.bfloat16),
        "cache_config": SimpleNamespace(kv_cache_layout="LBHNC"),
        "compilation_config": SimpleNamespace(static_forward_context=layers),
        "parallel_config": SimpleNamespace(rank=0, data_parallel_rank=0),
        "speculative_config": None,
    }
    return SimpleNamespace(**(values | different))


def metadata(lengths, pages=(), **different):
    """Common metadata of requests (query_len, seq_len), their pages in a table of 40 columns."""
    starts = torch.tensor([0, *[q for q, _ in lengths]], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    totals = torch.tensor([s for _, s in lengths], dtype=torch.int32)
    table = torch.arange(1000, 1000 + 40 * len(lengths), dtype=torch.int32).view(len(lengths), 40)
    for row, own in enumerate(pages):
        table[row, : len(own)] = torch.tensor(own, dtype=torch.int32)
    values = {
        "query_start_loc_cpu": starts,
        "query_start_loc": starts,
        "seq_lens": totals,
        "max_seq_len": int(totals.max()),
        "num_actual_tokens": int(starts[-1]),
        "block_table_tensor": table,
        "causal": True,
    }
    return SimpleNamespace(**(values | different))


@pytest.fixture
def group_class():
    """A class of its own for each test, since a recording wraps its methods."""
    own = {"create_metadata_builders": AttentionGroup.create_metadata_builders}
    return type("AttentionGroup", (AttentionGroup,), own)


@pytest.fixture
def serve(group_class, tmp_path, monkeypatch):
    """Record what ``drive`` has the builders of ``layers`` build, every batch of it, and return the file as a suite."""
    monkeypatch.setattr(recorder, "MOST_NS", 10**9)

    def served(drive, *layers, most_cases=100, every=1, **different):
        path = tmp_path / "traffic.yaml"
        recording = EngineRecording(RecordingSettings(path, every, most_cases))
        assert recording.start(group_class)
        named = {f"layer.{index}": layer for index, layer in enumerate(layers or (Attention(), Attention()))}
        group = group_class(*named)
        group.create_metadata_builders(config(named, **different), torch.device("cpu"))
        drive(group.metadata_builders[0])
        recording.stop()
        return load_file(path)

    return served


def decode_often(builder):
    for step in range(5):
        assert builder.build(0, metadata([(1, 100 + step), (1, 40)])) == "metadata"
    assert builder.build(common_prefix_len=0, common_attn_metadata=metadata([(7, 7), (1, 33)])) == "metadata"


def test_equal_batches_are_one_case_with_its_weight(serve):
    suite = serve(decode_often)
    decode, mixed = suite
    # Two layers each; which of the five real decodes represents them is drawn.
    assert (decode.id, decode.weight, mixed.id, mixed.weight) == ("decode-001", 10.0, "mixed-002", 2.0)
    first, second = decode.batch.requests
    assert first.total_len in range(100, 105)
    assert second == RequestSpec(query_len=1, seq_len=40)
    assert mixed.batch.requests == (RequestSpec(query_len=7), RequestSpec(query_len=1, seq_len=33))
    assert decode.layer == LayerSpec(num_heads=8, num_kv_heads=2, head_size=64)
    assert decode.cache == CacheSpec(block_size=16, layout="HND")
    # 40 columns, of which the longest request takes 7, and a case's table has two more by itself.
    assert decode.batch.block_table.extra_columns == 40 - 7 - 2
    assert "6 of 6 batches" in suite.description
    assert "12 calls of forward, 2 distinct batches" in suite.description


def test_made_up_batches_and_drafts_are_not_counted_and_other_block_tables_are(serve):
    def drive(builder):
        batch, table = metadata([(1, 50)]), torch.zeros(1, 40, dtype=torch.int32)
        builder.build_for_cudagraph_capture(batch)
        builder.build_for_drafting(batch, draft_index=0)
        builder.build(0, batch)
        assert builder.update_block_table("that", table, None) == "that with another table"

    assert [case.weight for case in serve(drive)] == [2, 2]


def test_padding_shared_pages_drafts_and_a_cascade(serve):
    def drive(builder):
        # Requests 0 and 2 share two pages; the third page of request 2 is not full before the step.
        batch = metadata([(4, 60), (4, 90), (4, 38), (0, 0)], [[7, 8, 9], [3, 4, 5], [7, 8, 9]], num_actual_tokens=16)
        builder.build(0, batch)

    drafts = SimpleNamespace(num_speculative_tokens=3)
    (case,) = serve(drive, speculative_config=drafts)
    assert [request.shared_prefix for request in case.batch.requests] == [32, 0, 32]
    assert (case.batch.padding.requests, case.batch.padding.tokens) == (1, 4)
    assert (case.id, case.batch.path.name) == ("verify-001", "spec_decode")
    (cascade,) = serve(lambda builder: builder.build(32, metadata([(1, 60), (1, 90)], [[7, 8, 9], [7, 8, 9]])))
    assert cascade.batch.path.name == "cascade"
    assert [request.shared_prefix for request in cascade.batch.requests] == [32, 32]


def test_kinds_of_layers_are_cases_of_their_own(serve):
    window = Attention(sliding_window=64, logits_soft_cap=30.0, sinks=torch.zeros(8), scale=0.5)
    other = Attention(kv_cache_dtype="fp8_e4m3", alibi_slopes=[0.5], _k_scale_float=0.25)
    suite = serve(lambda builder: builder.build(0, metadata([(1, 50)])), window, other, Attention(), Attention())
    by_weight = sorted(suite, key=lambda case: case.weight or 0)
    assert [case.weight for case in by_weight] == [1, 1, 2]
    kinds = {(case.layer, case.cache) for case in suite}
    plain = LayerSpec(num_heads=8, num_kv_heads=2, head_size=64)
    sizes = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64}
    cache = CacheSpec(layout="HND")
    assert kinds == {
        (plain, cache),
        (LayerSpec(**sizes, sliding_window=64, logits_soft_cap=30.0, sinks=True, scale=0.5), cache),
        (LayerSpec(**sizes, alibi=True), CacheSpec(layout="HND", kv_cache_dtype="fp8_e4m3", k_scale=0.25)),
    }


def test_what_no_case_describes_is_counted_with_its_reason(serve):
    class MambaMixer:
        pass

    def drive(builder):
        builder.build(0, metadata([(1, 50)]))
        builder.build(0, metadata([(1, 50)], mm_req_doc_ranges={0: [(3, 9)]}))
        builder.build(0, metadata([(1, 50)], mm_req_doc_ranges={0: []}))

    (case,) = (suite := serve(drive, Attention(), Attention(kv_cache_dtype="turboquant_k8v4"), MambaMixer()))
    assert case.weight == 2
    assert "1 calls: no case describes mm_req_doc_ranges" in suite.description
    assert "3 calls: no case describes layers with a cache of turboquant_k8v4" in suite.description
    assert "3 calls: no case describes layers of the class MambaMixer" in suite.description


def test_tensors_of_a_device_are_not_read(serve):
    """A tensor on the meta device cannot be read: an attempt raises."""

    def drive(builder):
        host = metadata([(3, 50), (1, 90)])
        device = {
            name: getattr(host, name).to("meta") for name in ("query_start_loc", "seq_lens", "block_table_tensor")
        }
        builder.build(0, SimpleNamespace(**(vars(host) | device | {"seq_lens_cpu_upper_bound": host.seq_lens})))
        builder.build(0, SimpleNamespace(**(vars(host) | device)))

    (case,) = (suite := serve(drive))
    assert case.batch.requests == (RequestSpec(query_len=3, seq_len=50), RequestSpec(query_len=1, seq_len=90))
    assert "2 calls: the lengths are on the device alone" in suite.description


def test_an_engine_is_not_disturbed_by_a_recording_that_fails(serve, caplog):
    def drive(builder):
        builder.build(0, metadata([(1, 50)]))
        assert builder.build(0, SimpleNamespace(query_start_loc_cpu="no tensor")) == "metadata"
        builder.build(0, metadata([(1, 50)]))

    (case,) = serve(drive)
    assert case.weight == 2
    assert "the engine is not affected" in caplog.text


def test_other_ranks_record_nothing(serve):
    ranks = SimpleNamespace(rank=1, data_parallel_rank=0)
    with pytest.raises(attncheck.errors.CaseFileError):  # there is no file
        serve(decode_often, parallel_config=ranks)


def test_the_engine_is_as_before_when_a_recording_has_ended(group_class, tmp_path):
    original = group_class.create_metadata_builders
    recording = EngineRecording(RecordingSettings(tmp_path / "a.yaml"))
    assert recording.start(group_class)
    assert not EngineRecording(RecordingSettings(tmp_path / "b.yaml")).start(group_class)
    recording.stop()
    assert group_class.create_metadata_builders is original
    assert not list(tmp_path.iterdir())


def test_a_hundred_requests_do_not_give_a_case_a_step(serve):
    draw = np.random.default_rng(0)

    def drive(builder):
        lengths = draw.integers(20, 900, 100)
        for _ in range(150):
            lengths = np.where(lengths > 1500, draw.integers(20, 900, 100), lengths + 1)
            builder.build(0, metadata([(1, int(n)) for n in lengths]))

    suite = serve(drive, most_cases=10)
    assert 1 <= len(suite) <= 10
    assert sum(case.weight or 0 for case in suite) == 300


def test_recording_keeps_to_its_time(serve, monkeypatch):
    def drive(builder):
        builder.build(0, metadata([(1, 50)]))
        monkeypatch.setattr(recorder, "MOST_NS", 1)
        for _ in range(300):
            builder.build(0, metadata([(1, 50)]))

    seen = re.search(r"CPU_ATTN: (\d+) of 301 batches", serve(drive).description)
    assert int(seen[1]) < 30


def test_sampled_batches_represent_the_others(serve):
    (case,) = serve(lambda builder: [builder.build(0, metadata([(1, 50)])) for _ in range(1000)], every=4)
    # 1000 calls a layer, of which each fourth is drawn and counts four times: within six deviations.
    assert case.weight == pytest.approx(2000, abs=6 * 8 * (1000 * 0.25 * 0.75) ** 0.5)
    assert (case.weight or 0) % 8 == 0


def batch(*lengths):
    queries, totals = (np.array(column, dtype=np.int32) for column in zip(*lengths, strict=True))
    return Batch(query_lens=queries, seq_lens=totals)


KIND = LayerKind(LayerSpec(num_heads=2, num_kv_heads=1, head_size=64), CacheSpec())


def test_batches_differ_by_a_second_row_and_not_by_order():
    traffic = Traffic()
    for each in (batch((1, 50), (4, 90)), batch((4, 90), (1, 50)), batch((1, 50), (1, 90))):
        traffic.add(each, [(KIND, 1)])
    _, counted = traffic.counted(100)
    assert [each.calls for each in counted] == [2, 1]
    # However wide the buckets, a decode is no prefill.
    assert len(traffic.counted(1)[1]) == 2


def test_memory_is_bounded_and_no_call_is_lost():
    traffic = Traffic(most=8)
    for length in range(1, 400):
        traffic.add(batch(*[(1, length * (row + 1)) for row in range(5)]), [(KIND, 3)])
        assert len(traffic.counted(10**9)[1]) <= 8
    counted = traffic.counted(8)[1]
    assert sum(each.calls for each in counted) + sum(traffic.left_out.values()) == 3 * 399


@pytest.mark.parametrize(
    ("pages", "full", "shared"),
    [
        ([[1, 2, 3], [4, 5, 6]], [3, 3], (0, ())),
        ([[1, 2, 3], [1, 2, 6]], [3, 3], (2, (0, 1))),
        ([[1, 2, 3], [1, 2, 3]], [3, 1], (1, (0, 1))),
        ([[1, 2, 3], [1, 2, 3]], [0, 3], (0, ())),
        ([[0, 0, 3], [0, 0, 4]], [3, 3], (0, ())),
        ([[9, 9, 9], [1, 2, 3], [9, 8, 9], [1, 2, 4], [1, 5, 3]], [3, 3, 3, 3, 3], (1, (1, 3, 4))),
    ],
)
def test_the_largest_group_of_requests_that_share_pages(pages, full, shared):
    assert shared_prefix(np.array(pages, dtype=np.int32), np.array(full, dtype=np.int32)) == shared


def test_the_environment_requests_a_recording(tmp_path):
    settings = RecordingSettings(tmp_path / "traffic.yaml", every=3, most_cases=7)
    assert settings_of(settings.environment()) == settings
    assert settings_of({}) is None
    with pytest.raises(QuestionError, match="ATTNCHECK_RECORD_EVERY is 'often'"):
        settings_of({"ATTNCHECK_RECORD": "a.yaml", "ATTNCHECK_RECORD_EVERY": "often"})
    with pytest.raises(QuestionError, match="cases is 0"):
        RecordingSettings(tmp_path / "a.yaml", most_cases=0)


def test_without_vllm_the_context_manager_raises_and_leaves_the_environment(tmp_path):
    before = dict(os.environ)
    with pytest.raises(QuestionError, match="vLLM cannot be imported"), attncheck.record(tmp_path / "a.yaml"):
        pass
    assert dict(os.environ) == before
