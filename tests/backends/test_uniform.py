"""Steps of equally many rows a request: which ones are, what is gathered for them, and how their rows are stored."""

from types import SimpleNamespace

import torch

from attncheck.backends import uniform
from attncheck.backends.candidates.torch_sdpa import UNIFORM_ROWS, SDPABackend, SDPABuilder
from attncheck.backends.contract import AttentionCGSupport
from attncheck.backends.paged_metadata import PagedMetadata
from attncheck.backends.uniform import uniform_query_len, write_slots
from attncheck.reference.spec import LayerSpec

PLAIN = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype="float32", scale=0.4)
ONES = SimpleNamespace(_k_scale=torch.ones(1), _v_scale=torch.ones(1))


def test_which_steps_are_uniform():
    expected = {(1, 1, 1): 1, (3, 3): 3, (16,): 16, (17, 17): None, (2, 2, 0, 0): 2}
    expected |= dict.fromkeys([(2, 0, 2), (0, 2), (0, 0), (1, 2), ()])
    for lens, query_len in expected.items():
        starts = tuple(sum(lens[:count]) for count in range(len(lens) + 1))
        step = PagedMetadata(common=None, query_start_loc=starts, seq_lens=lens, attention_chunk_size=None)
        assert uniform_query_len(step, UNIFORM_ROWS) == query_len, lens


def test_more_drafts_than_are_batched_leave_the_level_of_single_tokens():
    for drafts, level in ((None, "UNIFORM_BATCH"), (15, "UNIFORM_BATCH"), (16, "UNIFORM_SINGLE_TOKEN_DECODE")):
        config = SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=drafts))
        assert SDPABuilder.get_cudagraph_support(config, None) is AttentionCGSupport[level]
    assert SDPABuilder.get_cudagraph_support(SimpleNamespace(speculative_config=None), None).value == 2


def test_a_large_step_is_cut_between_requests(make_step, monkeypatch):
    for elements in (1, 2 * 4 * 48 * 16):  # of a request alone, of two
        monkeypatch.setattr(uniform, "_PIECE_ELEMENTS", elements)
        step = make_step(SDPABackend, PLAIN, [(3, 30), (3, 7), (3, 9)], padding=(1, 1))
        step.run()
        assert torch.allclose(step.output[:9].double(), step.truth, atol=2e-6)


def test_fewer_rows_than_padding_requests_would_have(make_step):
    """Two padding requests and a single padding row, as a step that no graph runs may have them."""
    step = make_step(SDPABackend, PLAIN, [(2, 9), (2, 30)], padding=(2, 1))
    step.output[4:] = 0.25
    step.run()
    assert torch.allclose(step.output[:4].double(), step.truth, atol=2e-6)
    assert (step.output[4:] == 0.25).all()


def test_a_padding_request_that_has_a_length_has_no_rows_all_the_same(make_step):
    step = make_step(SDPABackend, PLAIN, [(1, 9)], padding=(1, 1))
    step.common.seq_lens[1] = step.common.seq_lens_cpu[1] = 5
    step.common.block_table_tensor[1, 0] = 0  # whose slots hold NaN
    step.run()
    assert torch.allclose(step.output[:1].double(), step.truth, atol=2e-6)
    assert (step.output[1] == 0).all()


def test_a_row_without_a_slot_changes_no_bit_of_slot_0():
    """Slot 0 may hold a NaN that arithmetic would make another one."""
    pools = [torch.full((2, 4, 2, 16), 0x7FA1, dtype=torch.int16) for _ in range(2)]
    rows = torch.randn(3, 2, 16, dtype=torch.bfloat16)
    write_slots(ONES, rows, rows, *(pool.view(torch.bfloat16) for pool in pools), torch.tensor([-1, -1, -1]))
    assert all((pool == 0x7FA1).all() for pool in pools)
