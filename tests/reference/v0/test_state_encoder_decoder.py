"""The graph state of an encoder-decoder model: three more buffers, and for which backends there are any."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.v0 import CommonAttentionState

CAPTURES = ["XFORMERS", "FLASH_ATTN", "ROCM_FLASH"]
REPLAYS = ["XFORMERS", "FLASH_ATTN"]
CROSS = ["encoder_seq_lens_tensor", "cross_slot_mapping", "cross_block_tables"]


def make_metadata(**keywords):
    metadata = SimpleNamespace(**keywords)
    metadata.decode_metadata = metadata
    return metadata


def state(name="XFORMERS"):
    return CommonAttentionState(
        SimpleNamespace(
            device=torch.device("cpu"),
            graph_block_tables=np.zeros((2, 5), dtype=np.int32),
            max_seq_len_to_capture=2048,
            attn_backend=SimpleNamespace(get_name=lambda: name, make_metadata=make_metadata),
            get_max_block_per_batch=lambda: 3,
        )
    )


def captured(instance, size=2):
    with instance.graph_capture(2):
        return instance.graph_capture_get_metadata_for_batch(size, is_encoder_decoder_model=True)


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


@pytest.mark.parametrize("name", CAPTURES)
def test_captured_cross_attention(name):
    found = captured(state(name))
    assert found.cross_block_tables.tolist() == [[1, 1, 1], [1, 1, 1]]
    assert found.encoder_seq_lens_tensor.tolist() == [1, 1]
    assert found.encoder_seq_lens.tolist() == [1, 1]
    assert found.cross_slot_mapping.shape == (0,)
    assert {getattr(found, field).dtype for field in (*CROSS, "encoder_seq_lens")} == {torch.int32}
    assert (found.max_encoder_seq_len, found.num_encoder_tokens) == (2048, 0)
    found.encoder_seq_lens_tensor[0] = 7
    assert found.encoder_seq_lens.tolist() == [1, 1]


def test_a_decoder_captures_none_of_it():
    instance = state()
    with instance.graph_capture(2):
        found = instance.graph_capture_get_metadata_for_batch(2)
    assert not {*CROSS, "encoder_seq_lens", "num_encoder_tokens"} & set(vars(found))
    assert len(instance.get_graph_input_buffers(found)) == 3


@pytest.mark.parametrize("name", CAPTURES)
def test_six_buffers(name):
    instance = state(name)
    found = captured(instance)
    buffers = instance.get_graph_input_buffers(found, is_encoder_decoder_model=True)
    assert set(buffers) == {"slot_mapping", "seq_lens_tensor", "block_tables", *CROSS}
    assert all(buffers[field] is getattr(found, field) for field in buffers)


@pytest.mark.parametrize("name", REPLAYS)
def test_a_replay_refills_all_but_the_slots(name):
    instance = state(name)
    buffers = instance.get_graph_input_buffers(captured(instance), is_encoder_decoder_model=True)
    own = {field: tensor.data_ptr() for field, tensor in buffers.items()}
    instance.prepare_graph_input_buffers(buffers, step(), is_encoder_decoder_model=True)
    for field, tensor in vars(step().decode_metadata).items():
        assert torch.equal(buffers[field], tensor)
    assert buffers["slot_mapping"].tolist() == [-1, -1]
    assert {field: tensor.data_ptr() for field, tensor in buffers.items()} == own


def test_a_decoders_replay_leaves_the_encoder_alone():
    instance = state()
    buffers = instance.get_graph_input_buffers(captured(instance), is_encoder_decoder_model=True)
    instance.prepare_graph_input_buffers(buffers, step())
    assert buffers["seq_lens_tensor"].tolist() == [9, 14]
    assert buffers["encoder_seq_lens_tensor"].tolist() == [1, 1]


@pytest.mark.parametrize("name", ["TORCH_SDPA", "xformers", ""])
def test_other_backends_are_refused_by_name(name):
    instance, good = state(name), state()
    metadata = captured(good)
    buffers = good.get_graph_input_buffers(metadata, is_encoder_decoder_model=True)
    with instance.graph_capture(2), pytest.raises(ReferenceArgumentError, match=f"attn_backend = '{name}'"):
        instance.graph_capture_get_metadata_for_batch(2, is_encoder_decoder_model=True)
    with pytest.raises(ReferenceArgumentError, match=f"attn_backend = '{name}'"):
        instance.get_graph_input_buffers(metadata, is_encoder_decoder_model=True)
    with pytest.raises(ReferenceArgumentError, match=f"attn_backend = '{name}'"):
        instance.prepare_graph_input_buffers(buffers, step(), is_encoder_decoder_model=True)
    assert buffers["seq_lens_tensor"].tolist() == [1, 1]


def test_what_was_captured_on_rocm_is_not_replayed():
    instance = state("ROCM_FLASH")
    buffers = instance.get_graph_input_buffers(captured(instance), is_encoder_decoder_model=True)
    with pytest.raises(ReferenceArgumentError, match="ROCM_FLASH"):
        instance.prepare_graph_input_buffers(buffers, step(), is_encoder_decoder_model=True)
    assert buffers["seq_lens_tensor"].tolist() == [1, 1]


CROSS_MISFITS = [
    {"cross_block_tables": torch.zeros(2, 4)},
    {"cross_block_tables": torch.zeros(1, 3)},
    {"encoder_seq_lens_tensor": torch.tensor([4])},
    {"encoder_seq_lens_tensor": None},
    {"cross_slot_mapping": torch.tensor([5])},
]


@pytest.mark.parametrize("changes", [*CROSS_MISFITS, {"seq_lens_tensor": torch.tensor([9])}])
def test_other_shapes_are_refused_before_anything_is_copied(changes):
    instance = state()
    buffers = instance.get_graph_input_buffers(captured(instance), is_encoder_decoder_model=True)
    before = {field: tensor.clone() for field, tensor in buffers.items()}
    with pytest.raises(ReferenceArgumentError, match=next(iter(changes))):
        instance.prepare_graph_input_buffers(buffers, step(**changes), is_encoder_decoder_model=True)
    if changes.keys() <= set(CROSS):  # as the hook by itself refuses
        with pytest.raises(ReferenceArgumentError, match=next(iter(changes))):
            instance._prepare_input_buffers_for_enc_dec_model(step(**changes), buffers)
    assert all(torch.equal(buffers[field], before[field]) for field in buffers)


def test_hooks_by_themselves():
    instance, metadata, buffers = state(), step(), {}
    instance._add_additional_input_buffers_for_enc_dec_model(attn_metadata=metadata, input_buffers=buffers)
    assert list(buffers) == CROSS
    assert all(buffers[field] is getattr(metadata.decode_metadata, field) for field in CROSS)
    target = SimpleNamespace()
    instance._update_captured_metadata_for_enc_dec_model(batch_size=1, attn_metadata=target)
    assert target.cross_block_tables.tolist() == [[1, 1, 1]]
    assert target.encoder_seq_lens_tensor.tolist() == [1]
