"""[tool.attncheck] of pyproject.toml: what it fills in, and what is wrong with it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from attncheck.errors import CaseFileError
from attncheck.harness.cli import app as cli
from attncheck.harness.cli.options import Config, read_config
from attncheck.reports.run_file.store import Run, read_run

TABLE = """\
[project]
name = "mine"

[tool.attncheck]
suites = "small.yaml"
backends = ["reference", "./wrong.py:Raising"]
checks = ["numerics", "lse"]
skip = ["lse"]
settings = ["cache.block_size=8"]
device = "cpu"
keep = 2
"""


def kept(folder: Path) -> list[Run]:
    return [read_run(path) for path in sorted((folder / "results").iterdir())]


def test_the_table_fills_in_what_the_command_line_leaves_out(folder: Path) -> None:
    (folder / "pyproject.toml").write_text(TABLE)
    assert cli.main(["run", "--in-process"]) == 1
    (run,) = kept(folder)
    assert [(each.backend, each.case_id, each.check) for each in run.records] == [
        (backend, case, "numerics") for case in ("decode", "prefill") for backend in ("reference", "Raising")
    ]
    assert [suite.ref for suite in run.header.suites] == ["small.yaml{cache.block_size: 8}"]
    (note,) = run.header.notes
    assert note == snapshot(
        "options not given on the command line are from pyproject.toml: backends = reference,./wrong.py:Raising, checks = numerics,lse, device = cpu, keep = 2, settings = cache.block_size=8, skip = lse, suites = small.yaml"
    )


def test_an_option_wins_and_the_line_that_repeats_a_record_works(folder: Path) -> None:
    (folder / "pyproject.toml").write_text(TABLE)
    repeat = ["run", "--backend", "reference", "--suite"]
    assert cli.main([*repeat, "small.yaml{cache.block_size: 8}", "--check", "lse", "--in-process"]) == 0
    (run,) = kept(folder)
    assert [(each.backend, each.case_id, each.check) for each in run.records] == [("reference", "decode", "lse")]
    assert [suite.ref for suite in run.header.suites] == ["small.yaml{cache.block_size: 8}"]


def test_only_so_many_runs_are_kept(folder: Path) -> None:
    (folder / "pyproject.toml").write_text(TABLE)
    for _ in range(3):
        assert cli.main(["run", "reference", "--case", "prefill", "--in-process"]) == 0
    assert len(kept(folder)) == 2


def test_the_nearest_table_counts_and_its_paths_are_those_of_its_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = TABLE.replace("./wrong.py", "wrong.py") + 'expect = "known.yaml"\noutput = "kept"\n'
    (folder / "pyproject.toml").write_text(table)
    below = folder / "package" / "tests"
    below.mkdir(parents=True)
    (below.parent / "pyproject.toml").write_text("[tool.other]\nname = 'attncheck'\n")
    monkeypatch.chdir(below)
    config = read_config(below)
    assert config.given["suites"] == ["../../small.yaml"]
    assert config.given["backends"] == ["reference", "../../wrong.py:Raising"]
    assert (config.given["expect"], config.given["folder"]) == (Path("../../known.yaml"), Path("../../kept"))
    assert "../../pyproject.toml" in config.note


@pytest.mark.parametrize("others", ["[tool.other]\n", "[tool.other]\nseed =\n"])
def test_a_file_of_others_fills_in_nothing(others: str, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(others)
    assert read_config(tmp_path) == Config()
    assert read_config(tmp_path).note == ""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('suite = "smoke"', snapshot("pyproject.toml: tool.attncheck.suite: unknown key; did you mean suites?")),
        (
            "colour = 1",
            snapshot(
                "pyproject.toml: tool.attncheck.colour: unknown key; known keys: backends, suites, settings, checks, skip, seed, case_timeout, backend_timeout, memory_limit, device_memory_limit, expect, output, keep, device, pass_env, cache, warm"
            ),
        ),
        (
            "keep = 0",
            snapshot("pyproject.toml: tool.attncheck.keep: Input should be greater than or equal to 1 (found 0)"),
        ),
        (
            'checks = {numerics = "no"}',
            snapshot("pyproject.toml: tool.attncheck.checks: Input should be a valid list (found {'numerics': 'no'})"),
        ),
        ("seed =", snapshot("TMP/pyproject.toml: is not TOML: Invalid value (at line 2, column 7)")),
    ],
)
def test_what_is_wrong_is_named(
    plain: Callable[[str], str], line: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text(f"[tool.attncheck]\n{line}\n")
    with pytest.raises(CaseFileError) as wrong:
        read_config(tmp_path)
    assert plain(str(wrong.value)) == message


def test_a_wrong_check_of_the_table_is_refused(
    plain: Callable[[str], str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "pyproject.toml").write_text('[tool.attncheck]\nchecks = "numeric"\n')
    assert cli.main(["run", "reference", "--suite", "small.yaml"]) == 2
    printed = capsys.readouterr().err
    assert "'numeric'" in printed
    assert "'numerics'" in printed
    assert plain(printed) == snapshot("error: unknown check 'numeric'; did you mean 'numerics'? (known: ...)\n")
