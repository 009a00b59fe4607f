"""The options of ``--executor ray``: what they mean, and what does not go with them. No ray is needed."""

from pathlib import Path

import pytest
from inline_snapshot import snapshot

from attncheck.errors import CaseFileError, SelectionError
from attncheck.harness.cli import app as cli
from attncheck.harness.cli.options import read_ray
from attncheck.harness.workers.ray import RaySettings


def test_without_the_executor_there_are_no_settings() -> None:
    assert read_ray(None, (), None, is_used=False) is None
    assert read_ray(None, (), None, is_used=True) == RaySettings()


@pytest.mark.parametrize("name", ["--ray-address", "--ray-resources", "--ray-runtime-env"])
def test_options_of_a_cluster_that_is_not_used_are_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "reference", name, "x"]) == 2
    assert f"{name} is about a Ray cluster; add --executor ray" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["{working_dir: ., env_vars: {A: b}}", '{"working_dir": ".", "env_vars": {"A": "b"}}'])
def test_settings_are_read(form: str, tmp_path: Path) -> None:
    (tmp_path / "env").write_text(form)
    found = read_ray("head:1", ["CPU=4,memory=8e9", "accelerator_type:H100=0.001"], tmp_path / "env", is_used=True)
    resources = {"CPU": 4.0, "memory": 8e9, "accelerator_type:H100": 0.001}
    assert found == RaySettings("head:1", resources, {"working_dir": ".", "env_vars": {"A": "b"}})


@pytest.mark.parametrize("text", ["GPU", "GPU=", "=1", "GPU=many", "GPU=-1", "GPU=inf", "GPU=nan"])
def test_a_resource_is_a_name_and_an_amount(text: str) -> None:
    with pytest.raises(SelectionError, match="give NAME=AMOUNT"):
        read_ray(None, [text], None, is_used=True)


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "cannot be read"), ("[", "cannot be read"), ("- 1", "is no mapping")]
)
def test_a_runtime_environment_is_a_mapping(content: str | None, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "env.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(CaseFileError, match=f"--ray-runtime-env .*env.yaml: {reason}"):
        read_ray(None, (), path, is_used=True)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            ["--in-process"],
            snapshot("error: --executor ray cannot be combined with --in-process; leave out one of them"),
        ),
        (
            ["--dump", "tensors"],
            snapshot("error: --executor ray cannot be combined with --dump; leave out one of them"),
        ),
        (
            ["--show-output"],
            snapshot("error: --executor ray cannot be combined with --show-output; leave out one of them"),
        ),
        (
            ["--provider", "vllm"],
            snapshot("error: --executor ray cannot be combined with --provider; leave out one of them"),
        ),
        (["--watch"], snapshot("error: --watch cannot be combined with --executor ray; leave out one of them")),
        (
            ["--check", "timing"],
            snapshot(
                "error: --executor ray: the check timing compares times of one device, and a cluster has many; take times by a run on one machine"
            ),
        ),
        (
            ["--executor", "dask"],
            snapshot("error: --executor: 'dask' is not one of 'local', 'ray'; see `attncheck run --help`"),
        ),
    ],
)
def test_what_a_cluster_cannot_do_is_refused(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "reference", "--executor", "ray", *words]) == 2
    assert " ".join(capsys.readouterr().err.replace("│", " ").split()) == reason
