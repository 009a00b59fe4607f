"""Block tables as the library takes them, by hand."""

import torch

from attncheck.backends.candidates.flashinfer.planner import page_indices

UNOWNED = 10**6

TABLE = torch.tensor([[7, 2, UNOWNED], [UNOWNED] * 3, [4, 9, UNOWNED], [5, UNOWNED, UNOWNED]], dtype=torch.int32)


def test_pages_are_consecutive_and_the_last_one_has_its_own_length() -> None:
    pages = page_indices(TABLE, 4, [0, 1, 2, 3], [5, 0, 8, 1])
    assert pages.indptr.tolist() == [0, 2, 2, 4, 5]
    assert pages.indices.tolist() == [7, 2, 4, 9, 5]
    assert pages.last_page_len.tolist() == [1, 0, 4, 1]


def test_index_tensors_are_int32() -> None:
    pages = page_indices(TABLE.long(), 4, [0], [3])
    assert {pages.indptr.dtype, pages.indices.dtype, pages.last_page_len.dtype} == {torch.int32}


def test_requests_are_named_by_their_rows_of_the_table() -> None:
    pages = page_indices(TABLE, 4, [3, 0], [4, 3])
    assert pages.indptr.tolist() == [0, 1, 2]
    assert pages.indices.tolist() == [5, 7]
    assert pages.last_page_len.tolist() == [4, 3]


def test_no_entry_behind_a_request_s_pages_is_taken() -> None:
    for length in range(9):
        assert UNOWNED not in page_indices(TABLE, 4, [0, 2], [length, length]).indices.tolist()


def test_requests_without_a_single_key_have_no_pages() -> None:
    pages = page_indices(TABLE, 4, [0, 1], [0, 0])
    assert pages.indptr.tolist() == [0, 0, 0]
    assert pages.indices.shape == (0,)
    assert pages.last_page_len.tolist() == [0, 0]
