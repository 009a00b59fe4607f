"""Metadata utilities that are called with tensors of the pretend device."""

import pytest
from pretend_cuda import Settings

FUNCTIONS = ("get_dcp_local_seq_lens", "slice_query_start_locs", "compute_causal_conv1d_metadata", "v0.*")


@pytest.mark.slow
def test_a_provider_is_examined_on_the_device(run_attncheck, tmp_path):
    words = ["--provider", "attncheck.reference", "--suite", "decode"]
    words += [word for function in FUNCTIONS for word in ("--function", function)]
    _, records = run_attncheck(words, Settings(report=str(tmp_path)))
    assert {record.outcome for record in records} == {"passed"}
    assert len(records) > 10
