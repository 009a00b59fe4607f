"""``attncheck engine``: its options, what it prints, its run file and its exit code, without vLLM."""

import sys
import time

import pytest

from attncheck.errors import QuestionError
from attncheck.harness.device import collect_environment
from attncheck.harness.engine import traffic
from attncheck.harness.engine.events import EngineFacts, EngineFinding, ObserverResult
from attncheck.harness.engine.findings import joined, records_of
from attncheck.harness.engine.traffic import TRAFFIC, EngineRun
from attncheck.harness.run.outcomes import ProcessEnd
from attncheck.harness.workers.process import WorkerError
from attncheck.harness.workers.protocol import HarnessFailure
from attncheck.reports.analysis.repro import repro_command
from attncheck.reports.run_file.header import BackendInfo
from attncheck.reports.run_file.store import now, read_run, write_run

FACTS = EngineFacts(BackendInfo(name="vllm:CPU_ATTN", ref="vllm:CPU_ATTN", version="0.32.0"))
CHECKS = {"output": 40, "token": 20, "position": 20, "prefix_hit": 2, "count": 3, "write": 5}
WRONG = EngineFinding("output", 13, "3", 64, "model.layers.0", block_id=17, num_rows=2, cause="block 17 is stale")
ENVIRONMENT = collect_environment("cpu")


def observed(run, *findings, unmet="", ended_by=None, **changes):
    values = {"steps": 9, "checks": CHECKS, "not_followed": {}, "engine": FACTS} | changes
    result = ObserverResult(findings=findings, **values)
    return records_of(run.case, result, ENVIRONMENT, seed=run.seed, unmet=unmet, ended_by=ended_by)


@pytest.fixture
def serving(typed, tmp_path, monkeypatch):
    """``serving("engine --seed 3", answer)``: what the command prints, its run file, and the runs that were served.

    ``answer`` returns what serving a run gives.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(traffic, "import_vllm", lambda: None)

    def serving(words, answer):
        served = []

        def serve_apart(run, limit):
            served.append(run)
            return answer(run)

        monkeypatch.setattr(traffic, "serve_apart", serve_apart)
        output = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        options, *command = words.split(" -- ")
        done = typed(f"{options} --output {output} {' '.join(['--', *command] if command else [])}")
        return done, read_run(output) if output.exists() else None, served

    return serving


def not_started(run):
    raise QuestionError(f"{run.case.id}: vLLM did not start: ValueError: no drafts here")


def right(run):
    return observed(run)


def test_each_kind_of_traffic_through_each_small_model_is_a_case(serving):
    began = ""

    def answer(run):
        nonlocal began
        began = began or now()
        time.sleep(0.1)
        return right(run)

    done, stored, served = serving("engine", answer)
    assert done.code == 0
    assert "vllm:CPU_ATTN: PASSED: 15 cases right" in done.out
    assert [case.id for case in stored.header.cases] == [
        f"{model}-{kind}" for model in ("full", "hybrid", "latent") for kind in TRAFFIC
    ]
    assert stored.complete
    assert stored.header.command[0] == "attncheck"
    assert stored.header.started <= began
    assert [run.seed for run in served] == [0] * 15
    assert "15/15 latent-mixed: 6 passed" in done.err


def test_a_finding_fails_the_run_and_its_repetition_serves_the_same_requests(serving):
    words = "engine --model full,hybrid --traffic preempted --seed 7 --requests 9 --blocks 50"
    done, stored, served = serving(words, lambda run: observed(run, *([WRONG] * (run.model == "hybrid"))))
    assert done.code == 1
    assert "finding 1 of 1, vllm:CPU_ATTN: block N is stale" in done.out or "block 17 is stale" in done.out
    (failed,) = (record for record in stored.records if record.outcome == "failed")
    repeat = repro_command(failed, stored.header)
    assert repeat in " ".join(done.out.split())
    _, _, again = serving(repeat.removeprefix("attncheck "), right)
    assert again == [served[1].model_copy(update={"steps": 13, "folder": again[0].folder})]


def test_an_engine_that_crashes_costs_one_case_and_fails_the_run(serving):
    def answer(run):
        end = ProcessEnd("killed by SIGSEGV", "no such slot") if run.traffic == "drafts" else None
        return observed(run, ended_by=end)

    done, stored, _ = serving("engine --model full --traffic drafts,mixed", answer)
    assert done.code == 1
    by_case = {record.case_id: record.outcome for record in stored.records}
    assert by_case == {"full-drafts": "crashed", "full-mixed": "passed"}
    crashed = next(record for record in stored.records if record.outcome == "crashed")
    assert (crashed.cause, crashed.stage, crashed.output) == ("killed by SIGSEGV", "serving", "no such slot")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (not_started, "error: full-drafts: vLLM did not start: ValueError"),
        (lambda run: observed(run, unmet="the engine had no drafts"), "nothing was judged"),
    ],
    ids=["no start", "nothing judged"],
)
def test_what_was_not_served_is_no_success_and_no_fault_of_ours(serving, answer, error):
    done, _, _ = serving("engine --model full --traffic drafts", answer)
    assert done.code == 2
    assert error in done.err


def test_a_kind_that_did_not_start_beside_others_is_an_error_of_the_run(serving):
    answers = {"drafts": not_started, "mixed": right}
    done, stored, _ = serving("engine --model full --traffic drafts,mixed", lambda run: answers[run.traffic](run))
    assert done.code == 2
    assert stored.errors == ("full-drafts: vLLM did not start: ValueError: no drafts here",)
    assert "full-drafts: vLLM did not start" in done.out
    assert "1/2 full-drafts: not served" in done.err


def test_a_failure_of_ours_in_one_process_keeps_the_records_of_the_others(serving):
    def fails(run):
        raise WorkerError("full-mixed", HarnessFailure(error="KeyError: 3", traceback="where it was raised"))

    answers = {"drafts": lambda run: observed(run, WRONG), "mixed": fails, "preempted": right}
    words = "engine --model full --traffic drafts,mixed,preempted"
    done, stored, _ = serving(words, lambda run: answers[run.traffic](run))
    assert done.code == 3
    assert "where it was raised" in done.err
    assert "full-mixed: attncheck itself failed" in done.err
    assert {record.case_id for record in stored.records} == {"full-drafts", "full-preempted"}
    assert "block 17 is stale" in done.out
    alone, stored, _ = serving("engine --model full --traffic mixed", fails)
    assert (alone.code, stored) == (3, None)


def test_a_failure_of_the_observer_is_ours(serving):
    done, _, _ = serving("engine --model full --traffic mixed", lambda run: observed(run, failure="KeyError: 3"))
    assert done.code == 3
    assert "engine/full-mixed: attncheck itself failed, and stopped watching the engine: KeyError: 3" in done.err
    assert "finding 1" not in done.out
    assert "FAILED" not in done.out


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--traffic preempt", "unknown kind of traffic 'preempt'; did you mean 'preempted'?"),
        ("--model tiny", "--model tiny: no folder with a config.json, and none of the small models full"),
        ("--model one/m,two/m", "two folders have the same name"),
        ("--requests 3 -- vllm serve m", "--requests: the requests are those of vllm"),
        ("--requests 0", "requests"),
    ],
)
def test_options_that_exclude_each_other_or_name_nothing_are_refused(serving, tmp_path, words, error):
    for folder in ("one", "two"):
        (tmp_path / folder / "m").mkdir(parents=True)
        (tmp_path / folder / "m" / "config.json").write_text("{}")
    done, _, _ = serving(f"engine {words}", right)
    assert done.code == 2
    assert error in done.err


@pytest.mark.parametrize("code", [0, 3])
def test_what_a_watched_command_did_is_shown_and_its_own_exit_code_comes_first(typed, tmp_path, monkeypatch, code):
    command = (
        "import os, pathlib, sys; from attncheck.harness.engine.plugin import WatchSettings; "
        "path = WatchSettings.model_validate_json(os.environ['ATTNCHECK_ENGINE']).path; "
        f"path.write_bytes(pathlib.Path('served.jsonl').read_bytes()); sys.exit({code})"
    )
    served = observed(EngineRun(model="full", folder=tmp_path, traffic="mixed"), WRONG)
    write_run(tmp_path / "served.jsonl", joined([served], now()).header, served.records, ())
    monkeypatch.chdir(tmp_path)
    done = typed("engine --output run.jsonl --", sys.executable, "-c", command)
    assert done.code == (code or 1)
    assert "block 17 is stale" in done.out


@pytest.mark.parametrize(("ends", "code"), [(0, 2), (5, 5)])
def test_a_command_that_serves_nothing_is_not_judged(typed, tmp_path, ends, code):
    done = typed("engine --output", tmp_path / "run.jsonl", "--", sys.executable, "-c", f"raise SystemExit({ends})")
    assert done.code == code
    assert "run.jsonl was not written: vLLM ran no step" in done.err


def test_without_vllm_the_command_says_so(typed, tmp_path, monkeypatch):
    monkeypatch.setattr(traffic.os, "environ", {})
    done = typed("engine --output", tmp_path / "run.jsonl")
    assert done.code == 2
    assert "vLLM cannot be imported here: ModuleNotFoundError: No module named 'vllm'" in done.err
    assert "install attncheck in the environment of a vLLM" in done.err


def test_a_vllm_that_cannot_be_imported_is_named_with_its_error(typed, tmp_path, monkeypatch):
    (tmp_path / "vllm.py").write_text("raise ImportError('libcuda.so.1 is missing')\n")
    monkeypatch.setattr(traffic.os, "environ", {})
    monkeypatch.syspath_prepend(tmp_path)
    done = typed("engine --model full --traffic mixed --output", tmp_path / "run.jsonl")
    assert done.code == 2
    assert "error: vLLM cannot be imported here: ImportError: libcuda.so.1 is missing" in done.err
