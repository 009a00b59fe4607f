"""The options ``--ray-...`` of ``attncheck run`` as one value. Loads neither torch nor ray."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from attncheck.errors import CaseFileError, SelectionError
from attncheck.harness.run.patterns import split_commas
from attncheck.harness.workers.ray_cluster import RaySettings


def read_ray(
    address: str | None, resources: Iterable[str], runtime_env: Path | None, *, is_used: bool
) -> RaySettings | None:
    """Return the settings of ``--executor ray``; None: this machine examines (not ``is_used``).

    Raises:
        SelectionError: a resource that is no NAME=AMOUNT, or an option of Ray without ``--executor ray``.
        CaseFileError: ``runtime_env`` cannot be read, or is no mapping.
    """
    given = {"--ray-address": address, "--ray-resources": resources, "--ray-runtime-env": runtime_env}
    if not is_used:
        for name in (name for name, value in given.items() if value):
            raise SelectionError(f"{name} is about a Ray cluster; add --executor ray")
        return None
    return RaySettings(
        address, dict(map(_resource, split_commas(resources))), _runtime_env(runtime_env) if runtime_env else {}
    )


def _resource(text: str) -> tuple[str, float]:
    name, _, amount = text.partition("=")
    try:
        number = float(amount)
    except ValueError:
        number = -1.0
    if not name or not 0 <= number < float("inf"):
        raise SelectionError(
            f"--ray-resources {text!r}: give NAME=AMOUNT, such as GPU=1 or accelerator_type:H100=0.001"
        )
    return name, number


def _runtime_env(path: Path) -> dict[str, Any]:
    name = f"--ray-runtime-env {path}"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CaseFileError(f"cannot be read: {error}", file=name) from error
    if not isinstance(content, dict):
        raise CaseFileError("is no mapping", file=name, value=content, allowed="give fields such as working_dir")
    return content
