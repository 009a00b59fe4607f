"""``attncheck run --shard`` and ``attncheck merge`` as typed: the parts are the whole."""

import json

import pytest
from inline_snapshot import snapshot

from attncheck.harness.cli import app as cli

CASES = "--suite smoke --case decode.*,mixed.*,block-size.*"
pytestmark = pytest.mark.xdist_group("merge")  # its four runs are made once
RUN = f"run --backend reference {CASES} --check lse,cache_write,cudagraph --in-process --no-cache --quiet"


def records(file):
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "duration_s"} for line in lines[1:-1]]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """``whole.jsonl``, and ``1.jsonl`` to ``3.jsonl``: its shards."""
    folder = tmp_path_factory.mktemp("runs")
    for name, shard in {"whole": "", "1": "--shard 1/3", "2": "--shard 2/3", "3": "--shard 3/3"}.items():
        assert cli.main([*f"{RUN} {shard}".split(), "--output", str(folder / f"{name}.jsonl")]) == 0
    return folder


@pytest.fixture
def runs(made, tmp_path, monkeypatch):
    """Copies of these in the current folder."""
    for path in made.iterdir():
        (tmp_path / path.name).write_text(path.read_text())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_merged_shards_are_the_whole_run(runs, typed):
    done = typed("merge 3.jsonl 1.jsonl 2.jsonl --output merged.jsonl")
    assert (done.code, done.out) == snapshot((0, "21 records of 3 runs, run file: merged.jsonl\n"))
    assert records(runs / "merged.jsonl") == records(runs / "whole.jsonl")
    headers = [json.loads((runs / name).read_text().partition("\n")[0]) for name in ("merged.jsonl", "whole.jsonl")]
    assert headers[0].keys() == headers[1].keys()
    assert headers[0]["cases"] == headers[1]["cases"]


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        ("missing", "1.jsonl: shard 3/3 is missing: the runs to merge have 1/3, 2/3"),
        ("relabelled", "2.jsonl:2: smoke/decode.bfloat16 is no case of shard 2/3"),
        ("emptied", "1.jsonl: is incomplete: 4 of 7 cases lack records, such as smoke/decode.float16"),
        ("shortened", "1.jsonl: is incomplete: 1 of 7 cases lack records, such as smoke/decode.bfloat16"),
    ],
)
def test_a_shard_that_is_not_what_its_header_states_is_refused(runs, typed, edit, reason):
    first = (runs / "1.jsonl").read_text()
    assert first.count('"shard":"1/3"') == 1
    if edit == "relabelled":
        (runs / "2.jsonl").write_text(first.replace('"shard":"1/3"', '"shard":"2/3"'))
    elif edit == "emptied":
        (runs / "1.jsonl").write_text(first.replace('"shard":"1/3"', '"shard":""'))
    elif edit == "shortened":
        header, dropped, *kept, footer = first.splitlines(keepends=True)
        counts = json.loads(footer)
        counts["counts"][json.loads(dropped)["outcome"]] -= 1
        (runs / "1.jsonl").write_text("".join([header, *kept, json.dumps(counts), "\n"]))
    shards = "1.jsonl 2.jsonl" if edit == "missing" else "1.jsonl 2.jsonl 3.jsonl"
    done = typed(f"merge {shards} --output none.jsonl")
    assert (done.code, reason in done.err) == (2, True)
    assert not (runs / "none.jsonl").exists()


def test_a_report_names_the_shard(runs, typed):
    for form, words in (("terminal", ", shard 2/3,"), ("markdown", "- Shard: 2/3"), ("html", "Shard: 2/3")):
        assert words in typed(f"report 2.jsonl --format {form}").out


def test_a_shard_with_nothing_to_examine_is_no_error(typed):
    words = "run torch_sdpa --suite smoke --case decode.float16,soft-cap --check lse --in-process --no-output --quiet"
    done = [typed(f"{words} --shard {number}/2") for number in (1, 2)]
    assert [each.code for each in done] == [0, 0]
    assert "1 not applicable" in done[0].out + done[1].out


def test_an_expected_failure_of_another_shard_is_not_missed(runs, typed):
    entry = "{backend: torch_sdpa, case: smoke/decode.float16, check: cache_write, outcome: failed, reason: known}"
    (runs / "known.yaml").write_text(f"- {entry}\n")
    words = "run torch_sdpa --suite smoke --case decode.* --check cache_write --in-process --quiet --no-output"
    done = [typed(f"{words} --expect known.yaml --shard {number}/3") for number in (1, 2, 3)]
    assert sorted(each.code for each in done) == [0, 0, 1]  # the shard of that case alone finds that it passes
    assert any("known" in each.out for each in done)
