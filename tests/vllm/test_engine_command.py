"""``attncheck engine`` on the real vLLM: right engines pass, and a wrong block is found, named and found again."""

import os
import shlex
import subprocess
import sys

import pytest

from attncheck.reports.analysis.repro import repro_command
from attncheck.reports.run_file.store import read_run

pytestmark = pytest.mark.vllm

PLANTED = """\
from vllm.v1.worker.block_table import BlockTable

append_row, calls = BlockTable.append_row, []


def plant():
    BlockTable.append_row = wrong_once


def wrong_once(self, block_ids, row_idx):
    append_row(self, block_ids, row_idx)
    calls.append(row_idx)
    if len(calls) == 20:
        place = self.num_blocks_per_row[row_idx] - 1
        self.block_table.np[row_idx, place] = self.block_table.np[row_idx - 1, 0]
"""
"""The first block of a neighbour takes the place of a request's last one, once."""


@pytest.fixture
def engine(tmp_path):
    """``engine("--model full", code=0)``: the run, and what is printed. ``planted``: vLLM has the fault above."""

    def engine(words, *, code, planted=False):
        output = tmp_path / f"{len(list(tmp_path.glob('*.jsonl')))}.jsonl"
        path = os.environ.get("PYTHONPATH", "")
        if planted:
            (tmp_path / "planted.py").write_text(PLANTED)
            info = tmp_path / "planted-1.dist-info"
            info.mkdir(exist_ok=True)
            (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1\n")
            (info / "entry_points.txt").write_text("[vllm.general_plugins]\nplanted = planted:plant\n")
            path = f"{tmp_path}{os.pathsep}{path}"
        command = [sys.executable, "-m", "attncheck", "engine", *shlex.split(words), "--output", str(output)]
        environment = os.environ | {"PYTHONPATH": path}
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=900
        )
        assert done.returncode == code, done.stdout + done.stderr
        return read_run(output), done.stdout

    return engine


def test_each_row_of_vllm_is_right_and_what_did_not_happen_is_not_examined(engine):
    run, printed = engine("--model hybrid,latent --traffic shared-prefixes,drafts", code=0)
    outcomes = {(record.case_id, record.check): record.outcome for record in run.records}
    assert {outcome for (case, _), outcome in outcomes.items() if case != "latent-shared-prefixes"} == {"passed"}
    assert outcomes["hybrid-shared-prefixes", "prefix_hit"] == "passed"
    assert outcomes["latent-shared-prefixes", "output"] == "unavailable"
    assert {backend.name for backend in run.header.backends} == {"vllm:CPU_ATTN", "vllm:CPU_MLA"}
    outputs = [record for record in run.records if record.check == "output" and record.outcome == "passed"]
    assert all(0 < record.figures["budget_share"] < 1 and record.figures["compared"] > 1000 for record in outputs)
    assert "vllm:CPU_ATTN: PASSED: 2 cases right" in printed


def test_a_wrong_block_is_one_finding_with_its_place_and_its_repetition_finds_it_again(engine):
    run, printed = engine("--model full --traffic shared-prefixes --requests 8", code=1, planted=True)
    failed = {record.check: record for record in run.records if record.outcome == "failed"}
    assert "output" in failed
    assert not {"token", "position", "count"} & failed.keys()
    assert ", block " in failed["output"].summary
    repeat = repro_command(failed["output"], run.header)
    assert repeat in " ".join(printed.split())
    again, _ = engine(repeat.removeprefix("attncheck engine "), code=1, planted=True)
    (output,) = (record for record in again.records if record.check == "output")
    assert output.figures["first_step"] == failed["output"].figures["first_step"]
    assert output.summary.partition(", the first")[2] == failed["output"].summary.partition(", the first")[2]
