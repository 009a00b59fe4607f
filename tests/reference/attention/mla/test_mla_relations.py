"""What latent attention must keep: two forms, any cutting, any padding, the same function."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.reference import (
    AttentionParams,
    MLAParams,
    dequantize_fp8,
    merge_many,
    mla_attention_absorbed,
    mla_attention_chunked,
    mla_attention_naive,
    mla_latent_attention,
    paged_attention,
    varlen_attention,
)

FORMS = (mla_attention_naive, mla_attention_absorbed)
E4M3 = torch.float8_e4m3fn
quick = settings(max_examples=25, deadline=None)


@st.composite
def layers(draw):
    nope, rope = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    return MLAParams(
        draw(st.integers(1, 4)),
        kv_lora_rank=draw(st.integers(1, 7)),
        qk_nope_head_dim=nope or int(not rope),
        qk_rope_head_dim=rope,
        v_head_dim=draw(st.integers(1, 5)),
        scale=draw(st.none() | st.floats(-2, 2)),
        causal=draw(st.booleans()),
    )


@st.composite
def sizes(draw):
    """Query and sequence lengths of one to four requests; rows before the first key and requests without rows too."""
    count = draw(st.integers(1, 4))
    return tuple(draw(st.lists(st.integers(0, top), min_size=count, max_size=count)) for top in (5, 13))


@st.composite
def questions(draw, make, layer=None):
    layer = draw(layers()) if layer is None else layer
    return make(*draw(sizes()), layer, block_size=draw(st.integers(1, 5)), seed=draw(st.integers(0, 99))), layer


tiles = st.fixed_dictionaries({"q_tile": st.integers(1, 6), "kv_tile": st.integers(1, 9)})


@quick
@given(data=st.data())
def test_naive_equals_absorbed(data, make_latent, same_state):
    batch, layer = data.draw(questions(make_latent))
    naive = batch.attend(mla_attention_naive, layer, **data.draw(tiles))
    same_state(batch.attend(mla_attention_absorbed, layer, **data.draw(tiles)), naive)


@quick
@given(data=st.data(), workspace=st.integers(1, 15))
def test_chunked_equals_unchunked(data, workspace, make_latent, same_state):
    batch, layer = data.draw(questions(make_latent))
    whole = batch.attend(mla_attention_naive, layer)
    same_state(batch.attend(mla_attention_chunked, layer, workspace=workspace, **data.draw(tiles)), whole)


@quick
@given(data=st.data())
def test_the_latent_kernel_is_paged_attention(data, make_latent, same_state):
    """One KV head of L + E, the values a prefix of the keys, the scale of the unabsorbed form."""
    batch, layer = data.draw(questions(make_latent))
    latent, rope = layer.kv_lora_rank, layer.qk_rope_head_dim
    width = layer.qk_nope_head_dim + rope
    paged = AttentionParams(
        layer.num_heads,
        1,
        latent + rope,
        latent,
        scale=width**-0.5 if layer.scale is None else layer.scale,
        causal=layer.causal,
    )
    query = torch.cat([torch.einsum("thp,lhp->thl", batch.q_nope, batch.w_uk), batch.q_pe], dim=-1)
    keys = batch.kv_cache[:, :, None]
    tables = (batch.block_table, batch.seq_lens, batch.query_start_loc)
    want = paged_attention(query, keys, keys[..., :latent], *tables, paged)
    state = batch.attend_latent(mla_latent_attention, layer, **data.draw(tiles))
    same_state(state, want)
    out = torch.einsum("thl,lhv->thv", state[0], batch.w_uv)
    same_state((out, state[1]), batch.attend(mla_attention_absorbed, layer))


@quick
@given(data=st.data(), cut=st.integers(0, 14), other=st.integers(0, 14))
def test_parts_merge_to_the_whole(data, cut, other, make_latent, same_state):
    batch, layer = data.draw(questions(make_latent))
    edges = [0, *sorted((cut, other)), 10**9]
    for form in FORMS:
        parts = [batch.attend(form, layer, kv_range=span) for span in pairwise(edges)]
        same_state(merge_many(*zip(*parts, strict=True)), batch.attend(form, layer))


def padded(tensor, axis, extra):
    shape = list(tensor.shape)
    shape[axis] = extra
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=axis)


@quick
@given(data=st.data(), extra=st.integers(1, 3))
def test_padding_is_neutral(data, extra, make_latent, same_state):
    batch, layer = data.draw(questions(make_latent))
    layer = replace(layer, scale=layer.softmax_scale)
    latent = layer.kv_lora_rank
    for form in FORMS:
        out, lse = batch.attend(form, layer)
        values = replace(batch, w_uv=padded(batch.w_uv, 2, extra))
        wide, same = values.attend(form, replace(layer, v_head_dim=layer.v_head_dim + extra))
        assert not wide[..., layer.v_head_dim :].any()
        same_state((wide[..., : layer.v_head_dim], same), (out, lse))

        heads = {name: padded(getattr(batch, name), 1, extra) for name in ("q_nope", "q_pe", "w_uk", "w_uv")}
        wide, more = replace(batch, **heads).attend(form, replace(layer, num_heads=layer.num_heads + extra))
        same_state((wide[:, : layer.num_heads], more[:, : layer.num_heads]), (out, lse))

        nope = {name: padded(getattr(batch, name), 2, extra) for name in ("q_nope", "w_uk")}
        size = layer.qk_nope_head_dim + extra
        same_state(replace(batch, **nope).attend(form, replace(layer, qk_nope_head_dim=size)), (out, lse))

        c, k_pe = batch.kv_cache[..., :latent], batch.kv_cache[..., latent:]
        ranks = {name: padded(getattr(batch, name), 0, extra) for name in ("w_uk", "w_uv")}
        ranks["kv_cache"] = torch.cat([padded(c, 2, extra), k_pe], dim=-1)
        same_state(replace(batch, **ranks).attend(form, replace(layer, kv_lora_rank=latent + extra)), (out, lse))


@pytest.mark.parametrize(("nope", "rope"), [(3, 0), (0, 3)], ids=["without rope", "rope only"])
@quick
@given(data=st.data())
def test_degenerate_sizes_are_plain_attention(data, nope, rope, make_latent, same_state):
    layer = MLAParams(3, kv_lora_rank=5, qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=2)
    batch, _ = data.draw(questions(make_latent, layer))
    tokens = torch.cat(batch.tokens)
    values = torch.einsum("kl,lhv->khv", tokens[:, :5], batch.w_uv)
    if rope:
        keys, query = tokens[:, None, 5:].expand(-1, 3, -1), batch.q_pe
    else:
        keys, query = torch.einsum("kl,lhp->khp", tokens, batch.w_uk), batch.q_nope
    ends = torch.tensor([0, *map(len, batch.tokens)]).cumsum(0)
    want = varlen_attention(query, keys, values, batch.query_start_loc, ends, AttentionParams(3, 3, 3, 2))
    for form in FORMS:
        same_state(batch.attend(form, layer), want)


def test_steps_and_places(make_latent, repage_latent, same_state):
    """A verification of four rows equals four decode steps; where pages lie is without effect, to the bit."""
    layer = MLAParams(3, kv_lora_rank=5, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=4)
    batch = make_latent((4,), (11,), layer, unowned_rows=0)
    for form in FORMS:
        out, lse = batch.attend(form, layer)
        same_state(repage_latent(batch, 4, seed=5).attend(form, layer), (out, lse), tolerance=0)
        same_state(repage_latent(batch, 3, seed=5).attend(form, layer), (out, lse))
        for row in range(4):
            rows = slice(row, row + 1)
            step = replace(
                batch,
                q_nope=batch.q_nope[rows],
                q_pe=batch.q_pe[rows],
                seq_lens=torch.tensor([8 + row]),
                query_start_loc=torch.tensor([0, 1]),
            )
            same_state(step.attend(form, layer), (out[rows], lse[rows]))


@quick
@given(data=st.data(), k_scale=st.floats(0.01, 3))
def test_float8_rows_have_one_scale(data, k_scale, make_latent, same_state):
    """Keys and values are the codes times one scale; doubling codes' scale is exact; other caches ignore it."""
    batch, layer = data.draw(questions(make_latent))
    codes = (batch.kv_cache * 8).to(E4M3)
    coded, values = replace(batch, kv_cache=codes), replace(batch, kv_cache=dequantize_fp8(codes, k_scale))
    for form in FORMS:
        want = values.attend(form, layer)
        same_state(coded.attend(form, layer, k_scale=k_scale), want, tolerance=0)
        same_state(coded.attend(form, layer, k_scale=torch.tensor([k_scale], dtype=torch.float64)), want, tolerance=0)
        twice = replace(batch, kv_cache=values.kv_cache * 2)
        same_state(coded.attend(form, layer, k_scale=2 * k_scale), twice.attend(form, layer), tolerance=0)
        same_state(values.attend(form, layer, k_scale=k_scale), want, tolerance=0)
    latent = coded.attend_latent(mla_latent_attention, layer, k_scale=k_scale)
    same_state(latent, values.attend_latent(mla_latent_attention, layer), tolerance=0)
