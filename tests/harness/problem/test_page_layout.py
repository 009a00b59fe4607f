"""Random numbers, spans of visible keys, and parts of a batch: each key lies in one part, at the slot that it gives."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attncheck.errors import SpecError
from attncheck.harness.problem.pages import RandomStream, layout_of_layer, visible_span
from attncheck.harness.problem.problem import build_problem
from attncheck.reference import AttentionParams, compute_slot_mapping, visible
from attncheck.reference.step_spec import BlockTableSpec, DCPOptions, RequestSpec, SplitKVOptions

PAGE = 16


def shared(*lengths):
    return [RequestSpec(query_len=q, seq_len=s, shared_prefix=p) for q, s, p in lengths]


def slots_of(problem, part, request):
    """Where the keys of a request lie, read as a kernel reads them: by the table and length of the part."""
    own = problem.parts[part]
    table = own.table[request].tolist()
    return [table[j // PAGE] * PAGE + j % PAGE for j in range(own.lengths[request])]


def keys_of(problem, request):
    first = problem.requests[request].base
    return problem.key_slots[first : first + problem.requests[request].num_keys].tolist()


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_runs_of_pages_cover_every_key_once(make_case, parts):
    case = make_case((1, 33), (7, 40), (20, 20), (1, 300), path="split_kv", options=SplitKVOptions(parts=parts))
    problem = build_problem(case, 0)
    assert len(problem.parts) == parts
    for request in range(4):
        read = [slots_of(problem, part, request) for part in range(parts)]
        assert [slot for slots in read for slot in slots] == keys_of(problem, request)
        # Only the last part holds new keys, and all before it whole pages.
        assert len(read[-1]) >= problem.requests[request].query_len
        assert all(len(slots) % PAGE == 0 for slots in read[:-1])
    assert [part.is_aligned for part in problem.parts] == [False] * (parts - 1) + [True]
    if parts == 3:  # of equal length within a page
        assert [part.lengths[3] for part in problem.parts] == [96, 96, 108]


def test_a_cascade_has_the_pages_all_share_and_the_rest(make_case):
    case = make_case(*shared((2, 70, 64), (1, 90, 48), (4, 101, 80)), path="cascade")
    problem = build_problem(case, 0)
    prefix, rest = problem.parts
    assert prefix.lengths == (48, 48, 48)
    assert rest.lengths == (22, 42, 53)
    assert len({tuple(row[:3]) for row in prefix.table.tolist()}) == 1
    for request in range(3):
        assert slots_of(problem, 0, request) + slots_of(problem, 1, request) == keys_of(problem, request)


@pytest.mark.parametrize(("size", "interleave"), [(1, 1), (2, 1), (3, 2), (4, 4), (2, 16)])
def test_ranks_hold_what_the_slot_mapping_of_context_parallelism_assigns(make_case, size, interleave):
    lengths = (1, 2, 31, 64, 65, 130)
    options = DCPOptions(size=size, interleave=interleave)
    problem = build_problem(make_case(*((1, n) for n in lengths), path="dcp", options=options), 0)
    area, table = problem.num_blocks // size, problem.block_table
    positions = torch.cat([torch.arange(n) for n in lengths])
    owners = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    found = torch.full_like(positions, -1)
    for rank in range(size):
        slots = compute_slot_mapping(
            positions, owners, table, PAGE, dcp_size=size, dcp_rank=rank, cp_kv_cache_interleave_size=interleave
        )
        found = torch.where(slots >= 0, slots + rank * area * PAGE, found)
        for request, n in enumerate(lengths):
            rounds, left = divmod(n, size * interleave)
            local = rounds * interleave + min(max(left - rank * interleave, 0), interleave)
            assert problem.parts[rank].lengths[request] == local
            assert slots_of(problem, rank, request) == [s for s in slots[owners == request].tolist() if s >= 0] or rank
    assert torch.equal(problem.key_slots, found)
    assert len(problem.owned_slots) == len(problem.keys)
    assert all(part.is_aligned for part in problem.parts)


def test_new_rows_of_an_extend_lie_in_a_part_of_their_own(make_case):
    case = make_case((4, 40), (7, 90), (3, 3), path="dcp", options=DCPOptions(size=2, interleave=2))
    problem = build_problem(case, 0)
    first, second, new = problem.parts
    assert [part.is_aligned for part in problem.parts] == [False, False, True]
    assert new.lengths == (4, 7, 3)
    assert (first.lengths, second.lengths) == ((18, 42, 0), (18, 41, 0))
    for request, rows in enumerate(problem.requests):
        assert slots_of(problem, 2, request) == keys_of(problem, request)[rows.cached :]
        read = slots_of(problem, 0, request) + slots_of(problem, 1, request)
        assert sorted(read) == sorted(keys_of(problem, request)[: rows.cached])


@pytest.mark.parametrize(
    ("path", "options"),
    [("split_kv", SplitKVOptions(parts=3)), ("dcp", DCPOptions(size=2)), ("dcp", DCPOptions(size=3))],
)
def test_slack_of_a_part_names_none_of_its_pages(make_case, path, options):
    problem = build_problem(make_case((1, 33), (1, 300), (1, 70), path=path, options=options), 0)
    for part in problem.parts:
        for row, length in zip(part.table.tolist(), part.lengths, strict=True):
            pages = -(-length // PAGE)
            assert len(row) >= pages + 2
            assert not set(row[:pages]) & set(row[pages:])
            assert 0 not in row[:pages]


def test_a_pool_too_small_for_the_ranks_is_refused(make_case):
    cache = {"num_blocks": 5}
    with pytest.raises(SpecError, match="needs 8 pages"):
        build_problem(make_case((1, 70), (1, 130), path="dcp", options=DCPOptions(size=2), cache=cache), 0)


@pytest.mark.parametrize("first_block", [None, 21])
def test_a_block_of_the_manager_is_a_run_of_pages(make_case, first_block):
    cache = {"manager_block_size": 3 * PAGE, "first_block": first_block}
    specs = [*shared((1, 100, 96), (5, 130, 96)), RequestSpec(query_len=20, seq_len=20)]
    problem = build_problem(make_case(*specs, cache=cache, sliding_window=30), 0)
    assert problem.num_blocks % 3 == 0
    runs = []
    for request in problem.requests:
        own = list(request.pages)
        runs.append([own[i : i + 3] for i in range(0, len(own), 3)])
        slots = problem.key_slots[request.base : request.base + request.num_keys].tolist()
        assert slots == [own[j // PAGE] * PAGE + j % PAGE for j in range(request.num_keys)]
        assert len(own) == -(-request.num_keys // (3 * PAGE)) * 3
    firsts = [run[0] for own in runs for run in own]
    assert all(run == [run[0], run[0] + 1, run[0] + 2] for own in runs for run in own)
    assert all(first % 3 == 0 and first >= (first_block or 3) for first in firsts)
    assert runs[0][:2] == runs[1][:2]
    assert len(set(firsts)) == len(firsts) - 2


@pytest.mark.parametrize("layer", [{"sliding_window": 1}, {"sliding_window": 17}, {"sliding_window": 40}, {}])
def test_pages_that_no_row_sees_are_null_in_the_table_alone(make_case, layer):
    case = make_case((1, 200), (5, 70), (40, 40), **layer)
    plain = build_problem(case, 0)
    nulled = BlockTableSpec(null_pages=True, extra_columns=3)
    problem = build_problem(replace(case, batch=replace(case.batch, block_table=nulled)), 0)
    assert problem.block_table.shape[1] == plain.block_table.shape[1] + 3
    window = layer.get("sliding_window", 10**6)
    for row, request in zip(problem.block_table.tolist(), problem.requests, strict=True):
        last_unseen = request.first_position - window  # of the first row, which sees the oldest keys
        num_freed = max(0, (last_unseen + 1) // PAGE)
        assert row[:num_freed] == [0] * num_freed
        assert row[num_freed : len(request.pages)] == list(request.pages[num_freed:])
        own = problem.key_slots[request.base : request.base + request.num_keys] // PAGE
        assert own.tolist() == [request.pages[j // PAGE] for j in range(request.num_keys)]


@pytest.mark.parametrize("other", [17, 18, 40, None])
def test_another_layer_has_other_null_pages(make_case, other):
    case = make_case((1, 65), (5, 70), sliding_window=17)
    case = replace(case, batch=replace(case.batch, block_table=BlockTableSpec(null_pages=True)))
    problem, beside = build_problem(case, 0), replace(case.layer, sliding_window=other)
    window = other or 10**6
    named = [list(request.pages) for request in problem.requests]
    for pages, request in zip(named, problem.requests, strict=True):
        freed = max(0, request.first_position - window + 1) // PAGE
        pages[:freed] = [0] * freed
    changed = layout_of_layer(problem.layout, replace(case, layer=beside)).block_table.tolist()
    assert [row[: len(own)] for row, own in zip(changed, named, strict=True)] == named
    # A page is freed that no layer of the step needs.
    both = build_problem(replace(case, layers=(beside,)), 0)
    width = [max(17, window)] * 2
    nulls = [max(0, r.first_position - w + 1) // PAGE for r, w in zip(both.requests, width, strict=True)]
    assert [row[: len(own)].count(0) for row, own in zip(both.block_table.tolist(), named, strict=True)] == nulls


# Random numbers: fixed for ever, uniform enough, independent of each other.


def test_the_stream_is_what_it_was_on_every_other_machine():
    # Philox4x64-10 with a key from SHA-256; these numbers are the definition, not a measurement.
    first = RandomStream("pinned").int8(2, 3)
    assert first.tolist() == [[-43, -30, -99], [-103, -61, 88]]


def test_other_parts_give_another_stream():
    assert RandomStream(0, "a").int8(64).tolist() != RandomStream(1, "a").int8(64).tolist()
    assert RandomStream("1", "2").int8(64).tolist() != RandomStream("12").int8(64).tolist()


def test_int8_is_centred_and_never_minus_128():
    values = RandomStream("many").int8(1 << 16)
    assert values.min() == -127
    assert values.max() == 127
    assert abs(float(values.double().mean())) < 1.0
    assert abs(float(values.double().std()) - 73.6) < 1.0  # sqrt((255**2 - 1) / 12)


def test_uniform_fills_a_float32_mantissa():
    values = RandomStream("many").uniform(1 << 14)
    assert -2 <= float(values.min()) < -1.99
    assert 1.99 < float(values.max()) < 2
    assert abs(float(values.mean())) < 0.05
    mantissas = values.to(torch.float32).view(torch.int32) & 0xFF
    assert len(mantissas.unique()) == 256, "the last bits are in use"


# Spans of visible keys


DISTANCES = st.integers(-1, 6)
ROWS = st.lists(st.tuples(st.integers(0, 12), st.integers(-15, 2)), min_size=1, max_size=8)
"""Keys of the row's request, and the row's distance from their end: it may come before the first, or after the last."""


@given(st.booleans(), st.tuples(DISTANCES, DISTANCES), st.none() | st.integers(1, 6), st.integers(0, 2), ROWS)
def test_a_span_holds_exactly_the_keys_the_predicate_shows(causal, window, chunk, lookback, rows):
    params = AttentionParams(1, 1, 8, causal=causal, window=window, attn_chunk_size=chunk, attn_chunk_lookback=lookback)
    lengths = torch.tensor([num_keys for num_keys, _ in rows])
    positions = lengths + torch.tensor([distance for _, distance in rows])
    first, last = visible_span(params, positions, lengths)
    for row, position in enumerate(positions.tolist()):
        num_keys = int(lengths[row])
        sees = visible(params, torch.tensor([[position]]), torch.arange(num_keys)[None])
        assert list(range(int(first[row]), int(last[row]) + 1)) == sees[0].nonzero().flatten().tolist()
        alone = visible_span(params, positions[row], num_keys)
        assert alone == (first[row], last[row])
