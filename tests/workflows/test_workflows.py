"""Every `run:` of the workflows in .github/ works: executed in order, on a CPU, with `gh`, `sudo` and pip stood for.

The commands are the real ones, over one case and for a moment; test_workflow_files.py looks at what they ask for.
"""

import random
import shutil
import tempfile
from pathlib import Path

import pytest

from attncheck.reports.run_file.records import Record, Unsupported
from attncheck.reports.run_file.store import RunWriter, read_run

pytestmark = pytest.mark.xdist_group("workflows")

CPU, GPU = "attncheck-cpu.yml", "attncheck-gpu.yml"
ANSWERS, TIMES = "Compare the answers", "Compare the times"
FETCHED, KEPT_GREEN = "Fetch the last green run", "Keep the run files as the last green ones"
NO_LONGER = {"outcome", "reasons", "by"}
EXAMINE_WRONG = "--backend ./wrong.py:Wrong --suite decode --case single --check numerics"
WRONG = """
from attncheck import kernel_backend


def attend(query, key_cache, value_cache, metadata, params, out):
    out.zero_()


Wrong = kernel_backend(attend, name="Wrong")
"""


@pytest.fixture(scope="module")
def next_gpu(gpu):
    """The run after it, over the same times: from the step on that fetches what was kept."""
    return follow(gpu, base=gpu.folder / "results", new=gpu.folder / "results")


def follow(gpu, *, base, new, **changes):
    """A later run that found ``new``, with ``base`` kept by an earlier one."""
    stubs, folder = Path(gpu.machine["STUBS"]), Path(tempfile.mkdtemp(dir=gpu.folder.parent))
    for name in ("artifact", "asked"):
        shutil.rmtree(stubs / name, ignore_errors=True)
        (stubs / name).unlink(missing_ok=True)
    (stubs / "api").write_text("4711\n", encoding="utf-8")
    shutil.copytree(base, stubs / "artifact", ignore=shutil.ignore_patterns("*.html"))
    shutil.copytree(new, folder / "results", ignore=shutil.ignore_patterns("*.html"))
    made = gpu.again(folder, **changes)
    made.steps["examine"]["outcome"] = made.steps["time"]["outcome"] = "success"
    return made.run(start=FETCHED)


def runs_of(workflow, file):
    return [step["name"] for each in workflow(file)["jobs"].values() for step in each["steps"] if "run" in step]


def went_wrong(made):
    return {name: ran.printed for name, ran in made.ran.items() if ran.code}


def test_on_a_cpu_every_step_works(cpu, workflow):
    assert went_wrong(cpu) == {}
    assert list(cpu.ran) == runs_of(workflow, CPU)
    assert cpu.skipped == []
    assert {"results/run.jsonl", "results/junit.xml", "results/report.html"} <= set(cpu.artifacts["attncheck-cpu"])
    assert "torch_sdpa" in cpu.summary


def test_a_backend_that_falls_short_fails_the_job_and_is_reported_all_the_same(cpu):
    (cpu.folder / "wrong.py").write_text(WRONG, encoding="utf-8")
    shutil.rmtree(cpu.folder / "results")
    made = cpu.again(overrides={**cpu.overrides, "EXAMINE": EXAMINE_WRONG}).run(start="Examine")
    assert made.ran["Examine"].code == 1
    assert made.has_failed
    assert list(went_wrong(made)) == ["Examine"]
    assert "::error" in made.ran["Report"].printed
    assert "Wrong" in made.summary
    assert "results/junit.xml" in made.artifacts["attncheck-cpu"]


def test_what_was_never_examined_is_not_reported(cpu):
    made = cpu.again(overrides={**cpu.overrides, "ATTNCHECK": "attncheck[report]==0.0.0"}).run()
    assert list(made.ran) == ["Install"]
    assert made.ran["Install"].code
    assert made.artifacts == {}


def test_the_first_run_on_a_gpu_has_nothing_to_compare_with_and_says_so(gpu):
    assert went_wrong(gpu) == {}
    assert gpu.skipped == [ANSWERS, TIMES]
    assert "No green run on h100 yet: nothing to compare with." in gpu.summary
    assert set(gpu.artifacts["attncheck-h100-green"]) == {"results/correctness.jsonl", "results/timing.jsonl"}
    assert {"results/correctness.html", "results/timing.html"} <= set(gpu.artifacts["attncheck-h100"])


def test_what_is_kept_is_right_and_timed_in_rounds(gpu):
    right, timed = (read_run(gpu.folder / "results" / f"{name}.jsonl") for name in ("correctness", "timing"))
    assert [(record.check, record.outcome) for record in right.records] == [("numerics", "passed")]
    assert [(record.check, record.outcome, record.round) for record in timed.records] == [
        ("timing", "passed", 0),
        ("timing", "passed", 1),
    ]


def test_the_next_run_is_compared_with_the_last_green_one(next_gpu, machine):
    assert went_wrong(next_gpu) == {}
    assert next_gpu.skipped == []
    assert "attncheck-h100-green" in next_gpu.artifacts
    listed, fetched = (Path(machine["STUBS"]) / "asked").read_text(encoding="utf-8").splitlines()
    assert listed.split()[1:3] == [
        "api",
        "repos/someone/something/actions/artifacts?name=attncheck-h100-green&per_page=100",
    ]
    assert fetched == "gh run download 4711 --repo someone/something --name attncheck-h100-green --dir base"
    assert "cannot tell" in next_gpu.summary  # two rounds a side


def test_every_line_of_the_gpu_workflow_was_executed(gpu, next_gpu, workflow):
    assert [name for name in runs_of(workflow, GPU) if name not in {**gpu.ran, **next_gpu.ran}] == []


def test_clocks_are_locked_around_the_timing_only(gpu):
    names = list(gpu.ran)
    assert names[names.index("Time") - 1] == "Lock the clocks"
    assert names[names.index("Time") + 1] == "Unlock the clocks"


@pytest.fixture(scope="module")
def timed(gpu, tmp_path_factory):
    """``timed(factor)``: results of ten rounds, whose times are those of the first run's case times ``factor``."""
    base = read_run(gpu.folder / "results" / "timing.jsonl")

    def write(factor):
        folder = tmp_path_factory.mktemp("timed")
        shutil.copy(gpu.folder / "results" / "correctness.jsonl", folder)
        header, luck = base.header.model_copy(update={"rounds": 10}), random.Random(factor)
        with RunWriter(folder / "timing.jsonl", header) as writer:
            for number in range(10):
                writer.add(_scaled(base.records[0], number, factor * luck.gauss(1, 0.005)))
        return folder

    return write


def _scaled(record: Record, number: int, factor: float) -> Record:
    latencies = tuple(
        each.model_copy(
            update={
                "median_ns": 1e6 * factor,
                "low_ns": 1e6 * factor,
                "high_ns": 1e6 * factor,
                "samples_ns": tuple(round(1e6 * factor) + step for step in range(3)),
            }
        )
        for each in record.timing.latencies
    )
    return record.model_copy(
        update={"round": number, "timing": record.timing.model_copy(update={"latencies": latencies})}
    )


def test_a_slowdown_fails_the_job_is_told_and_is_not_kept_as_green(gpu, timed):
    made = follow(gpu, base=timed(1.0), new=timed(1.1))
    assert (made.ran[ANSWERS].code, made.ran[TIMES].code) == (0, 1)
    assert made.has_failed
    assert "slower" in made.summary
    assert "attncheck-h100" in made.artifacts
    assert made.skipped == [KEPT_GREEN]


def test_a_slowdown_that_is_accepted_is_told_and_becomes_the_base(gpu, timed):
    made = follow(gpu, base=timed(1.0), new=timed(1.1), inputs={"accept": True})
    assert (made.ran[ANSWERS].code, made.ran[TIMES].code) == (0, 1)
    assert not made.has_failed
    assert "slower" in made.summary
    assert "attncheck-h100-green" in made.artifacts


def test_a_lost_answer_fails_the_job_though_the_times_are_the_same(gpu, timed):
    base, new = timed(1.0), timed(1.0)
    kept = read_run(new / "correctness.jsonl")
    (new / "correctness.jsonl").unlink()
    with RunWriter(new / "correctness.jsonl", kept.header) as writer:
        for record in kept.records:
            told = {name: getattr(record, name) for name in Unsupported.model_fields if name not in NO_LONGER}
            writer.add(Unsupported(**told, reasons=("too many heads",)))
    made = follow(gpu, base=base, new=new)
    assert (made.ran[ANSWERS].code, made.ran[TIMES].code) == (1, 0)
    assert made.has_failed
    assert "too many heads" in made.summary


def test_a_question_to_github_that_fails_is_no_first_run(gpu):
    (Path(gpu.machine["STUBS"]) / "api").unlink()
    made = gpu.again().run(start=FETCHED)
    assert made.ran[FETCHED].code
    assert "nothing to compare with" not in made.summary
    assert made.has_failed


def test_a_wrong_kernel_is_not_timed_and_is_reported(gpu, tmp_path):
    (tmp_path / "checkout").mkdir()
    (tmp_path / "checkout" / "wrong.py").write_text(WRONG, encoding="utf-8")
    made = gpu.again(tmp_path / "checkout", overrides={**gpu.overrides, "EXAMINE": EXAMINE_WRONG}).run(start="Examine")
    assert list(made.ran) == ["Examine", "Report"]
    assert made.ran["Report"].code == 0
    assert made.has_failed
    assert {name: set(kept) for name, kept in made.artifacts.items()} == {
        "attncheck-h100": {"results/correctness.jsonl", "results/correctness.html"}
    }


def test_a_run_of_another_branch_is_compared_and_not_kept_as_green(gpu):
    made = gpu.again(github={**gpu.github, "ref_name": "topic"}).run(start="Keep the run files and the reports")
    assert list(made.artifacts) == ["attncheck-h100"]
    assert made.skipped == [KEPT_GREEN]


def test_without_a_clock_to_lock_none_is_touched(gpu):
    made = gpu.again(variables={"ATTNCHECK_GPUS": '["h100"]'})
    assert made.asks_for("Lock the clocks") is False
    assert made.asks_for("Unlock the clocks") is False


def test_a_job_is_queued_only_for_the_gpus_that_are_named(job, tmp_path):
    assert not job(GPU, "gpu", tmp_path, {}).is_wanted
    made = job(GPU, "gpu", tmp_path, {}, {"ATTNCHECK_GPUS": '["h100", "a100"]'})
    assert made.is_wanted
    assert made.combinations() == [{"gpu": "h100"}, {"gpu": "a100"}]
