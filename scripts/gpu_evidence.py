"""Run attncheck's commands on a machine with a GPU, and keep their output and files in one folder.

    scripts/gpu-evidence [FOLDER]        default: docs/evidence/<gpu>-<date>

The machine is described first, then times are measured while nothing else runs, then the other parts run in parallel.
The audit of vLLM, which uses all cores, and backends that harm the GPU come last. A command that fails or takes too
long stops no other. Exit codes: 0 if the folder was written, whatever the results; 2 without a GPU or an empty folder.
"""

import contextlib
import lzma
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

import torch

from attncheck.backends.registry import builtin_names, import_file
from attncheck.cases.loader import suite_names

ROOT = Path(__file__).resolve().parent.parent
ATTNCHECK = (sys.executable, "-P", "-m", "attncheck")
PARTS = ("machine", "warm", "timing", "tests", "memcheck", "smoke", "miniatures", "suites", "vllm", "audit", "faults")
LAST = ("audit", "faults")
"""Parts that run alone. An audit uses all cores, and a kernel that does not end slows everything on its GPU."""

KERNELS = ("triton_unified", "triton_mla", "xformers", "torch_varlen", "flash_attn", "flashinfer")
"""Candidates with kernels of their own or of a library; a CPU interprets them slowly, or cannot run them."""

TIMED = {
    16: ("triton_unified", "torch_sdpa", "flex_attention", "xformers", "flashinfer"),
    256: ("triton_unified", "torch_varlen", "flash_attn"),
}
"""Candidates that are timed in turns, by page size in tokens. FlashAttention reads pages of 256 tokens in place."""

VLLM = {
    "smoke": ("FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION", "FLASH_ATTN_DIFFKV", "TRITON_ATTN_DIFFKV"),
    "vllm_latent,mla": ("TRITON_MLA", "FLASHMLA", "FLASH_ATTN_MLA"),
}
"""vLLM's classes for compute capability 9.0, by suites. All of them accept pages of 64 tokens, some no others."""

LARGE = "--case=large_* --case=mixed_large"
LARGE += " --set=layer.num_heads=32 --set=layer.num_kv_heads=8 --set=layer.head_size=128"

PLAIN = ("decode", "mixed.float16", "prefill", "long-decode", "soft-cap", "fp8-cache")
MEMCHECKED = {"triton_unified": PLAIN, "xformers": PLAIN, "triton_mla": ("latent", "latent-fp8")}
"""Small cases of suite ``interpreted``, since the memory checker follows every access of every kernel."""

# Without caching every tensor is its own allocation, so that a stray access crosses its boundary.
SANITIZER = "env PYTORCH_NO_CUDA_MEMORY_CACHING=1 {} --tool=memcheck --report-api-errors=no --error-exitcode=77"

TESTED = (
    "tests/harness/checks/cudagraph/test_cuda_real.py",
    "tests/miniatures/test_streams.py",
    "tests/backends/candidates/triton_unified",
    "tests/backends/candidates/triton_mla",
    "tests/miniatures/test_timing.py",
)
"""Tests that use the GPU if there is one. They need the extra ``test``."""

TRIED = ("torch_sdpa", "triton_unified", "ClaimsSingleDecode")
"""Backends of a trial on a CPU."""

Chain = tuple[str, list[list[str]]]
"""A name, and commands that run in sequence, since some read what others wrote."""


def options() -> ArgumentParser:
    """Return the parser of the command line."""
    parser = ArgumentParser(prog="gpu-evidence", description="Checks, times and graph levels on a GPU.")
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="where it all goes; must be empty")
    parser.add_argument("--device", default="cuda", help="cpu: tries the script on a few cases, without a GPU")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; may be repeated")
    parser.add_argument("--backend", default="*", metavar="PATTERN", help="only backends whose reference matches")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="processes that time each candidate")
    parser.add_argument("--limit", type=float, default=600, metavar="S", help="stop a command after S seconds")
    parser.add_argument("--within", type=float, default=3600, metavar="S", help="stop everything after S seconds")
    return parser


def main(words: list[str]) -> int:
    """Run the selected parts."""
    parser = options()
    given = parser.parse_args(words)
    if given.device != "cpu" and not torch.cuda.is_available():
        parser.error("this torch finds no GPU. --device cpu tries the script itself.")
    name = "cpu" if given.device == "cpu" else re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower())
    folder = given.folder = (given.folder or ROOT / "docs" / "evidence" / f"{name}-{datetime.now(UTC):%F}").absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        parser.error(f"{folder} is no empty folder: name another, or remove it.")
    folder.mkdir(parents=True, exist_ok=True)
    given.deadline = time.monotonic() + given.within
    page = f"# attncheck on {name}\n\n{'A trial without a GPU: it shows nothing else. ' * (name == 'cpu')}"
    page += f"`scripts/gpu-evidence {shlex.join(words)}`\n\n| step | how it ended | command |\n|---|---|---|\n"
    (folder / "README.md").write_text(page, encoding="utf-8")
    chosen = given.part or [part for part in PARTS if part not in ("vllm", "audit") or find_spec("vllm")]
    chains = {part: list(_chains(part, given)) for part in PARTS if part in chosen and part not in LAST}
    for chain in (*chains.pop("machine", ()), *chains.pop("warm", ()), *chains.pop("timing", ())):
        _run(chain, given)
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 2)) as pool:
        list(pool.map(lambda chain: _run(chain, given), [chain for part in chains.values() for chain in part]))
    for part in (part for part in LAST if part in chosen):
        for chain in _chains(part, given):
            _run(chain, given)
    for file in sorted(folder.rglob("*.jsonl")):  # a fiftieth of the size, and attncheck can read it
        file.with_suffix(".jsonl.xz").write_bytes(lzma.compress(file.read_bytes()))
        file.unlink()
    print(folder / "README.md")
    return 0


def _chains(part: str, given: Namespace) -> Iterator[Chain]:
    device, is_trial = f"--device={given.device}", given.device == "cpu"
    small, few = (["interpreted"], ["--case=scale"]) if is_trial else ([], [])
    match part:
        case "machine":
            yield (part, [["nvidia-smi"], ["nvidia-smi", "-q", "-d", "CLOCK,POWER"], [*ATTNCHECK, "doctor"]])
        case "timing":
            words = ["--suite=named_batches", f"--rounds={given.rounds}", device]
            words += ["--case=small_decode", "--time-limit=0.01"] if is_trial else LARGE.split()
            for page, refs in TIMED.items():
                words_of_page = [*words, f"--set=cache.block_size={page}"]
                yield from _chain(f"timing/pages-of-{page}", refs, words_of_page, given, command="time")
        case "memcheck":
            tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
            words = ["--suite=interpreted", "--check=numerics", "--check=lse", "--check=cache_write", "--in-process"]
            for ref, cases in MEMCHECKED.items():
                chosen = [*words, device, *(f"--case={case}" for case in cases)]
                yield from _chain(f"memcheck/{ref}", [ref], chosen, given, under=SANITIZER.format(tool))
        case "smoke":
            for ref in builtin_names():
                words = [f"--suite={name}" for name in small or ["smoke"]]
                yield from _chain(f"smoke/{ref}", [ref], [*words, *few, device], given, is_emulated=ref not in KERNELS)
        case "miniatures":
            folders = ROOT / "backends" / "mutants", ROOT / "tests" / "miniatures"
            for path in sorted(path for folder in folders for path in folder.glob("graphs*.py")):
                words = ["--suite=tests/miniatures/graphs.yaml", "--check=cudagraph", device]
                yield from _chain(f"miniatures/{path.stem}", _backends_in(path, given), words, given, is_emulated=True)
        case "warm":
            for ref in KERNELS:
                chosen = [f"--suite={name}" for name in small or ["smoke"]]
                if fnmatch(ref, given.backend) and not is_trial:
                    yield f"warm/{ref}", [[*ATTNCHECK, "warm", f"--backend={ref}", *chosen, device]]
        case "tests" if not is_trial:
            yield part, [[sys.executable, "-m", "pytest", "-q", "-W", "default", *TESTED]]
        case "vllm":
            words = ["--set=cache.block_size=64", f"--backend-timeout={_left_s(given) * 0.4:.0f}", device]
            for suites, names in VLLM.items():
                for name in names:
                    yield from _chain(f"vllm/{name}", [f"vllm:{name}"], [f"--suite={suites}", *words], given)
        case "audit" if not is_trial:
            name = given.folder / "audit"
            words = [f"--suite={suites}" for suites in VLLM] + ["--set=cache.block_size=64", device]
            words += [f"--within={max(_left_s(given) - 30, 1):.0f}"]  # the page takes a moment
            files = [f"--output={name}.jsonl", f"--report=audit={name}.md"]
            yield part, [[*ATTNCHECK, "run", "vllm:*", *words, *files]]
        case "faults" if not is_trial:
            path = ROOT / "tests" / "miniatures" / "faults_gpu.py"
            words = ["--suite=smoke", "--case=decode.float16,prefill", "--check=numerics", "--check=cudagraph", device]
            for ref in _backends_in(path, given):
                beside = [ref, "torch_sdpa"]
                yield from _chain(f"faults/{ref.rpartition(':')[2]}", beside, [*words, "--case-timeout=15"], given)
        case "suites":
            for ref in KERNELS:
                words = [f"--suite={name}" for name in small or suite_names()]
                words += ["--set=cache.block_size=256"] * (ref == "flash_attn")
                yield from _chain(f"suites/{ref}", [ref], [*words, *few, device], given)


def _chain(
    name: str,
    refs: Iterable[str],
    words: list[str],
    given: Namespace,
    under: str = "",
    *,
    command: str = "run",
    is_emulated: bool = False,
) -> Iterator[Chain]:
    """Yield a run of the selected backends with its reports; if ``is_emulated``, also a comparison with emulation."""
    wanted = [ref for ref in refs if fnmatch(ref, given.backend)]
    wanted = [ref for ref in wanted if given.device != "cpu" or ref.rpartition(":")[2] in TRIED]
    folder = given.folder.relative_to(ROOT) if given.folder.is_relative_to(ROOT) else given.folder
    file, base = folder / f"{name}.jsonl", folder / f"{name}-emulated.jsonl"
    run = [*ATTNCHECK, command, *(f"--backend={ref}" for ref in wanted), *words]
    commands = [[*under.split(), *run, f"--output={file}"]]
    if is_emulated:
        graphs = ["--check=cudagraph"] * ("--check=cudagraph" not in words)
        commands.append([*run, *graphs, "--device=cpu", f"--output={base}"])  # the last --device counts
        levels = f"--output={base.with_suffix('.md')}"
        commands.append([*ATTNCHECK, "compare", str(base), str(file), "--format=markdown", levels])
    for style, end in (("markdown", ".md"), ("html", ".html")):
        report = [*ATTNCHECK, "report", str(file), f"--format={style}", f"--output={file.with_suffix(end)}"]
        commands.append(report)
    if wanted:
        yield name, commands


def _backends_in(path: Path, given: Namespace) -> list[str]:
    """Return the references of a file's miniatures that run on the device, without their common base classes."""
    kind = torch.device(given.device).type
    own = [
        name
        for name, found in vars(import_file(str(path), path)).items()
        if hasattr(found, "get_kv_cache_shape") and kind in found.supported_devices
    ]
    return [f"{path.relative_to(ROOT)}:{name}" for name in own if not name.endswith(("Backend", "Base", "Miniature"))]


def _left_s(given: Namespace) -> float:
    """Return the seconds that one command may take now."""
    seconds: float = min(given.limit, given.deadline - time.monotonic())
    return seconds


def _run(chain: Chain, given: Namespace) -> None:
    """Run the commands of a chain; their output goes to one text file, their exit codes to the README."""
    name, commands = chain
    log = given.folder / f"{name}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    for words in commands:
        shown = shlex.join(words).replace(shlex.join(ATTNCHECK), "attncheck")
        with log.open("a", encoding="utf-8") as sink:
            print("$", shown, file=sink, flush=True)
            began = time.monotonic()
            ended = f"{_ended(words, _left_s(given), sink)}, {time.monotonic() - began:.0f} s"
            print(f"({ended})\n", file=sink)
        with (given.folder / "README.md").open("a", encoding="utf-8") as page:
            command = shown.replace(f"{given.folder}/", "").replace("|", "\\|")
            page.write(f"| [{name}]({name}.txt) | {ended} | `{command}` |\n")


def _ended(words: Sequence[str], limit: float, sink: TextIO) -> str:
    """Run a command and return how it ended; its process group is killed after ``limit`` seconds."""
    if limit <= 0:
        return "not begun: out of time"
    env = {"OMP_NUM_THREADS": "1", **os.environ}  # tensors of a case are small, and many processes run in parallel
    try:
        process = subprocess.Popen(
            words, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True
        )
    except OSError as error:
        return f"not begun: {error.strerror}"
    try:
        return f"exit code {process.wait(limit)}"
    except subprocess.TimeoutExpired:
        return f"stopped after {limit:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
