"""A run over every backend of a family: those that can run are examined, the others reported with one reason each."""

import pytest
from inline_snapshot import snapshot

from attncheck.harness.cli.app import main
from attncheck.harness.workers import survey
from attncheck.reports.run_file.header import SurveyedBackend
from attncheck.reports.run_file.store import read_run

pytestmark = pytest.mark.usefixtures("preloaded")

WORDS = ("--suite", "smoke", "--case", "decode.float32", "--check", "numerics", "--device", "cpu")


def surveyed(monkeypatch, *found):
    monkeypatch.setattr(survey, "survey", lambda family, device, wishes, limit: found)


def test_those_that_can_run_are_examined_and_the_others_reported(monkeypatch, tmp_path, capfd):
    surveyed(
        monkeypatch,
        SurveyedBackend(name="reference", level="NEVER", declared={"dtype": ("float32",)}),
        SurveyedBackend(name="some:ONE", reason="ONE needs a GPU"),
        SurveyedBackend(name="reference_mla"),
        SurveyedBackend(name="some:TWO", reason="TWO needs a GPU"),
        SurveyedBackend(name="some:THREE", reason="it raised"),
    )
    file = tmp_path / "run.jsonl"
    assert main(["run", "--backend", "some:*", "--backend", "torch_sdpa", *WORDS, "--output", str(file)]) == 0
    printed = " ".join(capfd.readouterr().out.split())
    assert "not examined: ONE, TWO: it needs a GPU" in printed
    assert "not examined: THREE: it raised" in printed
    run = read_run(file)
    assert [each.name for each in run.header.backends] == ["reference", "reference_mla", "torch_sdpa"]
    assert [each.name for each in run.header.surveyed if each.reason] == ["some:ONE", "some:TWO", "some:THREE"]
    outcomes = {record.backend: record.outcome for record in run.records}
    assert outcomes == {"reference": "passed", "reference_mla": "unsupported", "torch_sdpa": "passed"}


def test_a_backend_named_beside_a_family_must_still_be_examined(monkeypatch, tmp_path, capfd):
    surveyed(monkeypatch, SurveyedBackend(name="reference"))
    words = ["run", "--backend", "some:*", "--backend", "torch_mla", *WORDS, "--output", str(tmp_path / "run.jsonl")]
    assert main(words) == 2
    printed = capfd.readouterr().err
    assert "'torch_mla'" in printed
    assert printed == snapshot(
        "error: no case of backend 'torch_mla' was examined: the layer has no latent cache; select cases and checks that it supports\n"
    )


def test_a_family_of_which_nothing_can_run_is_a_wrong_question(monkeypatch, capfd):
    surveyed(monkeypatch, SurveyedBackend(name="some:ONE", reason="ONE needs a GPU"))
    assert main(["run", "--backend", "some:*", *WORDS, "--no-output"]) == 2
    assert capfd.readouterr().err == snapshot(
        "error: backend 'some:*': none of its 1 backends can run here; not examined: ONE: it needs a GPU\n"
    )


def test_an_unknown_family_is_a_wrong_question(capfd):
    assert main(["run", "--backend", "reference:*", *WORDS, "--no-output"]) == 2
    printed = capfd.readouterr().err
    assert "'reference'" in printed
    assert printed == snapshot("error: backend 'reference:*': 'reference' is no family of backends; write vllm:*\n")
