"""``attncheck engine``: its options, what it prints, its run file and its exit code, with a process that plays vLLM's."""

import sys
from contextlib import contextmanager

import pytest

from attncheck.harness.cli import engine as command
from attncheck.harness.device import collect_environment
from attncheck.harness.engine.events import EngineFacts, EngineFinding, ObserverResult
from attncheck.harness.engine.findings import backend_of, records_of
from attncheck.harness.engine.traffic import TRAFFIC, ServedTraffic, circumstances_of
from attncheck.reports.analysis.repro import repro_command
from attncheck.reports.run_file.store import read_run

FACTS = EngineFacts(vllm_version="0.32.0", runner="V1", backends=("CPU_ATTN",), dtype="bfloat16")
CHECKS = {"output": 40, "token": 20, "position": 20, "prefix_hit": 2, "count": 3, "write": 5}
WRONG = EngineFinding("output", 13, "3", 64, "model.layers.0", block_id=17, num_rows=2, cause="block 17 is stale")
ENVIRONMENT = collect_environment("cpu")
START = ServedTraffic(environment=ENVIRONMENT)


def observed(run, *findings, lacks="", **changes):
    values = {"steps": 9, "checks": CHECKS, "not_followed": {}, "engine": FACTS} | changes
    case, result = run.case(lacks), ObserverResult(findings=findings, **values)
    records = records_of(case, result, circumstances_of(run, ENVIRONMENT))
    backend = backend_of(result.engine).info
    return ServedTraffic(case=case.info(result), backend=backend, environment=ENVIRONMENT, records=records)


@pytest.fixture
def serving(typed, tmp_path, monkeypatch):
    """``serving("engine --seed 3", answer)``: what the command prints, its run file, and the runs that were served.

    ``answer`` returns the lines of the process for a run.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "check_internals", lambda: None)

    def serving(words, answer):
        served = []

        @contextmanager
        def lines_of_process(runs, log):
            served.extend(runs)
            log.write("INFO: loading\nValueError: no such dtype\n")
            yield iter([line for run in runs for line in answer(run)])

        monkeypatch.setattr(command, "_lines_of_process", lines_of_process)
        output = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        done = typed(f"{words} --output", output)
        return done, read_run(output) if output.exists() else None, served

    return serving


def right(run):
    return [START, observed(run)]


def test_each_kind_of_traffic_through_each_small_model_is_a_case(serving):
    done, stored, served = serving("engine", right)
    assert done.code == 0
    assert "vllm:CPU_ATTN: PASSED: 15 cases right" in done.out
    assert [case.id for case in stored.header.cases] == [
        f"{model}-{kind}" for model in ("full", "hybrid", "latent") for kind in TRAFFIC
    ]
    assert stored.complete
    assert stored.header.command[0] == "attncheck"
    assert [run.seed for run in served] == [0] * 15
    assert "15/15 latent-mixed: 6 passed" in done.err


def test_a_finding_fails_the_run_and_its_repetition_serves_the_same_requests(serving):
    words = "engine --model full,hybrid --traffic preempted --seed 7 --requests 9 --blocks 50 --dtype float16"
    done, stored, served = serving(words, lambda run: [START, observed(run, *([WRONG] * (run.model == "hybrid")))])
    assert done.code == 1
    assert "finding 1 of 1, vllm:CPU_ATTN: block N is stale" in done.out or "block 17 is stale" in done.out
    (failed,) = (record for record in stored.records if record.outcome == "failed")
    repeat = repro_command(failed, stored.header)
    assert repeat in " ".join(done.out.split())
    _, _, again = serving(repeat.removeprefix("attncheck "), right)
    assert again == [served[1].model_copy(update={"steps": 13, "folder": again[0].folder})]


def test_an_engine_that_crashes_costs_one_case_and_fails_the_run(serving):
    ends = {"full-drafts": [START, ServedTraffic(ended="killed by SIGSEGV")]}
    done, stored, _ = serving(
        "engine --model full --traffic drafts,mixed", lambda run: ends.get(run.case_id, right(run))
    )
    assert done.code == 1
    by_case = {record.case_id: record.outcome for record in stored.records}
    assert by_case == {"full-drafts": "crashed", "full-mixed": "passed"}
    crashed = next(record for record in stored.records if record.outcome == "crashed")
    assert (crashed.cause, crashed.stage) == ("killed by SIGSEGV", "serving")
    assert crashed.output.endswith("ValueError: no such dtype")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (lambda run: [ServedTraffic(not_started="ValueError: no such dtype")], "vLLM did not start: ValueError"),
        (lambda run: [], "vLLM cannot be imported, or its process ended"),
        (lambda run: [START, observed(run, lacks="the engine had no drafts")], "nothing was judged"),
    ],
    ids=["no start", "no vLLM", "nothing judged"],
)
def test_what_was_not_served_is_no_success_and_no_fault_of_ours(serving, answer, error):
    done, _, _ = serving("engine --model full --traffic drafts", answer)
    assert done.code == 2
    assert error in done.err


def test_a_kind_that_did_not_start_beside_others_is_an_error_of_the_run(serving):
    ends = {"full-drafts": [ServedTraffic(not_started="ValueError: no drafts here")]}
    done, stored, _ = serving(
        "engine --model full --traffic drafts,mixed", lambda run: ends.get(run.case_id, right(run))
    )
    assert done.code == 2
    assert stored.errors == ("full-drafts: vLLM did not start: ValueError: no drafts here",)
    assert "full-drafts: vLLM did not start" in done.out


def test_a_failure_of_the_observer_is_ours(serving):
    done, _, _ = serving("engine --model full --traffic mixed", lambda run: [observed(run, failure="KeyError: 3")])
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
    options, dashes, rest = words.partition(" -- ")
    done, _, _ = serving(f"engine {options}", right) if not dashes else (serving_command(serving, options, rest), 0, 0)
    assert done.code == 2
    assert error in done.err


def serving_command(serving, options, rest):
    done, _, _ = serving(f"engine {options} -- {rest}", right)
    return done


def test_without_vllm_the_command_says_so(typed, tmp_path):
    done = typed("engine --output", tmp_path / "run.jsonl")
    assert done.code == 2
    assert "vLLM is not installed" in done.err


def test_the_process_that_serves_is_ended_and_its_last_lines_are_shown(typed, tmp_path, monkeypatch):
    (tmp_path / "vllm.py").write_text("raise ImportError('libcuda.so.1 is missing')\n")
    monkeypatch.setattr(command, "check_internals", lambda: None)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(sys.path)}")
    done = typed("engine --model full --traffic mixed --output", tmp_path / "run.jsonl")
    assert done.code == 2
    assert "error: vLLM cannot be imported, or its process ended" in done.err
    assert "vLLM | ImportError: libcuda.so.1 is missing" in done.err
