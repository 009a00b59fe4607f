"""Groups of heads, the scale, and sizes of K and V, under every other modifier."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st


def per_head(values, heads):
    return None if values is None else tuple(values[h] for h in heads)


@pytest.fixture(scope="module")
def of_heads():
    """``(batch, params, heads, kv_heads) -> (batch, params)`` with these query heads and KV heads, in this order."""

    def choose(batch, params, heads, kv_heads):
        chosen = replace(
            batch,
            query=batch.query[:, heads],
            key_cache=batch.key_cache[:, :, kv_heads],
            value_cache=batch.value_cache[:, :, kv_heads],
        )
        slopes, sinks = per_head(params.alibi_slopes, heads), per_head(params.sinks, heads)
        counts = {"num_heads": len(heads), "num_kv_heads": len(kv_heads)}
        return chosen, replace(params, alibi_slopes=slopes, sinks=sinks, **counts)

    return choose


@settings(max_examples=40)
@given(data=st.data())
def test_heads_grouped_equal_keys_and_values_repeated_per_head(data, layers, batches, tiles, agree, of_heads):
    """Query head h reads KV head ``h // G``: MHA over K/V repeated G times per head; MQA and MHA included."""
    params = data.draw(layers())
    batch = data.draw(batches(params, fitting=False))
    kv_heads = [h // params.group_size for h in range(params.num_heads)]
    repeated, mha = of_heads(batch, params, list(range(params.num_heads)), kv_heads)
    agree(repeated.attend(mha, **data.draw(tiles)), batch.attend(params))


@settings(max_examples=40)
@given(data=st.data())
def test_heads_permuting_groups_and_heads_within_them_permutes_outputs(data, layers, batches, tiles, agree, of_heads):
    """Groups in another order, and heads within each group too; slopes and sinks go with their query head."""
    params = data.draw(layers())
    batch = data.draw(batches(params, fitting=False))
    groups = data.draw(st.permutations(range(params.num_kv_heads)))
    within = data.draw(st.permutations(range(params.group_size)))
    heads = [g * params.group_size + i for g in groups for i in within]
    moved, layer = of_heads(batch, params, heads, list(groups))
    out, lse = batch.attend(params)
    agree(moved.attend(layer, **data.draw(tiles)), (out[:, heads], lse[:, heads]))


@settings(max_examples=40)
@given(data=st.data())
def test_heads_one_at_a_time_are_the_layer(data, layers, batches, agree, of_heads):
    """A layer of one query head and its KV head gives that head's column of the whole."""
    params = data.draw(layers())
    batch = data.draw(batches(params))
    head = data.draw(st.integers(0, params.num_heads - 1))
    alone, layer = of_heads(batch, params, [head], [head // params.group_size])
    out, lse = batch.attend(params)
    agree(alone.attend(layer), (out[:, head : head + 1], lse[:, head : head + 1]))


@settings(max_examples=40)
@given(data=st.data())
def test_heads_of_a_group_with_equal_queries_give_equal_outputs(data, layers, batches, tiles, agree):
    """Equal Q inside a group, no slope and no sink of its own: equal rows."""
    params = data.draw(layers(alibi_slopes=None, sinks=None))
    batch = data.draw(batches(params))
    query = batch.query[:, :: params.group_size].repeat_interleave(params.group_size, dim=1)
    out, lse = replace(batch, query=query).attend(params, **data.draw(tiles))
    first = [h // params.group_size * params.group_size for h in range(params.num_heads)]
    agree((out, lse), (out[:, first], lse[:, first]))


@settings(max_examples=40)
@given(data=st.data())
def test_scale_moves_between_query_and_factor(data, layers, batches, tiles, agree):
    """Q times a and scale times 1/a is neutral; so is K times a."""
    params = data.draw(layers())
    batch, sizes = data.draw(batches(params, fitting=False)), data.draw(tiles)
    a = data.draw(st.floats(0.1, 5) | st.floats(-5, -0.1))
    layer = replace(params, scale=params.softmax_scale / a)
    expected = batch.attend(params)
    agree(replace(batch, query=batch.query * a).attend(layer, **sizes), expected)
    agree(replace(batch, key_cache=batch.key_cache * a).attend(layer, **sizes), expected)


@settings(max_examples=40)
@given(data=st.data())
def test_scale_zero_is_the_mean_of_what_is_seen(data, layers, batches, tiles, agree, seen, row_places):
    """With scale 0 all keys weigh the same, capped or not: the mean of V, and ``ln n``."""
    params = data.draw(layers(scale=0.0, alibi_slopes=None, sinks=None))
    batch = data.draw(batches(params, fitting=False))
    out, lse = batch.attend(params, **data.draw(tiles))
    want_out, want_lse = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    for row, r, q in row_places(batch):
        if keys := sorted(seen(params, q, len(batch.keys[r]))):
            want_out[row] = batch.values[r][keys].mean(dim=0).repeat_interleave(params.group_size, dim=0)
            want_lse[row] = torch.tensor(float(len(keys)), dtype=torch.float64).log()
    agree((out, lse), (want_out, want_lse))


@settings(max_examples=40)
@given(data=st.data())
def test_sizes_padded_with_zeros_are_neutral(data, layers, batches, tiles, agree):
    """Zeros behind D and Dv, sliced off again; the scale is that of the real D, not of the padded one or of Dv."""
    params = data.draw(layers())
    batch = data.draw(batches(params, fitting=False))
    more, more_v = data.draw(st.tuples(st.integers(0, 5), st.integers(0, 5)))
    pad, size_v = torch.nn.functional.pad, params.value_head_size
    expected, sizes = batch.attend(params), data.draw(tiles)
    wide_v = replace(batch, value_cache=pad(batch.value_cache, (0, more_v)))
    layer = replace(params, head_size_v=size_v + more_v)
    wide = replace(wide_v, query=pad(batch.query, (0, more)), key_cache=pad(batch.key_cache, (0, more)))
    scale = params.head_size**-0.5 if params.scale is None else params.scale
    wider = replace(layer, head_size=params.head_size + more, scale=scale)
    for out, lse in (wide_v.attend(layer, **sizes), wide.attend(wider, **sizes)):
        agree((out[..., :size_v], lse), expected)
        assert (out[..., size_v:] == 0).all()
