"""The sizes of latent attention come from the text config."""

from types import SimpleNamespace

import pytest

from attncheck.reference.v0 import MLADims, get_mla_dims

SIZES = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 96}


def config(**sizes):
    return SimpleNamespace(hf_text_config=SimpleNamespace(**sizes), hf_config=SimpleNamespace(kv_lora_rank=1))


@pytest.mark.parametrize(("query", "rank"), [({}, None), ({"q_lora_rank": None}, None), ({"q_lora_rank": 1536}, 1536)])
def test_sizes_in_order(query, rank):
    assert get_mla_dims(config(**SIZES, **query)) == MLADims(rank, 512, 128, 64, 96)
    assert get_mla_dims(config(**SIZES, **query)) != MLADims(rank, 512, 128, 96, 64)


@pytest.mark.parametrize("missing", SIZES)
def test_a_missing_size_is_named(missing):
    sizes = {name: size for name, size in SIZES.items() if name != missing}
    with pytest.raises(AttributeError, match=missing):
        get_mla_dims(config(**sizes))
