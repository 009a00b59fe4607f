"""The real vLLM: every known departure shows, nothing else differs, and the kept run has it. Run by `tox run -e vllm`."""

from pathlib import Path

import pytest
import torch

from attncheck.harness.providers.batches import ALWAYS, drawn_batches
from attncheck.harness.providers.examine import SUBJECTS, examine_subject
from attncheck.harness.providers.provider import SubjectSetting, load_provider
from attncheck.harness.providers.vllm_departures import DEPARTURES
from attncheck.reports.run_file.store import read_run

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def vllm():
    return load_provider("vllm")


@pytest.fixture(scope="session")
def setting():
    return SubjectSetting((*ALWAYS, *drawn_batches(1)), torch.device("cpu"))


def test_it_is_the_version_the_table_was_made_from(vllm):
    assert vllm.version == DEPARTURES.version


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.key)
def test_nothing_differs_but_what_is_known_and_all_of_that_shows(vllm, setting, subject):
    seen = examine_subject(vllm, subject, setting)
    if seen is None:
        assert DEPARTURES.why_gone(subject.key)
        return
    assert seen.first is None
    assert seen.stale == ()
    assert seen.counts["equal"] > 0 or subject.key in ("CommonAttentionMetadata", "subclass_attention_backend")


def test_every_departure_is_of_a_subject_and_what_is_gone_is_not_there(vllm):
    assert set(DEPARTURES.known) <= {subject.key for subject in SUBJECTS}
    for subject in SUBJECTS:
        if DEPARTURES.why_gone(subject.key):
            assert vllm.find(subject.name, subject.generation) is None


def test_the_command_line_examines_it_and_ends_as_the_kept_run(run_vllm, tmp_path):
    found, printed = run_vllm(tmp_path / "run.jsonl", "--provider", "vllm")
    assert "differs " not in printed.partition("equal: every question")[0]
    kept = read_run(ROOT / "docs" / "evidence" / "vllm-0.32.0" / "utilities.jsonl.xz")
    assert {record.outcome for record in found.records} == {"passed", "unsupported"}
    assert {each.case_id: each.outcome for each in found.records} == {
        each.case_id: each.outcome for each in kept.records
    }
