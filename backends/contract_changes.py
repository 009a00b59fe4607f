"""Reads what differs between versions of vLLM's backend contract, from ``contract_changes.yaml``. Loads no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from attncheck.errors import QuestionError, UnknownNameError


def contract_changes(old: str, new: str) -> tuple[Mapping[str, Any], ...]:
    """Return the steps from version ``old`` of vLLM to ``new``, such as ``0.31`` to ``0.33``, as the file has them.

    Raises:
        UnknownNameError: the file has no such version.
        QuestionError: ``new`` is not later than ``old``.
    """
    steps = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    versions = [steps[0]["old"], *(step["new"] for step in steps)]
    for version in (old, new):
        if version not in versions:
            raise UnknownNameError("version of vLLM's contract", version, versions)
    if versions.index(new) <= versions.index(old):
        raise QuestionError(f"--to {new} is not later than --from {old}; versions are {', '.join(versions)}")
    return tuple(steps[versions.index(old) : versions.index(new)])
