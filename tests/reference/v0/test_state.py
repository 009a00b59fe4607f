"""The graph state: buffers that all captured sizes share, views of them, refilling, refusals."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.v0 import CommonAttentionState


class State(CommonAttentionState):
    """A subclass, as a backend would have."""


class Backend:
    def __init__(self, name):
        self.get_name = lambda: name

    @staticmethod
    def make_metadata(**keywords):
        """Metadata of decodes only is its own decode part."""
        metadata = SimpleNamespace(**keywords)
        metadata.decode_metadata = metadata
        return metadata


def state(name="XFORMERS", device="cpu"):
    return State(
        SimpleNamespace(
            device=torch.device(device),
            graph_block_tables=np.arange(90, 110, dtype=np.int32).reshape(4, 5),
            max_seq_len_to_capture=2048,
            attn_backend=Backend(name),
            get_max_block_per_batch=lambda: 3,
        )
    )


BUFFERS = ("_graph_slot_mapping", "_graph_seq_lens", "_graph_block_tables")


def test_buffers_exist_while_capturing():
    instance = state()
    assert instance._is_graph_capturing is False
    with instance.graph_capture(3) as given:
        assert given is None
        assert instance._is_graph_capturing is True
        assert instance._graph_slot_mapping.tolist() == [-1, -1, -1]
        assert instance._graph_slot_mapping.dtype == torch.int64
        assert instance._graph_seq_lens.tolist() == [1, 1, 1]
        assert instance._graph_seq_lens.dtype == torch.int32
        assert instance._graph_block_tables.tolist() == instance.runner.graph_block_tables.tolist()
        assert instance._graph_block_tables.dtype == torch.int32
        first = instance._graph_slot_mapping
    assert instance._is_graph_capturing is False
    assert not any(hasattr(instance, name) for name in BUFFERS)
    with instance.graph_capture(2):
        assert len(instance._graph_slot_mapping) == 2
        assert instance._graph_slot_mapping.data_ptr() != first.data_ptr()


def test_a_capture_that_fails_is_over():
    instance = state()
    with pytest.raises(KeyError, match="oops"), instance.graph_capture(2):
        raise KeyError("oops")
    assert instance._is_graph_capturing is False
    assert not any(hasattr(instance, name) for name in BUFFERS)
    with instance.graph_capture(4):
        assert len(instance._graph_seq_lens) == 4


def test_a_clone_shares_the_runner_only():
    instance = state()
    with instance.graph_capture(2):
        clone = instance.graph_clone(2)
    assert type(clone) is State
    assert clone is not instance
    assert clone.runner is instance.runner
    assert clone._is_graph_capturing is False
    assert not any(hasattr(clone, name) for name in BUFFERS)


def test_captured_metadata():
    instance = state()
    with instance.graph_capture(4):
        found = vars(instance.graph_capture_get_metadata_for_batch(3))
        views = dict(zip(("slot_mapping", "seq_lens_tensor", "block_tables"), BUFFERS, strict=True))
        for name, buffer in views.items():
            assert found.pop(name).data_ptr() == getattr(instance, buffer).data_ptr()
    assert found.pop("decode_metadata")
    assert found == {
        "num_prefills": 0,
        "num_prefill_tokens": 0,
        "num_decode_tokens": 3,
        "max_query_len": 1,
        "max_decode_query_len": 1,
        "max_prefill_seq_len": 0,
        "max_decode_seq_len": 2048,
        "seq_lens": None,
        "query_start_loc": None,
        "seq_start_loc": None,
        "context_lens_tensor": None,
        "multi_modal_placeholder_index_maps": None,
        "enable_kv_scales_calculation": True,
        "use_cuda_graph": True,
    }


def test_sizes_share_storage():
    instance = state()
    with instance.graph_capture(4):
        large = instance.graph_capture_get_metadata_for_batch(4)
        small = instance.graph_capture_get_metadata_for_batch(2)
    assert small.slot_mapping.shape == small.seq_lens_tensor.shape == (2,)
    assert small.block_tables.tolist() == [[*range(90, 95)], [*range(95, 100)]]
    small.slot_mapping[1], small.seq_lens_tensor[0], small.block_tables[1, 4] = 20, 9, 7
    assert large.slot_mapping.tolist() == [-1, 20, -1, -1]
    assert large.seq_lens_tensor.tolist() == [9, 1, 1, 1]
    assert large.block_tables[1].tolist() == [95, 96, 97, 98, 7]


def test_refilling_does_not_reach_the_runners_array():
    instance = state()
    with instance.graph_capture(4):
        instance.graph_capture_get_metadata_for_batch(4).block_tables.fill_(-9)
    assert instance.runner.graph_block_tables.ravel().tolist() == list(range(90, 110))


def buffers(lengths, tables):
    return {"slot_mapping": torch.full((4,), -1), "seq_lens_tensor": lengths, "block_tables": tables}


def step(lengths, tables):
    part = SimpleNamespace(seq_lens_tensor=lengths, block_tables=tables)
    return SimpleNamespace(slot_mapping=torch.arange(4), decode_metadata=part)


def test_input_buffers_are_the_metadatas_own_tensors():
    metadata = step(torch.ones(4), torch.ones(4, 3))
    found = state().get_graph_input_buffers(metadata)
    assert list(found) == ["slot_mapping", "seq_lens_tensor", "block_tables"]
    assert found["slot_mapping"] is metadata.slot_mapping
    assert found["seq_lens_tensor"] is metadata.decode_metadata.seq_lens_tensor
    assert found["block_tables"] is metadata.decode_metadata.block_tables


def test_a_replay_refills_in_place_but_for_the_slots():
    given = buffers(torch.ones(4, dtype=torch.int32), torch.zeros(4, 3, dtype=torch.int32))
    own = dict(given)
    tables = torch.arange(12, dtype=torch.int32).view(4, 3)
    lengths = torch.tensor([9, 14, 3, 1], dtype=torch.int32)
    assert state().prepare_graph_input_buffers(given, step(lengths, tables)) is None
    assert given["seq_lens_tensor"].tolist() == [9, 14, 3, 1]
    assert given["block_tables"].tolist() == tables.tolist()
    assert given["slot_mapping"].tolist() == [-1] * 4
    assert all(given[name] is own[name] for name in own)
    assert lengths.data_ptr() != given["seq_lens_tensor"].data_ptr()


def test_begin_forward_does_nothing():
    instance = state()
    before = dict(vars(instance))
    assert instance.begin_forward(object()) is None
    assert vars(instance) == before


def test_everything_is_on_the_runners_device():
    instance = state(device="meta")
    with instance.graph_capture(2):
        found = instance.graph_capture_get_metadata_for_batch(2, is_encoder_decoder_model=True)
    tensors = {name: x.device.type for name, x in vars(found).items() if isinstance(x, torch.Tensor)}
    assert tensors.keys() >= {"slot_mapping", "block_tables", "cross_block_tables", "encoder_seq_lens"}
    assert set(tensors.values()) == {"meta"}


@pytest.mark.parametrize("call", ["graph_clone", "graph_capture_get_metadata_for_batch"])
def test_some_calls_mean_something_while_capturing_only(call):
    instance = state()
    with pytest.raises(RuntimeError, match=f"{call} .*inside graph_capture"):
        getattr(instance, call)(1)
    with instance.graph_capture(1):
        getattr(instance, call)(1)
        with pytest.raises(RuntimeError, match="open already"), instance.graph_capture(1):
            pass
        assert instance._is_graph_capturing is True
    with pytest.raises(RuntimeError, match=call):
        getattr(instance, call)(1)


def test_a_capture_of_no_sequences_is_refused():
    with pytest.raises(ReferenceArgumentError, match="max_batch_size = 0"), state().graph_capture(0):
        pass


@pytest.mark.parametrize(("largest", "size", "room"), [(3, 4, 3), (8, 5, 4), (4, 0, 4), (4, -1, 4)])
def test_a_size_beyond_the_buffers_is_refused(largest, size, room):
    instance = state()
    with (
        instance.graph_capture(largest),
        pytest.raises(ReferenceArgumentError, match=f"batch_size = {size}: .*1 to {room}"),
    ):
        instance.graph_capture_get_metadata_for_batch(size)


@pytest.mark.parametrize(
    ("lengths", "tables", "message"),
    [
        (torch.full((1,), 9), torch.ones(4, 3), r"seq_lens_tensor.shape = \(1,\): must be \(4,\)"),
        (torch.full((4,), 9), torch.ones(1, 3), r"block_tables.shape = \(1, 3\): must be \(4, 3\)"),
        (torch.full((4,), 9), torch.ones(4, 2), r"block_tables.shape = \(4, 2\)"),
        (torch.full((4,), 9), None, r"block_tables.shape = None"),
    ],
)
def test_other_shapes_are_refused_before_anything_is_copied(lengths, tables, message):
    given = buffers(torch.ones(4), torch.zeros(4, 3))
    with pytest.raises(ReferenceArgumentError, match=message):
        state().prepare_graph_input_buffers(given, step(lengths, tables))
    assert given["seq_lens_tensor"].tolist() == [1] * 4
    assert given["block_tables"].tolist() == [[0] * 3] * 4


def test_a_batch_without_decodes_and_a_missing_buffer_are_refused():
    prompts = SimpleNamespace(slot_mapping=torch.arange(4), decode_metadata=None)
    given = buffers(torch.ones(4), torch.zeros(4, 3))
    for call in (
        lambda: state().get_graph_input_buffers(prompts),
        lambda: state().prepare_graph_input_buffers(given, prompts),
    ):
        with pytest.raises(ReferenceArgumentError, match="decode_metadata"):
            call()
    del given["block_tables"]
    with pytest.raises(ReferenceArgumentError, match="with a tensor block_tables"):
        state().prepare_graph_input_buffers(given, step(torch.full((4,), 9.0), torch.ones(4, 3)))
    assert given["seq_lens_tensor"].tolist() == [1] * 4
