"""``attncheck fuzz`` and ``attncheck shrink``: what they print and write, and their exit codes."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from attncheck.cases.loader import load_file
from attncheck.errors import SelectionError
from attncheck.harness.cli import app as cli
from attncheck.harness.cli import fuzz
from attncheck.harness.cli.fuzz import read_time, recorded_failure
from attncheck.harness.cli.run_files import run_path
from attncheck.harness.fuzz.stand_alone import StandAloneAnswer
from attncheck.reports.run_file.store import Run, read_run

Attncheck = Callable[..., int]

FUNCTION = """\
from attncheck.backends.candidates.torch_sdpa import SDPABackend, SDPAImpl

class Wrong(SDPABackend):
    get_impl_cls = staticmethod(lambda: Impl)

class Impl(SDPAImpl):
    def forward(self, layer, query, *args, **keywords):
        result = super().forward(layer, query, *args, **keywords)
        if self.num_kv_heads == 3:
            result[:, -1] = result[:, 0]
        return result
"""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, preloaded: None) -> None:
    """Without stand-alone files, each of which takes two more processes; tests/harness/fuzz has them."""
    monkeypatch.setattr(
        fuzz, "write_stand_alone", lambda _process, _failure, _path: StandAloneAnswer(False, "left out")
    )


@pytest.mark.usefixtures("quick")
def test_a_fault_that_needs_three_heads_is_found_and_made_small(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "mine.py").write_text(FUNCTION)
    words = ("fuzz", "./mine.py:Wrong", "--check", "numerics", "--maxfail", "1", "--output", "found")
    assert cli.main([*words, "--device", "cpu", "--budget", "300s", "--shrink-time", "300"]) == 1
    printed = capsys.readouterr().out
    (file,) = (folder / "found").iterdir()
    (small,) = load_file(file).cases
    assert (small.layer.num_kv_heads, small.layer.num_heads, small.batch.num_requests) == (3, 3, 1)
    assert small.checks == ("numerics",)
    assert re.search(r"small: 1 requests, \d new tokens, \d keys, 3 heads of \d+, 0 fields .* steps tried in", printed)
    assert f"repeat: attncheck run --backend ./mine.py:Wrong --suite found/{file.name} " in printed
    assert cli.main(["run", "./mine.py:Wrong", "--suite", str(file), "--in-process", "--no-output"]) == 1


@pytest.mark.usefixtures("quick")
def test_a_right_backend_passes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fuzz", "--backend", "torch_sdpa", "--budget", "4s", "--device", "cpu"]) == 0
    assert "failures: 0" in capsys.readouterr().out
    assert not list((folder / "results").iterdir())


@pytest.mark.usefixtures("quick")
def test_a_recorded_failure_is_made_small(folder: Path, run: Attncheck, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--backend", "wrong.py:Wrong", "--check", "numerics", "--output", "run.jsonl") == 1
    capsys.readouterr()
    assert cli.main(["shrink", "run.jsonl::small/decode::numerics", "--output", "found"]) == 2
    assert capsys.readouterr().err == snapshot(
        "error: run.jsonl names the code wrong.py:Wrong, which shrink would run; to allow it, add --backend wrong.py:Wrong\n"
    )
    words = ["shrink", "run.jsonl::small/decode::numerics", "--backend", "wrong.py:Wrong", "--output", "found"]
    assert cli.main(words) == 1
    printed = capsys.readouterr().out
    assert "found: 2 requests, 2 new tokens, 27 keys, 4 heads of 32" in printed
    assert "small: 1 requests, 1 new tokens, 1 keys, 1 heads of 1, 0 fields" in printed


def test_the_smallest_failing_case_is_the_default(run: Attncheck, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--backend", "wrong.py:Wrong", "--check", "numerics") == 1
    recorded = read_run(run_path("last"))
    assert recorded_failure(recorded, "", "", None).case.id == "prefill"  # of 17 keys; decode has 27
    assert recorded_failure(recorded, "small/decode", "", None).case.id == "decode"


@pytest.mark.usefixtures("quick")
def test_a_repaired_failure_is_reported(folder: Path, run: Attncheck, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--backend", "wrong.py:Wrong", "--check", "numerics") == 1
    (folder / "wrong.py").write_text((folder / "wrong.py").read_text().replace("1.25", "1.0"))
    assert cli.main(["shrink", "last::decode", "--output", "found"]) == 0
    assert "passes now, or fails in another way" in capsys.readouterr().out


def test_a_case_that_did_not_fall_short_is_refused(folder: Path, here: Attncheck) -> None:
    assert here("--backend", "reference", "--output", "run.jsonl") == 0
    assert cli.main(["shrink", "run.jsonl::small/decode"]) == 2
    assert cli.main(["shrink", "run.jsonl"]) == 2
    assert cli.main(["shrink"]) == 2  # no run is kept


def test_a_backend_must_be_named_where_several_fell_short(make_record: Callable[..., object], header: object) -> None:
    records = (make_record("failed"), make_record("failed", backend="Wrong"))
    run = Run("run.jsonl", header, records, None)  # type: ignore[arg-type]
    with pytest.raises(SelectionError) as refused:
        recorded_failure(run, "edge", "", None)
    assert str(refused.value) == snapshot(
        "run.jsonl: edge did not pass for reference, Wrong; choose one with --backend"
    )
    assert "--backend" in str(refused.value)


def test_a_suite_that_has_changed_is_refused(make_record: Callable[..., object], header: object) -> None:
    record = make_record("failed", case_id="decode.float16")
    run = Run("run.jsonl", header, (record,), None)  # type: ignore[arg-type]
    with pytest.raises(SelectionError) as refused:
        recorded_failure(run, "decode.float16", "numerics", None)
    assert str(refused.value) == snapshot(
        "run.jsonl: case smoke/decode.float16 has changed in suite smoke since the run; run the suite again"
    )
    assert "smoke/decode.float16" in str(refused.value)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("5m", 300), ("1h", 3600), ("0.5", 0.5)])
def test_times_are_read(text: str, seconds: float) -> None:
    assert read_time("--budget", text) == seconds
