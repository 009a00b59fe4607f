"""Gathers evidence about the candidates that bring real kernels, on a machine with a GPU, in one command.

    scripts/gpu-kernels [FOLDER]        default: docs/evidence/kernels-<gpu>-<date>

Speed first, while nothing else runs; then all built-in suites and the memory checker, side by side. What is not done
when the time is up is told on the page. Exit codes: 0 the page is written, whatever it says; 2 this machine or the
folder will not do.
"""

import argparse
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

from evidence_jobs import (
    CLOCKS,
    FACTS,
    Job,
    Part,
    default_folder,
    examination,
    fact,
    introduced,
    joined,
    make_folder,
    packed,
    run_all,
    write_texts,
)
from kernels_page import MEMCHECK, page
from speed_rounds import CONTENDERS, ROUNDS, measure, timings

from attncheck.backends import interpreter
from attncheck.cases.loader import load_suite, select, suite_names
from attncheck.cases.model import Suite
from attncheck.errors import DeviceError, QuestionError
from attncheck.harness.run.backend_choice import choose_device
from attncheck.harness.run.backend_description import BackendDescription
from attncheck.harness.run.environment import collect_environment

KERNELS = ("triton_unified", "triton_mla", "xformers", "torch_varlen", "flash_attn", "flashinfer")
"""Built-in candidates whose kernels are their own, or a library's."""

SETTINGS: Mapping[str, str] = {"flash_attn": "cache.block_size=256"}
"""Defaults of the suites that a candidate needs others of: pages that it reads."""

SPEED_LIMIT_S = 260.0
"""Rounds of timing that have not begun by then are left out."""

IN_TRITON = ("triton_unified", "triton_mla", "xformers")
MEMCHECK_CASES = ("decode", "mixed.float16", "prefill", "long-decode", "soft-cap", "fp8-cache", "latent", "latent-fp8")
"""Of suite interpreted: small, since the checker follows every access of every kernel, torch's too."""

SANITIZER = ("--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "77")
NVIDIA_TOOLS = "/usr/local/cuda/bin"


def main(words: list[str]) -> int:
    """Gather, write the page, say where it is."""
    asked = _arguments(words)
    began = time.monotonic()
    try:
        device = choose_device("cpu" if asked.emulated_only else "cuda")
    except DeviceError as error:
        print(f"gpu-kernels needs a GPU: {error}. --emulated-only tries the script itself.", file=sys.stderr)
        return 2
    if device == "cpu":
        os.environ |= interpreter.ENVIRONMENT  # for the processes to be started, and what is asked before
    folder = asked.folder or default_folder("kernels", device)
    if refusal := make_folder(folder):
        print(refusal, file=sys.stderr)
        return 2
    command = shlex.join(["scripts/gpu-kernels", *words])
    facts = [fact(line) for line in FACTS]
    tool = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), NVIDIA_TOOLS]))
    suites = [load_suite(name) for name in asked.suite or suite_names()]
    deadline = began + asked.limit
    jobs: list[Job] = []
    lines: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as scratch:
        if "speed" in asked.part:
            names = [each for each in CONTENDERS if fnmatch(each.split("/")[0], asked.backend)]
            end = min(deadline, time.monotonic() + SPEED_LIMIT_S)
            jobs, lines = measure(names, device, Path(scratch), rounds=asked.rounds, deadline=end)
        parts = _plan(asked, suites, device, tool, Path(scratch))
        parts = run_all(parts, deadline, asked.limit, asked.workers)
        parts = [packed(joined(part, folder, command), folder) for part in parts]
    parts += [Part("speed", device, tuple(jobs))] if jobs else []
    write_texts(folder, [*facts, fact(CLOCKS)], parts)
    if lines:
        (folder / "speed.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    text = page(
        parts,
        timings(lines),
        _no_memcheck(asked, device, tool),
        on_gpu=device != "cpu",
        environment=collect_environment(device),
        command=command,
        seconds=time.monotonic() - began,
        asked={suite.name: len(select(suite.cases, asked.case or ["*"])) for suite in suites},
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
    print(f"{time.monotonic() - began:.0f} s, {folder / 'README.md'}")
    return 0


def _arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu-kernels", description="Real kernels: suites, speed, memory.")
    kinds = ("speed", "suites", "memcheck")
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="where it all goes; must be empty")
    parser.add_argument("--part", action="append", choices=kinds, help="only this part; may be repeated")
    parser.add_argument("--backend", default="*", metavar="PATTERN", help="only candidates whose name matches")
    parser.add_argument(
        "--suite", action="append", metavar="NAME", help="only these suites. Default: all built-in ones"
    )
    parser.add_argument("--case", action="append", metavar="PATTERN", help="only these cases of the suites")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help="processes that time each candidate")
    parser.add_argument("--limit", type=float, default=500, metavar="S", help="stop all processes after S seconds")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) - 2), help="processes at a time")
    parser.add_argument("--emulated-only", action="store_true", help="tiny and on the CPU: tries the script itself")
    asked = parser.parse_args(words)
    asked.part = asked.part or kinds
    return asked


def _plan(
    asked: argparse.Namespace, suites: Sequence[Suite], device: str, tool: str | None, scratch: Path
) -> list[Part]:
    """The memory checker, which takes long, and the suites."""
    parts = [] if _no_memcheck(asked, device, tool) else [_memcheck_part(asked, device, str(tool), scratch)]
    if "suites" in asked.part:
        spare = asked.workers - sum(len(part.jobs) for part in parts)
        parts += _suite_parts(asked, suites, device, scratch, spare)
    return parts


def _suite_parts(
    asked: argparse.Namespace, suites: Sequence[Suite], device: str, scratch: Path, workers: int
) -> list[Part]:
    """The suites, dealt to as many processes a candidate as there is room for; those with other defaults apart."""
    wanted = [ref for ref in KERNELS if fnmatch(ref, asked.backend)]
    found = introduced(wanted, device)
    out = {ref: reason for ref in wanted if (reason := _reason(found[ref]))}
    able = [ref for ref in wanted if ref not in out]
    shares = max(1, workers // max(1, len(able)))
    parts = []
    for setting in dict.fromkeys(SETTINGS.get(ref, "") for ref in wanted):
        own = [ref for ref in wanted if SETTINGS.get(ref, "") == setting]
        jobs: list[Job] = []
        for ref in own:
            each = found[ref]
            if isinstance(each, QuestionError) or ref in out:
                continue
            words = ("--device", device, *(("--set", setting) if setting else ()))
            words += tuple(word for case in asked.case or () for word in ("--case", case))
            for share in _dealt(_of_kind(suites, is_mla=each.is_mla), shares):
                names = tuple(word for suite in share for word in ("--suite", suite.name))
                jobs.append(examination(ref, (*words, *names), scratch / f"suites-{ref}-{len(jobs)}.jsonl"))
        kind = f"suites-{setting.rpartition('=')[2]}" if setting else "suites"
        parts.append(Part(kind, device, tuple(jobs), left_out={ref: out[ref] for ref in own if ref in out}))
    return parts


def _reason(found: BackendDescription | QuestionError) -> str:
    """Why a candidate is not asked; empty: it is."""
    return str(found) if isinstance(found, QuestionError) else "; ".join(found.unavailable_reasons)


def _of_kind(suites: Sequence[Suite], *, is_mla: bool) -> list[Suite]:
    """Those with layers of the kind, which have a latent cache or none."""
    return [suite for suite in suites if any((case.layer.mla is not None) == is_mla for case in suite)]


def _dealt(suites: Sequence[Suite], shares: int) -> list[list[Suite]]:
    """About equally many cases a share; none is empty."""
    dealt: list[list[Suite]] = [[] for _ in range(min(shares, len(suites)))]
    for suite in sorted(suites, key=len, reverse=True):
        min(dealt, key=lambda share: sum(map(len, share))).append(suite)
    return dealt


def _memcheck_part(asked: argparse.Namespace, device: str, tool: str, scratch: Path) -> Part:
    """``attncheck run --in-process`` under compute-sanitizer."""
    jobs: list[Job] = []
    for ref in IN_TRITON:
        file = scratch / f"memcheck-{ref}.jsonl"
        is_mla = ref == "triton_mla"
        cases = [case for case in MEMCHECK_CASES if case.startswith("latent") == is_mla]
        words = ["--suite", "interpreted", "--in-process", "--device", device]
        words += [word for case in cases for word in ("--case", case)]
        words += [word for check in ("numerics", "lse", "cache_write") for word in ("--check", check)]
        # Within a block that torch hands out in pieces, a stray access hits no boundary.
        variables = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        jobs.append(examination(ref, words, file, under=(tool, *SANITIZER), variables=variables))
    return Part(MEMCHECK, device, tuple(job for job in jobs if fnmatch(job.ref, asked.backend)))


def _no_memcheck(asked: argparse.Namespace, device: str, tool: str | None) -> str:
    """Why the memory checker does not run; empty: it does."""
    if "memcheck" not in asked.part:
        return "The memory checker was not asked for."
    if device == "cpu":
        return "No memory checker: there is no GPU."
    return "" if tool else "No memory checker: compute-sanitizer is not on PATH."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
