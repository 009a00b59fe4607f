"""``attncheck run --shard`` and ``attncheck merge`` as typed: the parts are the whole."""

import json

import pytest
from inline_snapshot import snapshot

from attncheck.harness.cli import app as cli

CASES = ["--suite", "smoke", "--case", "decode.*", "--case", "mixed.*", "--case", "block-size.*"]
OPTIONS = ["--backend", "reference", "--check", "lse,cache_write,cudagraph", "--in-process", "--no-cache"]


def records(file):
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "duration_s"} for line in lines[1:-1]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """``whole.jsonl``, and ``1.jsonl`` to ``3.jsonl``: its shards."""
    folder = tmp_path_factory.mktemp("runs")
    for number, name in enumerate(["whole", "1", "2", "3"]):
        shard = ["--shard", f"{number}/3"] if number else []
        assert cli.main(["run", *OPTIONS, *CASES, *shard, "--output", str(folder / f"{name}.jsonl"), "--quiet"]) == 0
    return folder


def test_merged_shards_are_the_whole_run(runs, capsys, monkeypatch):
    monkeypatch.chdir(runs)
    assert cli.main(["merge", "3.jsonl", "1.jsonl", "2.jsonl", "--output", "merged.jsonl"]) == 0
    assert capsys.readouterr().out == snapshot("24 records of 3 runs, run file: merged.jsonl\n")
    assert records(runs / "merged.jsonl") == records(runs / "whole.jsonl")
    headers = [json.loads((runs / name).read_text().partition("\n")[0]) for name in ("merged.jsonl", "whole.jsonl")]
    assert headers[0].keys() == headers[1].keys()
    assert headers[0]["cases"] == headers[1]["cases"]


def test_a_missing_shard_is_a_wrong_question(runs, capsys, monkeypatch):
    monkeypatch.chdir(runs)
    assert cli.main(["merge", "1.jsonl", "2.jsonl", "--output", "none.jsonl"]) == 2
    printed = capsys.readouterr().err
    assert "3/3" in printed
    assert printed == snapshot("error: 1.jsonl: shard 3/3 is missing: the runs to merge have 1/3, 2/3\n")
    assert not (runs / "none.jsonl").exists()


def edited(path, line, words, instead):
    """Replace ``words`` in one line of a run file."""
    lines = path.read_text().splitlines(keepends=True)
    assert words in lines[line]
    lines[line] = lines[line].replace(words, instead)
    return lines


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        ("relabelled", "2.jsonl:2: smoke/decode.bfloat16 is no case of shard 2/3"),
        ("emptied", "1.jsonl: is incomplete: 5 of 8 cases lack records, such as smoke/decode.float16"),
        ("shortened", "1.jsonl: is incomplete: 1 of 8 cases lack records, such as smoke/decode.bfloat16"),
    ],
)
def test_a_shard_that_is_not_what_its_header_states_is_refused(runs, tmp_path, capsys, monkeypatch, edit, reason):
    monkeypatch.chdir(tmp_path)
    for number in (1, 2, 3):
        (tmp_path / f"{number}.jsonl").write_text((runs / f"{number}.jsonl").read_text())
    first = tmp_path / "1.jsonl"
    if edit == "relabelled":
        (tmp_path / "2.jsonl").write_text("".join(edited(first, 0, '"shard":"1/3"', '"shard":"2/3"')))
    elif edit == "emptied":
        first.write_text("".join(edited(first, 0, '"shard":"1/3"', '"shard":""')))
    else:
        header, dropped, *records, footer = first.read_text().splitlines(keepends=True)
        outcome = json.loads(dropped)["outcome"]
        counts = json.loads(footer)
        counts["counts"][outcome] -= 1
        first.write_text("".join([header, *records, json.dumps(counts), "\n"]))
    assert cli.main(["merge", "1.jsonl", "2.jsonl", "3.jsonl", "--output", "none.jsonl"]) == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "none.jsonl").exists()


def test_a_report_names_the_shard(runs, capsys, monkeypatch):
    monkeypatch.chdir(runs)
    for form, words in (("terminal", ", shard 2/3,"), ("markdown", "- Shard: 2/3"), ("html", "Shard: 2/3")):
        assert cli.main(["report", "2.jsonl", "--format", form]) == 0
        assert words in capsys.readouterr().out


def test_a_shard_with_nothing_to_examine_is_no_error(tmp_path, capsys):
    words = ["--suite", "smoke", "--case", "decode.float16", "--case", "soft-cap", "--check", "lse", "--in-process"]
    codes = [
        cli.main(["run", "--backend", "torch_sdpa", *words, "--no-output", "--quiet", "--shard", f"{number}/2"])
        for number in (1, 2)
    ]
    assert codes == [0, 0]
    assert "1 not applicable" in capsys.readouterr().out


def test_an_expected_failure_of_another_shard_is_not_missed(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    entry = "{backend: torch_sdpa, case: smoke/decode.float16, check: cache_write, outcome: failed, reason: known}"
    (tmp_path / "known.yaml").write_text(f"- {entry}\n")
    words = ["--suite", "smoke", "--case", "decode.*", "--check", "cache_write", "--in-process", "--quiet"]
    codes = [
        cli.main(["run", "--backend", "torch_sdpa", *words, "--expect", "known.yaml", "--no-output", "--shard", shard])
        for shard in ("1/3", "2/3", "3/3")
    ]
    assert sorted(codes) == [0, 0, 1]  # the shard of that case alone finds that it passes
    assert "known" in capsys.readouterr().out
