"""The graph state: buffers that all captured sizes share, views of them, refilling, refusals; cross-attention's too."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.v0 import CommonAttentionState


class State(CommonAttentionState):
    """A subclass, as a backend would have."""


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
            attn_backend=SimpleNamespace(get_name=lambda: name, make_metadata=make_metadata),
            get_max_block_per_batch=lambda: 3,
        )
    )


BUFFERS = ("_graph_slot_mapping", "_graph_seq_lens", "_graph_block_tables")
OWN = ["slot_mapping", "seq_lens_tensor", "block_tables"]
CROSS = ["encoder_seq_lens_tensor", "cross_slot_mapping", "cross_block_tables"]


def captured(instance, cross, size=2):
    with instance.graph_capture(size):
        return instance.graph_capture_get_metadata_for_batch(size, is_encoder_decoder_model=cross)


def step(**changes):
    """A step of two decodes as the runner would have it for the captured size."""
    tensors = {
        "seq_lens_tensor": torch.tensor([9, 14], dtype=torch.int32),
        "block_tables": torch.arange(10, dtype=torch.int32).view(2, 5),
        "encoder_seq_lens_tensor": torch.tensor([4, 6], dtype=torch.int32),
        "cross_slot_mapping": torch.empty(0, dtype=torch.int32),
        "cross_block_tables": torch.arange(6, dtype=torch.int32).view(2, 3),
    }
    return SimpleNamespace(decode_metadata=SimpleNamespace(**{**tensors, **changes}))


def test_buffers_exist_while_capturing_even_where_it_fails():
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
        clone = instance.graph_clone(2)
    assert instance._is_graph_capturing is False
    assert not any(hasattr(instance, name) for name in BUFFERS)
    assert (type(clone), clone.runner, clone._is_graph_capturing) == (State, instance.runner, False)
    assert clone is not instance
    assert not any(hasattr(clone, name) for name in BUFFERS)
    with pytest.raises(KeyError, match="oops"), instance.graph_capture(2):
        raise KeyError("oops")
    assert instance._is_graph_capturing is False
    assert not any(hasattr(instance, name) for name in BUFFERS)


def test_captured_metadata():
    instance = state()
    with instance.graph_capture(4):
        found = vars(instance.graph_capture_get_metadata_for_batch(3))
        for name, buffer in zip(OWN, BUFFERS, strict=True):
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


def test_sizes_share_storage_but_not_with_the_runners_array():
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
    assert instance.runner.graph_block_tables.ravel().tolist() == list(range(90, 110))


@pytest.mark.parametrize("name", ["XFORMERS", "ROCM_FLASH"])
def test_captured_cross_attention(name):
    instance = state(name)
    found = captured(instance, cross=True)
    assert found.cross_block_tables.tolist() == [[1, 1, 1], [1, 1, 1]]
    assert found.encoder_seq_lens_tensor.tolist() == [1, 1]
    assert found.cross_slot_mapping.shape == (0,)
    assert {getattr(found, field).dtype for field in (*CROSS, "encoder_seq_lens")} == {torch.int32}
    assert (found.max_encoder_seq_len, found.num_encoder_tokens) == (2048, 0)
    found.encoder_seq_lens_tensor[0] = 7
    assert found.encoder_seq_lens.tolist() == [1, 1]
    buffers = instance.get_graph_input_buffers(found, is_encoder_decoder_model=True)
    assert set(buffers) == {*OWN, *CROSS}
    assert all(buffers[field] is getattr(found, field) for field in buffers)


@pytest.mark.parametrize("cross", [False, True])
def test_a_replay_refills_in_place_but_for_the_slots(cross):
    instance = state("FLASH_ATTN")
    buffers = instance.get_graph_input_buffers(captured(instance, cross=True), is_encoder_decoder_model=True)
    before = {field: tensor.clone() for field, tensor in buffers.items()}
    own = {field: tensor.data_ptr() for field, tensor in buffers.items()}
    assert instance.prepare_graph_input_buffers(buffers, step(), is_encoder_decoder_model=cross) is None
    refilled = vars(step().decode_metadata)
    for field in buffers:
        stays = field == "slot_mapping" or (field in CROSS and not cross)
        assert torch.equal(buffers[field], before[field] if stays else refilled[field])
    assert {field: tensor.data_ptr() for field, tensor in buffers.items()} == own


def test_everything_is_on_the_runners_device_and_begin_forward_does_nothing():
    instance = state(device="meta")
    before = dict(vars(instance))
    assert instance.begin_forward(object()) is None
    assert vars(instance) == before
    found = captured(instance, cross=True)
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


def test_a_size_beyond_the_buffers_is_refused():
    instance = state()
    for largest, size, room in ((3, 4, 3), (8, 5, 4), (4, 0, 4)):
        with (
            instance.graph_capture(largest),
            pytest.raises(ReferenceArgumentError, match=f"batch_size = {size}: .*1 to {room}"),
        ):
            instance.graph_capture_get_metadata_for_batch(size)
    with pytest.raises(ReferenceArgumentError, match="max_batch_size = 0"), instance.graph_capture(0):
        pass


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_lens_tensor": torch.tensor([9])}, r"seq_lens_tensor.shape = \(1,\): must be \(2,\)"),
        ({"block_tables": torch.ones(1, 5)}, r"block_tables.shape = \(1, 5\): must be \(2, 5\)"),
        ({"encoder_seq_lens_tensor": None}, "encoder_seq_lens_tensor"),
        ({"cross_slot_mapping": torch.tensor([5])}, "cross_slot_mapping"),
    ],
)
def test_other_shapes_are_refused_before_anything_is_copied(changes, message):
    instance = state()
    buffers = instance.get_graph_input_buffers(captured(instance, cross=True), is_encoder_decoder_model=True)
    before = {field: tensor.clone() for field, tensor in buffers.items()}
    with pytest.raises(ReferenceArgumentError, match=message):
        instance.prepare_graph_input_buffers(buffers, step(**changes), is_encoder_decoder_model=True)
    if changes.keys() <= set(CROSS):  # as the hook by itself refuses
        with pytest.raises(ReferenceArgumentError, match=message):
            instance._prepare_input_buffers_for_enc_dec_model(step(**changes), buffers)
    assert all(torch.equal(buffers[field], before[field]) for field in buffers)


@pytest.mark.parametrize("name", ["TORCH_SDPA", "ROCM_FLASH"])
def test_cross_attention_of_other_backends_is_refused_by_name(name):
    """Captured on ROCM_FLASH it is not replayed there."""
    instance, good = state(name), state()
    metadata = captured(good, cross=True)
    buffers = good.get_graph_input_buffers(metadata, is_encoder_decoder_model=True)
    calls = [lambda: instance.prepare_graph_input_buffers(buffers, step(), is_encoder_decoder_model=True)]
    if name != "ROCM_FLASH":
        calls.append(lambda: captured(instance, cross=True))
        calls.append(lambda: instance.get_graph_input_buffers(metadata, is_encoder_decoder_model=True))
    for call in calls:
        with pytest.raises(ReferenceArgumentError, match=f"attn_backend = '{name}'"):
            call()
    assert buffers["seq_lens_tensor"].tolist() == [1, 1]


def test_a_batch_without_decodes_and_a_missing_buffer_are_refused():
    instance = state()
    buffers = instance.get_graph_input_buffers(captured(instance, cross=False))
    with pytest.raises(ReferenceArgumentError, match="decode_metadata"):
        instance.prepare_graph_input_buffers(buffers, SimpleNamespace(decode_metadata=None))
    del buffers["block_tables"]
    with pytest.raises(ReferenceArgumentError, match="with a tensor block_tables"):
        instance.prepare_graph_input_buffers(buffers, step())
    assert buffers["seq_lens_tensor"].tolist() == [1, 1]
