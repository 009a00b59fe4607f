"""The options of ``--executor ray``: what they mean, and what does not go with them. No ray is needed."""

from pathlib import Path

import pytest

from attncheck.errors import CaseFileError, SelectionError
from attncheck.harness.run.options import RaySettings, read_executor


def test_the_executor_is_this_machine_or_a_cluster() -> None:
    assert read_executor("--executor", "local") is None
    assert read_executor("--executor", "ray") == RaySettings()
    with pytest.raises(SelectionError, match="--executor 'dask': give local, ray or ray:FILE"):
        read_executor("--executor", "dask")


RAY_FILE = """\
address: head:1
resources: {CPU: 4, memory: 8e9, "accelerator_type:H100": 0.001}
runtime_env: {working_dir: ., env_vars: {A: b}}
"""


def test_the_settings_of_a_cluster_are_a_file(tmp_path: Path) -> None:
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
def test_what_is_wrong_in_the_file_is_named(content: str | None, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "ray.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(CaseFileError, match=f"ray.yaml: {reason}"):
        read_executor("--executor", f"ray:{path}")
