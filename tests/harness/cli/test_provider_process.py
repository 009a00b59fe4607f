"""Providers of utilities in a process of their own: what ends or hangs there costs its own function."""

import pytest
from inline_snapshot import snapshot

from attncheck.errors import ProviderLoadError
from attncheck.harness.cli.run import execute_run
from attncheck.harness.run.options import RunOptions
from attncheck.harness.workers import limits

PROVIDER = """
import ctypes, os, time
from attncheck.reference import *

def is_valid_kv_cache_layout(*args, **kwargs):
    time.sleep(600)

def reshape_query_for_spec_decode(*args, **kwargs):
    os._exit(3)
"""
FUNCTIONS = ("reshape_*", "is_valid_kv_cache_layout", "get_kv_cache_layout")


@pytest.fixture
def examine(tmp_path, preloaded):
    """``examine(text)``: the records of a provider of this text."""

    def examine(text, **options):
        (tmp_path / "mine.py").write_text(text)
        given = RunOptions(providers=(str(tmp_path / "mine.py"),), functions=FUNCTIONS, **options)
        return execute_run(given, see=lambda record: None).records

    return examine


def test_a_function_that_ends_or_hangs_is_a_record_and_the_others_are_examined(examine):
    found = {record.case_id: record for record in examine(PROVIDER, case_timeout=0.5)}
    assert {name: record.outcome for name, record in found.items()} == {
        "reshape_query_for_spec_decode": "crashed",
        "reshape_attn_output_for_spec_decode": "passed",
        "is_valid_kv_cache_layout": "timed_out",
        "get_kv_cache_layout": "passed",
    }
    ended, hung = found["reshape_query_for_spec_decode"], found["is_valid_kv_cache_layout"]
    assert (ended.cause, ended.stage) == snapshot(("exited with code 3", "function reshape_query_for_spec_decode"))
    assert "in is_valid_kv_cache_layout" in hung.output


def test_records_are_those_of_this_process(examine):
    text = "from attncheck.reference import *\n"
    apart, here = (
        [record.model_copy(update={"duration_s": 0}) for record in examine(text, in_process=in_process)]
        for in_process in (False, True)
    )
    assert apart == here
    assert {record.outcome for record in apart} == {"passed"}


def test_a_provider_that_hangs_while_it_is_imported_is_refused(examine, plain, monkeypatch):
    monkeypatch.setattr(limits, "LEAST_LOADING_S", 2.0)
    with pytest.raises(ProviderLoadError) as refused:
        examine("import time; time.sleep(600)\n", case_timeout=0.5)
    assert plain(str(refused.value)) == snapshot(
        "provider 'TMP/mine.py': its process ended while it was imported: not finished within the time limit; the limit was 2 s (--case-timeout 0.5; the least for loading is 2 s)"
    )
