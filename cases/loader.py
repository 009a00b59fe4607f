"""Finds and loads suites: built-in ones by name, others by file.

A file is recognised by its keys as a case file or as a configuration of vLLM's attention benchmarks. A ``.jsonl`` file
holds workloads of FlashInfer-Bench.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from types import MappingProxyType

from attncheck.cases.flashinfer_bench import definition_fault, is_flashinfer_definition, read_flashinfer_bench
from attncheck.cases.keys import read_defaults, split_variant
from attncheck.cases.model import Case, Suite
from attncheck.cases.suite_file import FILE_KEYS, read_suite
from attncheck.cases.vllm_bench import is_vllm_bench, read_vllm_bench
from attncheck.cases.yaml_tree import Table, describe, parse_yaml, read_text
from attncheck.errors import UnknownNameError

_SUITES = Path(__file__).parent / "suites"


def suite_names() -> list[str]:
    """Return the names of the built-in suites: ``smoke`` first, then in alphabetical order."""
    names = sorted(path.stem for path in _SUITES.glob("*.yaml"))
    return sorted(names, key=lambda name: name != "smoke")


def suite_file(name: str) -> Path:
    """Return the file of the built-in suite ``name``; raise :class:`UnknownNameError` for any other name."""
    if name not in suite_names():
        raise UnknownNameError("suite", name, suite_names())
    return _SUITES / f"{name}.yaml"


def load_suite(name_or_path: str) -> Suite:
    """Return the built-in suite of that name, or the suite in that file; a built-in name takes precedence.

    Defaults in braces after it replace the suite's own: see :mod:`attncheck.cases.keys`.

    Raise :class:`CaseFileError` for a file that cannot be read or is invalid. Raise :class:`UnknownNameError` for a
    string that is not a suite's name and does not look like a file.
    """
    name, braces = (name_or_path, "") if Path(name_or_path).exists() else split_variant(name_or_path)
    over = read_defaults(braces, name_or_path) if braces else None
    if name in suite_names():
        return load_file(suite_file(name), over)
    path = Path(name)
    if path.suffix or len(path.parts) > 1 or path.exists():
        return load_file(path, over)
    raise UnknownNameError("suite", name, suite_names())


def load_file(path: Path, over: Table | None = None) -> Suite:
    """Return the suite in a file of any kind, with ``over`` merged over its defaults; raise :class:`CaseFileError`."""
    text = read_text(path, instead=f"built-in suites: {', '.join(suite_names())}")
    if path.suffix == ".jsonl":
        if over is not None:
            raise over.place.fault("workloads of FlashInfer-Bench have no defaults", allowed="leave --set out")
        return read_flashinfer_bench(text, path)
    root = parse_yaml(text, str(path))
    if not isinstance(root, Table):
        raise root.place.fault(
            f"a case file is a mapping, and this is {describe(root)}", allowed="begin with suite: and cases:"
        )
    if is_vllm_bench(root):
        return read_vllm_bench(root, path, over)
    if is_flashinfer_definition(tuple(root.entries)):
        raise definition_fault(path)
    if root.entries and not set(FILE_KEYS) & set(root.entries):
        raise root.place.fault(
            "neither a case file nor one of vLLM's attention benchmarks",
            value=", ".join(root.entries)[:60],
            allowed="a case file has suite: and cases:, a benchmark file batch_specs:",
        )
    return read_suite(root, path, over)


def select(cases: Iterable[Case], patterns: Sequence[str]) -> tuple[Case, ...]:
    """Return the cases that match any pattern, in their order, or all cases if there is no pattern.

    A pattern is matched as by a shell, against ``suite/id`` and against ``id``. If it equals the id of a case of a
    suite, it selects only that case of the suite. A case with variants also matches without them: ``decode`` selects
    ``decode.float16``.
    """
    cases = tuple(cases)
    exact = {(case.suite, name) for case in cases for name in (case.id, case.key)}

    def is_meant(case: Case, pattern: str) -> bool:
        names = (case.id, case.key)
        if (case.suite, pattern) in exact:
            return pattern in names
        return any(fnmatchcase(name, glob) for name in names for glob in (pattern, f"{pattern}.*"))

    return tuple(case for case in cases if not patterns or any(is_meant(case, pattern) for pattern in patterns))


TELLING = Path(__file__).with_name("telling.json")
"""The cases and checks of ``smoke`` that catch the most mutants a second, in order, by ``benchmarks/telling.py``."""


@cache
def telling_ranks() -> Mapping[tuple[str, str], int]:
    """Return the place in the order of each pair of a case key (``suite/id``) and a check that ``telling.json`` has."""
    listed = json.loads(TELLING.read_text(encoding="utf-8"))
    pairs = (pair.split() for pair in listed["order"])
    return MappingProxyType({(f"{listed['suite']}/{case}", check): place for place, (case, check) in enumerate(pairs)})
