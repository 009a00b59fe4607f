"""Providers of utilities in a process of their own: what ends or hangs there costs its own function."""

from collections.abc import Callable
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from attncheck.errors import ProviderLoadError
from attncheck.harness.cli.run import execute_run
from attncheck.harness.run.options import RunOptions
from attncheck.harness.workers import limits
from attncheck.reports.run_file.records import Record

PROVIDER = """
import ctypes, os, time
from attncheck.reference import *

def is_valid_kv_cache_layout(*args, **kwargs):
    time.sleep(600)

def reshape_query_for_spec_decode(*args, **kwargs):
    os._exit(3)
"""
FUNCTIONS = ("reshape_*", "is_valid_kv_cache_layout", "get_kv_cache_layout")


def examine(file: Path, **options: object) -> tuple[Record, ...]:
    given = RunOptions(providers=(str(file),), functions=FUNCTIONS, case_timeout=0.5, **options)  # type: ignore[arg-type]
    return execute_run(given, lambda header: None, see=lambda record: None).records


def test_a_function_that_ends_or_hangs_is_a_record_and_the_others_are_examined(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(PROVIDER)
    found = {record.case_id: record for record in examine(file)}
    assert {name: record.outcome for name, record in found.items()} == {
        "reshape_query_for_spec_decode": "crashed",
        "reshape_attn_output_for_spec_decode": "passed",
        "is_valid_kv_cache_layout": "timed_out",
        "get_kv_cache_layout": "passed",
    }
    ended, hung = found["reshape_query_for_spec_decode"], found["is_valid_kv_cache_layout"]
    assert (ended.cause, ended.stage) == (snapshot("exited with code 3"), "function reshape_query_for_spec_decode")  # type: ignore[union-attr]
    assert "in is_valid_kv_cache_layout" in hung.output  # type: ignore[union-attr]


def test_records_are_those_of_this_process(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from attncheck.reference import *\n")
    apart, here = (
        [record.model_copy(update={"duration_s": 0}) for record in found]
        for found in (
            examine(file),
            execute_run(
                RunOptions(providers=(str(file),), functions=FUNCTIONS, in_process=True), lambda header: None
            ).records,
        )
    )
    assert apart == here
    assert {record.outcome for record in apart} == {"passed"}


def test_a_provider_that_hangs_while_it_is_imported_is_refused(
    plain: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LEAST_LOADING_S", 2.0)
    file = tmp_path / "mine.py"
    file.write_text("import time; time.sleep(600)\n")
    with pytest.raises(ProviderLoadError) as refused:
        examine(file)
    assert plain(str(refused.value)) == snapshot(
        "provider 'TMP/mine.py': its process ended while it was imported: not finished within the time limit; the limit was 2 s (--case-timeout 0.5; the least for loading is 2 s)"
    )
