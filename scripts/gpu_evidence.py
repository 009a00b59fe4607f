"""Gathers evidence about CUDA graphs on a machine with a GPU: run files, and a page that says what they show.

    scripts/gpu-evidence [FOLDER]        default: docs/evidence/graphs-<gpu>-<date>

Every backend is asked in a process of its own, so that one that hangs or loses the device harms no other; the run files
of a part are joined afterwards. Whatever goes wrong is told on the page, and the rest goes on. Exit codes: 0 the page
is written, whatever it says; 2 this machine or the folder will not do.
"""

import argparse
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from evidence_jobs import (
    CLOCKS,
    FACTS,
    ROOT,
    Part,
    default_folder,
    examination,
    fact,
    introduced,
    joined,
    make_folder,
    run_all,
    write_texts,
)
from evidence_page import page

from attncheck.backends import interpreter
from attncheck.backends.contract import AttentionBackend
from attncheck.backends.registry import builtin_names, import_file
from attncheck.errors import BackendLoadError, DeviceError, QuestionError
from attncheck.harness.run.backend_choice import choose_device
from attncheck.reference.spec import BACKEND_CHECKS
from attncheck.reports.markdown.graph_agreement import CHECK

MINIATURES = "tests/miniatures/graphs*.py"
MINIATURE_SUITE = "tests/miniatures/graphs.yaml"

JOB_LIMIT_S = 150.0
"""The longest one backend may take; what was found by then is kept."""


def main(words: list[str]) -> int:
    """Gather, write the page, say where it is."""
    asked = _arguments(words)
    began = time.monotonic()
    try:
        device = choose_device("cpu" if asked.emulated_only else "cuda")
    except DeviceError as error:
        print(f"gpu-evidence needs a GPU: {error}. --emulated-only tries the script itself.", file=sys.stderr)
        return 2
    folder = asked.folder or default_folder("graphs", device)
    if refusal := make_folder(folder):
        print(refusal, file=sys.stderr)
        return 2
    command = shlex.join(["scripts/gpu-evidence", *words])
    facts = [fact(line) for line in FACTS]
    with tempfile.TemporaryDirectory() as scratch:
        parts = run_all(_plan(asked, device, Path(scratch)), began + asked.limit, JOB_LIMIT_S, asked.workers)
        parts = [joined(part, folder, command) for part in parts]
    write_texts(folder, [*facts, fact(CLOCKS)], parts)
    text = page(parts, command=command, seconds=time.monotonic() - began)
    (folder / "README.md").write_text(text, encoding="utf-8")
    print(f"{time.monotonic() - began:.0f} s, {folder / 'README.md'}")
    return 0


def _arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu-evidence", description="Real CUDA graphs beside their emulation.")
    kinds = ("candidates", "miniatures", "first-look")
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="where it all goes; must be empty")
    parser.add_argument("--part", action="append", choices=kinds, help="only this part; may be repeated")
    parser.add_argument("--backend", default="*", metavar="PATTERN", help="only backends whose reference matches")
    parser.add_argument("--case", action="append", metavar="PATTERN", help="only these cases of smoke")
    parser.add_argument("--limit", type=float, default=440, metavar="S", help="stop all processes after S seconds")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) - 2), help="processes at a time")
    parser.add_argument("--emulated-only", action="store_true", help="both sides on the CPU: tries the script itself")
    asked = parser.parse_args(words)
    asked.part = asked.part or kinds
    return asked


def _plan(asked: argparse.Namespace, device: str, scratch: Path) -> list[Part]:
    """What is asked of whom, what matters most first."""
    side = "cuda" if device == "cuda" else "again"
    sides = {side: device, "emulated": "cpu"}
    smoke = ("--suite", "smoke", *(word for case in asked.case or () for word in ("--case", case)))
    graphs = ("--check", CHECK)
    others = tuple(word for check in BACKEND_CHECKS if check != CHECK for word in ("--check", check))
    plan: list[tuple[str, str, str, Sequence[str], tuple[str, ...]]] = []
    for name, on in sides.items():
        plan.append(("candidates", name, on, builtin_names(), (*smoke, *graphs)))
        plan.append(("miniatures", name, on, _miniatures(), ("--suite", MINIATURE_SUITE, *graphs)))
    plan.append(("first-look", side, device, builtin_names(), (*smoke, *others)))
    left_out = _not_on_cpu(builtin_names())
    parts = []
    for kind, name, on, refs, words in plan:
        wanted = [ref for ref in refs if kind in asked.part and fnmatch(ref, asked.backend)]
        without = {ref: left_out[ref] for ref in wanted if on == "cpu" and ref in left_out}
        jobs = [
            examination(ref, (*words, "--device", on), scratch / f"{kind}-{name}-{number}.jsonl")
            for number, ref in enumerate(wanted)
            if ref not in without
        ]
        if wanted:
            parts.append(Part(kind, name, tuple(jobs), left_out=without))
    return parts


def _not_on_cpu(refs: Sequence[str]) -> dict[str, str]:
    """Those of ``refs`` that are asked nothing on a CPU, with the reason: smoke takes an interpreter too long."""
    reasons = {}
    for ref, found in introduced(refs, "cpu").items():
        if isinstance(found, QuestionError):
            continue  # asked, it says why
        if found.default_suite == interpreter.SUITE:
            reasons[ref] = "kernels are interpreted there, and smoke takes too long"
        elif found.unavailable_reasons:
            reasons[ref] = "; ".join(found.unavailable_reasons)
    return reasons


def _miniatures() -> list[str]:
    """References of the backends in those files, but for the base they share."""
    refs = []
    for path in sorted(ROOT.glob(MINIATURES)):
        try:
            module = import_file(str(path), path)
        except BackendLoadError:
            refs.append(str(path.relative_to(ROOT)))  # asked for as it is, it says why
            continue
        refs += [
            f"{path.relative_to(ROOT)}:{name}"
            for name, found in vars(module).items()
            if isinstance(found, type) and issubclass(found, AttentionBackend) and found.__module__ == module.__name__
            if name != "Miniature"
        ]
    return refs


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
