"""``attncheck fuzz`` and ``attncheck shrink``: what they print and write, and their exit codes."""

import re

import pytest
from inline_snapshot import snapshot

from attncheck.cases.loader import load_file
from attncheck.errors import SelectionError
from attncheck.harness.cli import fuzz
from attncheck.harness.cli.fuzz import recorded_failure
from attncheck.harness.cli.run_files import run_path
from attncheck.harness.fuzz.stand_alone import StandAloneAnswer
from attncheck.harness.run.options import read_time
from attncheck.reports.run_file.store import Run, read_run

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
def quick(monkeypatch, preloaded):
    """Without stand-alone files, each of which takes two more processes; tests/harness/fuzz has them."""
    left_out = StandAloneAnswer(False, "left out")
    monkeypatch.setattr(fuzz, "write_stand_alone", lambda _process, _failure, _path: left_out)


def test_a_fault_that_needs_three_heads_is_found_and_made_small(folder, typed, quick):
    (folder / "mine.py").write_text(FUNCTION)
    words = "fuzz ./mine.py:Wrong --check numerics --maxfail 1 --output found --device cpu"
    done = typed(f"{words} --budget 300s --shrink-time 300")
    assert done.code == 1
    (file,) = (folder / "found").iterdir()
    (small,) = load_file(file).cases
    assert (small.layer.num_kv_heads, small.layer.num_heads, small.batch.num_requests) == (3, 3, 1)
    assert small.checks == ("numerics",)
    assert re.search(r"small: 1 requests, \d new tokens, \d keys, 3 heads of \d+, 0 fields .* steps tried in", done.out)
    assert f"repeat: attncheck run --backend ./mine.py:Wrong --suite found/{file.name} " in done.out
    assert typed(f"run ./mine.py:Wrong --suite {file} --in-process --no-output").code == 1


def test_a_right_backend_passes(folder, typed, quick):
    done = typed("fuzz --backend torch_sdpa --budget 4s --device cpu")
    assert (done.code, "failures: 0" in done.out) == (0, True)
    assert not list((folder / "results").iterdir())


def test_a_recorded_failure_is_made_small_unless_it_is_repaired(folder, here, typed, quick):
    assert here("wrong.py:Wrong --check numerics").code == 1
    recorded = read_run(run_path("last"))
    assert recorded_failure(recorded, "", "", None).case.id == "prefill"  # of 17 keys; decode has 27
    shrink = f"shrink {recorded.path}::small/decode::numerics --output found"
    (folder / "run.jsonl").write_bytes((folder / recorded.path).read_bytes())
    done = typed(shrink.replace(recorded.path, "run.jsonl"))
    assert done.code == 2
    assert done.err == snapshot(
        "error: run.jsonl names the code wrong.py:Wrong, which shrink would run; to allow it, add --backend wrong.py:Wrong\n"
    )
    done = typed(f"{shrink} --backend wrong.py:Wrong")
    assert done.code == 1
    assert "found: 2 requests, 2 new tokens, 27 keys, 4 heads of 32" in done.out
    assert "small: 1 requests, 1 new tokens, 1 keys, 1 heads of 1, 0 fields" in done.out
    (folder / "wrong.py").write_text((folder / "wrong.py").read_text().replace("1.25", "1.0"))
    done = typed("shrink last::decode --output again")
    assert (done.code, "passes now, or fails in another way" in done.out) == (0, True)


def test_a_case_that_did_not_fall_short_is_refused(here, typed):
    assert here("reference --check numerics --output run.jsonl").code == 0
    assert typed("shrink run.jsonl::small/decode").code == 2
    assert typed("shrink run.jsonl").code == 2


def test_a_backend_must_be_named_where_several_fell_short_and_its_suite_be_the_same(make_record, header):
    several = Run("run.jsonl", header, (make_record("failed"), make_record("failed", backend="Wrong")), None)
    changed = Run("run.jsonl", header, (make_record("failed", case_id="decode.float16"),), None)
    messages = []
    for run, case in ((several, "edge"), (changed, "decode.float16")):
        with pytest.raises(SelectionError) as refused:
            recorded_failure(run, case, "", None)
        messages.append(str(refused.value))
    assert messages == snapshot(
        [
            "run.jsonl: edge did not pass for reference, Wrong; choose one with --backend",
            "run.jsonl: case smoke/decode.float16 has changed in suite smoke since the run; run the suite again",
        ]
    )


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("5m", 300), ("1h", 3600), ("0.5", 0.5)])
def test_times_are_read(text, seconds):
    assert read_time("--budget", text) == seconds
