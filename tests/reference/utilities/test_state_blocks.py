"""The blocks that hold the states of state-space layers."""

from types import SimpleNamespace

import pytest
import torch

from attncheck.errors import ReferenceArgumentError
from attncheck.reference import mamba_get_block_table_tensor

TABLE = torch.arange(12, dtype=torch.int32).view(3, 4)
LENS = torch.tensor([0, 8, 9], dtype=torch.int32)


def blocks(mode, drafts=0, lens=LENS):
    spec = SimpleNamespace(block_size=4, num_speculative_blocks=drafts)
    return mamba_get_block_table_tensor(TABLE, lens, spec, mode)


def test_in_mode_none_it_is_the_table():
    assert blocks("none") is TABLE


@pytest.mark.parametrize(("drafts", "expected"), [(0, [[0], [5], [10]]), (1, [[0, 1], [5, 6], [10, 11]])])
def test_else_the_block_of_the_last_token_and_those_behind_it(drafts, expected):
    found = blocks("align", drafts)
    assert (found.dtype, found.tolist()) == (torch.int32, expected)


def test_too_narrow_a_table_is_refused():
    with pytest.raises(ReferenceArgumentError, match="above 4 columns"):
        blocks("align", 2)
