"""Case files from strangers: loaded or refused, in little time and memory."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from mutations import answered, changed, obeyed, try_inputs

from attncheck.cases.loader import load_file, suite_file, suite_names
from attncheck.cases.outline import keys_of, shape_of

VLLM = Path(__file__).parent.parent / "cases" / "vllm"
FILES = [path.read_bytes() for path in (*map(suite_file, suite_names()), *sorted(VLLM.glob("*.yaml")))]


def _apart(tree: Any) -> list[Any]:
    """Return each case of a suite as a file of its own."""
    return [{**tree, "cases": [case]} for case in tree["cases"]] if "cases" in tree else [tree]


TREES = [tree for content in FILES for tree in _apart(yaml.load(content, yaml.CSafeLoader))]
SMALL = [yaml.dump(tree, Dumper=yaml.CSafeDumper, sort_keys=False).encode() for tree in TREES]


@pytest.mark.parametrize("count", [150, pytest.param(4_000, marks=pytest.mark.slow)])
def test_whatever_a_case_file_holds(tmp_path: Path, count: int) -> None:
    def check(chance: Random) -> None:
        data = changed(chance, TREES, FILES, SMALL)
        suite = answered(load_file, tmp_path / "any.yaml", data)
        for case in suite.cases if suite is not None else ():
            assert len(case.hash) == 12
            assert not obeyed(case.description + shape_of(case))
            assert keys_of(case)

    try_inputs(check, count)
