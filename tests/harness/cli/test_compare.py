"""``attncheck compare`` as typed: its exit codes, and where it writes."""

import pytest

from attncheck.harness.cli.common import STEP_SUMMARY
from attncheck.reports.run_file.header import BackendInfo, SuiteInfo

WANDER = (0.99, 1.01, 1.0, 0.995, 1.005, 1.002, 0.998, 1.007, 0.993, 1.0)


@pytest.fixture
def write(folder, monkeypatch, header, make_record, write_run):
    """``write("new.jsonl", factor=1.1, rounds=10, has_sinks=False)``: a run of ``one``, and as slow ``two``."""
    monkeypatch.delenv(STEP_SUMMARY, raising=False)

    def records(factor, rounds, *, has_sinks):
        for backend in ("one", "two"):
            who = {"suite": "decode", "backend": backend, "backend_ref": backend}
            is_lost = backend == "two" and not has_sinks
            lost = {"outcome": "unsupported", "reasons": ["no sinks"]}
            yield make_record(**(lost if is_lost else {"outcome": "passed"}), case_id="sinks", **who)
            for index in range(rounds):
                median = 1e6 * WANDER[index] * (factor if backend == "two" else 1)
                latency = {"part": "forward", "clock": "host", "median_ns": median, "low_ns": median, "high_ns": median}
                samples = {"samples_ns": [round(median), round(median) + 1], "is_settled": True}
                timing = {"latencies": [latency | samples]}
                yield make_record("passed", check="timing", round=index, timing=timing, **who)

    def write(name, *, factor=1.0, rounds=10, has_sinks=True):
        header_fields = {
            "suites": (SuiteInfo(name="decode", ref="decode", cases=2),),
            "checks": ("numerics", "timing"),
            "rounds": rounds,
            "backends": tuple(BackendInfo(name=each, ref=each) for each in ("one", "two")),
        }
        whole = header.model_copy(update=header_fields)
        return write_run(folder / name, whole, *records(factor, rounds, has_sinks=has_sinks))

    return write


@pytest.fixture
def compare(write, typed):
    """``compare("base.jsonl new.jsonl")``, where ``two`` is 10 % slower in new.jsonl."""
    write("base.jsonl")
    write("new.jsonl", factor=1.1)
    return lambda words: typed(f"compare {words}")


def test_a_slowdown_and_a_lost_feature_are_named_and_fail(write, compare):
    write("lost.jsonl", factor=1.1, has_sinks=False)
    done = compare("base.jsonl lost.jsonl")
    assert done.code == 1
    assert "worse  two      decode/sinks  numerics  passed -> unsupported  no sinks" in done.out
    assert "+10.0%" in done.out
    assert done.out.rstrip().splitlines()[-1].startswith("regression: 1 outcome worse; of 2 times 1 slower")


def test_equal_runs_and_too_noisy_ones_pass(write, compare):
    write("same.jsonl")
    write("few.jsonl", factor=2, rounds=3)
    done = compare("base.jsonl same.jsonl")
    assert (done.code, "no regression" in done.out) == (0, True)
    done = compare("base.jsonl few.jsonl")
    assert (done.code, "ALL TOO NOISY TO COMPARE" in done.out) == (0, True)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("--fail-on 'decode: 5%'", 1),
        ("--fail-on 'decode: 15%'", 0),
        ("--min-effect 20", 0),
        ("--fail-on 'prefill: 5%'", 2),
        ("--fail-on 'decode: 5%' --min-effect 10", 2),
        ("--match one", 2),
        ("--match one=three", 2),
        ("--match one=two --match two=two", 2),
        ("--match two=one", 0),
        ("--output new.jsonl", 2),
        ("--output nowhere/comparison.md", 2),
    ],
)
def test_options_decide_what_fails(compare, folder, words, code):
    before = (folder / "new.jsonl").read_bytes()
    assert compare(f"base.jsonl new.jsonl {words}").code == code
    assert (folder / "new.jsonl").read_bytes() == before


def test_two_backends_of_one_run(compare):
    done = compare("new.jsonl new.jsonl --match one=two")
    assert (done.code, "one -> two" in done.out) == (1, True)
    done = compare("new.jsonl new.jsonl")
    assert (done.code, "--match OLD=NEW" in done.err) == (2, True)


def test_what_new_lacks_fails_unless_it_is_allowed(compare, folder):
    lines = (folder / "base.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "cut.jsonl").write_text("".join(lines[:-2]), encoding="utf-8")
    done = compare("base.jsonl cut.jsonl")
    assert done.code == 1
    assert done.out.split("\n\n")[-1].startswith("incomplete: ")
    done = compare("base.jsonl cut.jsonl --allow-missing")
    assert done.code == 0
    assert "accepted by --allow-missing: the end of NEW" in " ".join(done.out.split())
    (folder / "header.jsonl").write_text(lines[0], encoding="utf-8")
    (folder / "none.jsonl").write_text("{}\n")
    for name in ("header", "none", "missing"):  # nothing is left to compare
        assert compare(f"base.jsonl {name}.jsonl").code == 2


def test_a_file_gets_the_comparison_github_a_summary_and_the_log_annotations(compare, folder, monkeypatch):
    done = compare("base.jsonl new.jsonl --format markdown --output comparison.md")
    assert (done.code, done.out) == (1, "")
    assert (folder / "comparison.md").read_text().startswith("# attncheck comparison")
    done = compare("base.jsonl new.jsonl --format github")
    assert done.code == 1
    assert done.out.startswith("# attncheck comparison")
    assert done.out.splitlines()[-1].startswith("::error title=two%3A decode/edge%2C forward%3A +10.0%25 time::")
    (folder / "summary.md").write_text("of another step\n")
    monkeypatch.setenv(STEP_SUMMARY, str(folder / "summary.md"))
    done = compare("base.jsonl new.jsonl --format github")
    assert (done.code, done.out.startswith("::error ")) == (1, True)
    assert (folder / "summary.md").read_text().startswith("of another step\n# attncheck comparison")
