"""Files of options: [tool.attncheck] of pyproject.toml, and the file of ``--executor ray``, for which ray is not needed."""

from pathlib import Path

import pytest
from inline_snapshot import snapshot

from attncheck.errors import CaseFileError
from attncheck.harness.cli.options import Config, read_config
from attncheck.harness.cli.run_files import kept_runs
from attncheck.harness.run.options import RaySettings, read_executor
from attncheck.reports.run_file.store import read_run

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


def test_the_table_fills_in_what_the_command_line_leaves_out(typed, folder):
    (folder / "pyproject.toml").write_text(TABLE)
    assert typed("run --in-process").code == 1
    repeat = "run --backend reference --suite 'small.yaml{cache.block_size: 8}' --check lse --in-process"
    assert typed(repeat).code == 0
    first, second = map(read_run, kept_runs(folder / "results"))
    assert [(each.backend, each.case_id, each.check) for each in first.records] == [
        (backend, case, "numerics") for case in ("decode", "prefill") for backend in ("reference", "Raising")
    ]
    assert [(each.backend, each.case_id, each.check) for each in second.records] == [("reference", "decode", "lse")]
    for run in (first, second):
        assert [suite.ref for suite in run.header.suites] == ["small.yaml{cache.block_size: 8}"]
    assert first.header.notes == snapshot(
        (
            "options not given on the command line are from pyproject.toml: backends = reference,./wrong.py:Raising, checks = numerics,lse, device = cpu, keep = 2, settings = cache.block_size=8, skip = lse, suites = small.yaml",
        )
    )
    assert typed(repeat).code == 0
    assert len(list((folder / "results").iterdir())) == 2


def test_the_nearest_table_counts_and_its_paths_are_those_of_its_folder(folder, monkeypatch):
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
def test_a_file_of_others_fills_in_nothing(others, tmp_path):
    (tmp_path / "pyproject.toml").write_text(others)
    assert read_config(tmp_path) == Config()
    assert read_config(tmp_path).note == ""


WRONG = {
    'suite = "smoke"': "pyproject.toml: tool.attncheck.suite: unknown key; did you mean suites?",
    "colour = 1": "pyproject.toml: tool.attncheck.colour: unknown key; known keys: backends, suites, settings, checks, skip, seed, case_timeout, backend_timeout, memory_limit, device_memory_limit, expect, output, keep, device, pass_env, cache",
    "keep = 0": "pyproject.toml: tool.attncheck.keep: Input should be greater than or equal to 1 (found 0)",
    'checks = {numerics = "no"}': "pyproject.toml: tool.attncheck.checks: Input should be a valid list (found {'numerics': 'no'})",
    "seed =": "TMP/pyproject.toml: is not TOML: Invalid value (at line 2, column 7)",
    'checks = "numeric"': "unknown check 'numeric'; did you mean 'numerics'? (known: ...)",
}


@pytest.mark.parametrize("line", WRONG)
def test_what_is_wrong_is_named(typed, plain, line, folder):
    (folder / "pyproject.toml").write_text(f"[tool.attncheck]\n{line}\n")
    done = typed("run reference --suite small.yaml --in-process")
    assert (done.code, plain(done.err)) == (2, f"error: {WRONG[line]}\n")


RAY_FILE = """\
address: head:1
resources: {CPU: 4, memory: 8e9, "accelerator_type:H100": 0.001}
runtime_env: {working_dir: ., env_vars: {A: b}}
"""


def test_the_executor_is_this_machine_or_a_cluster_with_the_settings_of_a_file(tmp_path):
    assert read_executor("--executor", "local") is None
    assert read_executor("--executor", "ray") == RaySettings()
    (tmp_path / "ray.yaml").write_text(RAY_FILE)
    resources = {"CPU": 4.0, "memory": 8e9, "accelerator_type:H100": 0.001}
    expected = RaySettings("head:1", resources, {"working_dir": ".", "env_vars": {"A": "b"}})
    assert read_executor("--executor", f"ray:{tmp_path / 'ray.yaml'}") == expected


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read"),
        ("[", "cannot be read"),
        ("- 1", "is no mapping"),
        ("resources: {GPU: many}", "resources.GPU: Input should be a valid number"),
        ("resources: {GPU: -1}", "resources.GPU: Input should be greater than or equal to 0"),
        ("resources: {GPU: .inf}", "resources.GPU: Input should be a finite number"),
        ("nodes: 3", "nodes: Extra inputs are not permitted .*give address, resources, runtime_env"),
    ],
)
def test_what_is_wrong_in_the_file_of_a_cluster_is_named(content, reason, tmp_path):
    path = tmp_path / "ray.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(CaseFileError, match=f"ray.yaml: {reason}"):
        read_executor("--executor", f"ray:{path}")
