"""What a run of attncheck costs, beside yardsticks of the same machine.

    python benchmarks/cost.py [--only NAME ...] [--source DIR] [--append docs/cost.jsonl]
    python benchmarks/cost.py --only smoke-on-gpu --limit-s 600 --folder out [--rows WORD ...]
    python benchmarks/cost.py --show docs/cost.jsonl

Each cost is divided by a yardstick measured on the same machine, so that ratios can be compared between machines.
``--source`` measures another checkout of attncheck, such as the one before a change. ``--append`` adds the measurement
to a file as a line of JSON. ``--show`` prints such a file as a Markdown table. Run it on an otherwise idle machine.

``smoke-on-gpu`` is for a machine with a GPU. Each cost is printed once it is known. Its commands share ``--limit-s``
seconds: one that takes longer than its share is stopped, and its row has the number of cases so far. ``--folder`` keeps
the run files. ``--rows xformers vllm default`` measures only backends whose names have one of these words, and the
default run. All rows are to take at most 15 minutes, or 29 with vLLM.
"""

import argparse
import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[1]
WITH_GRAPHS = "torch_sdpa"
"""A candidate that runs on every machine and has a CUDA-graph level to measure."""

NEVER = "reference"
"""A candidate whose CUDA-graph level is NEVER."""

ON_CPU = (WITH_GRAPHS, NEVER, "flex_attention", "reference_mla", "torch_mla")
ON_GPU = (WITH_GRAPHS, "triton_unified", "xformers", "flex_attention")
"""Candidates whose smoke is timed as a command, on the CPU and on a GPU."""

OF_VLLM = ("vllm:FLASH_ATTN", "vllm:TRITON_ATTN", "vllm:TRITON_MLA")
"""Classes of vLLM whose smoke is timed on a GPU, if vLLM is installed."""

TEST = "a test in vLLM's style of the same batches"
MATMUL = "one float64 matmul of as many operations"
REPEATS = 5


@dataclass(frozen=True)
class Cost:
    """A duration in seconds, and the name of the yardstick it is divided by."""

    seconds: float
    yardstick: str


Costs = dict[str, Cost]
"""Costs by the name of the work measured."""

Work = tuple[str, str, tuple[str, ...], float]
"""A command that is timed on a GPU: its name, the name of its caches, its words, and its aim in seconds."""


class Checkout:
    """A checkout of attncheck to measure, and an empty folder for the files its commands write."""

    def __init__(self, source: Path, folder: Path, limit_s: float = math.inf, works: Sequence[Work] = ()) -> None:
        """``limit_s``: seconds after which commands on a GPU are stopped. ``works``: these commands."""
        self.source, self.folder, self.deadline, self.works = source, folder, time.monotonic() + limit_s, works
        self.yardsticks: dict[str, float] = {}
        paths = os.pathsep.join([str(source / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | caches_in(folder)

    def python(self, *words: str, allowed: tuple[int, ...] = (0,)) -> float:
        """Run Python with ``words`` and return the wall time in seconds. ``allowed``: exit codes of a measurement."""
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, *words], env=self.environment, cwd=self.folder, capture_output=True, text=True, check=False
        )
        took = time.perf_counter() - began
        if done.returncode not in allowed:
            raise SystemExit(f"{' '.join(words)} ended with exit code {done.returncode}:\n{done.stderr}")
        return took

    def run_for(self, limit_s: float, output: Path, *words: str, caches: Path) -> tuple[float, str]:
        """Run `attncheck run` with ``words`` for at most ``limit_s``, with these caches and this run file.

        Return the wall time in seconds, and how the command ended: "" if it examined all cases.
        """
        line = [sys.executable, "-m", "attncheck", "run", *words, "--output", str(output), "--quiet"]
        environment, printed = self.environment | caches_in(caches), output.with_suffix(".txt")
        began = time.perf_counter()
        with (
            printed.open("w", encoding="utf-8") as file,
            subprocess.Popen(line, env=environment, cwd=self.folder, stdout=file, stderr=file) as running,
        ):
            try:
                running.wait(limit_s)
            except subprocess.TimeoutExpired:
                running.send_signal(signal.SIGINT)
                _end(running)
        took = time.perf_counter() - began
        if running.returncode in {0, 1} and took < limit_s:  # a wrong case (exit code 1) takes as long as a right one
            return took, ""
        how = "stopped" if took >= limit_s else f"ended with exit code {running.returncode}"
        return took, f", {how} after {num_cases(output)} cases"

    def attncheck(self, *words: str) -> float:
        """Run a command of attncheck and return the wall time in seconds."""
        return self.python("-m", "attncheck", *words)

    def inside(self, part: str) -> dict[str, float]:
        """Return the seconds that one part of ``cost_inside.py`` measures, in a fresh process."""
        words = [sys.executable, str(ROOT / "benchmarks" / "cost_inside.py"), part]
        done = subprocess.run(words, env=self.environment, cwd=self.folder, stdout=subprocess.PIPE, check=True)
        return {name: float(seconds) for name, seconds in json.loads(done.stdout).items()}

    def records(self, *words: str) -> list[dict[str, Any]]:
        """Run `attncheck run` with ``words`` and return the records of its run file."""
        file = self.folder / "run.jsonl"
        file.unlink(missing_ok=True)
        self.attncheck("run", *words, "--output", str(file), "--quiet")
        lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        return [line for line in lines if line["kind"] == "record"]


def _end(running: "subprocess.Popen[bytes]") -> None:
    """Wait for a command that was asked to stop, and kill it if that takes long."""
    try:
        running.wait(_ENDING_S)
    except subprocess.TimeoutExpired:
        running.kill()
        running.wait()


_ENDING_S = 20.0
"""Seconds that a stopped command may take to end its processes and to write its run file."""


def num_cases(file: Path) -> int:
    """Return of how many cases a run file has records; 0 if it does not exist."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    whole = text[: text.rfind("\n") + 1]  # a command that was killed may leave a part of a line
    lines = map(json.loads, whole.splitlines())
    return len({(each["suite"], each["case_id"]) for each in lines if each["kind"] == "record"})


def caches_in(folder: Path) -> dict[str, str]:
    """Return the variables that put all caches of attncheck, Triton and Inductor below ``folder``."""
    return {name: str(folder / name) for name in ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}


def best(measure: Callable[[], float], repeats: int = REPEATS) -> float:
    """Return the shortest of several measurements, since other work on the machine only adds to them."""
    return min(measure() for _ in range(repeats))


def yardsticks(checkout: Checkout, repeats: int = REPEATS) -> dict[str, float]:
    """Return the seconds that common work takes on this machine, by name."""
    return {
        "start of Python": best(lambda: checkout.python("-c", "pass"), repeats),
        "import torch": best(lambda: checkout.python("-c", "import torch"), repeats),
        **checkout.inside("yardsticks"),
    }


def first_verdict(checkout: Checkout) -> Costs:
    """Time `attncheck run` from start to exit, for one check of one case of a backend in a file."""
    _write_backend(checkout)
    words = ("run", "--backend", "./mine.py:Mine", "--case", "decode.float16", "--check", "numerics", "--no-output")
    return {"first verdict": Cost(best(lambda: checkout.attncheck(*words)), "import torch")}


def smoke(checkout: Checkout) -> Costs:
    """Sum the durations in the records of suite smoke, CUDA graphs and other checks separately."""
    found = {}
    for name in (WITH_GRAPHS, NEVER):
        records = checkout.records(name, "--suite", "smoke", "--in-process")
        for is_graph, what in ((True, "CUDA graphs"), (False, "other checks")):
            seconds = [float(each["duration_s"]) for each in records if (each["check"] == "cudagraph") is is_graph]
            found[f"smoke of {name}: {what}"] = Cost(sum(seconds), "import torch")
    return found


def smoke_of_five(checkout: Checkout) -> Costs:
    """Time the command that runs suite smoke with five backends on the CPU, without and with stored truths.

    User time is that of all its processes.
    """
    found = {}
    for when in ("", ", again"):
        used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        took = checkout.python(*_smoke_words("cpu", *ON_CPU))
        used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - used
        found[f"smoke of five backends{when}"] = Cost(took, "import torch")
        found[f"smoke of five backends{when}: user time"] = Cost(used, "import torch")
    return found


def smoke_on_gpu(checkout: Checkout) -> Costs:
    """Time the works of ``checkout`` on the first GPU, and how long it was busy; return {} without ``nvidia-smi``.

    The time left is divided by the aims of the commands left. None begins with caches that are only partly filled.
    """
    if shutil.which("nvidia-smi") is None:
        return {}
    found: Costs = {}
    unfilled = set()
    for index, (what, caches, words, aim_s) in enumerate(checkout.works):
        left = checkout.deadline - time.monotonic()
        limit_s = left * aim_s / sum(work[3] for work in checkout.works[index:])
        begins = limit_s >= _LEAST_S and caches not in unfilled
        took = _on_gpu(checkout, what, caches, words, limit_s) if begins else {}
        if what not in took:
            unfilled.add(caches)
        for name, seconds in took.items():
            found[name] = Cost(seconds, "import torch")
            print(f"{name}: {seconds:.1f} s", file=sys.stderr, flush=True)
        if not begins:
            print(f"{what}: not begun", file=sys.stderr, flush=True)
    return found


_LEAST_S = 5.0
"""Seconds that must be left for a command to begin."""


COLD_S, WARM_S, DEFAULT_S, ALL_OF_VLLM_S = 120.0, 60.0, 180.0, 300.0
"""Most seconds that smoke of a backend with empty and with warm caches, and the whole runs, are to take."""


def works_on_gpu(*, has_vllm: bool) -> list[Work]:
    """Return what is timed on a GPU: smoke of each backend, then the default run and all classes of vLLM together.

    Caches are empty at first. A warm command finds compiled kernels and stored truths of the cold one before it.
    """
    works: list[Work] = [
        (f"smoke of {name} on a GPU, {when}", name, (name, "--suite", "smoke"), aim_s)
        for name in (*ON_GPU, *(OF_VLLM if has_vllm else ()))
        for when, aim_s in (("cold", COLD_S), ("warm", WARM_S))
    ]
    works.append(("default run on a GPU, cold", "default", (), DEFAULT_S))
    if has_vllm:
        works.append(("smoke of vllm:* on a GPU, cold", "all of vllm", ("vllm:*", "--suite", "smoke"), ALL_OF_VLLM_S))
    return works


def _on_gpu(checkout: Checkout, what: str, caches: str, words: Sequence[str], limit_s: float) -> dict[str, float]:
    """Return the seconds of one run on the GPU, and for how many of them the GPU was busy."""
    file = re.sub(r"\W+", "-", what.replace("*", "all"))
    with subprocess.Popen(_SAMPLE, stdout=subprocess.PIPE, text=True) as sampling:
        took, how = checkout.run_for(
            limit_s,
            checkout.folder / f"{file}.jsonl",
            *words,
            *("--device", "cuda"),
            caches=checkout.folder / "caches" / caches,
        )
        sampling.terminate()
        percents = [int(line) for line in sampling.communicate()[0].split()]
    busy = took * sum(percents) / 100 / max(1, len(percents))
    return {f"{what}{how}": took, f"{what}{how}: GPU busy": busy}


_SAMPLE = ("nvidia-smi", "--id=0", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "200")


def _smoke_words(device: str, *names: str) -> tuple[str, ...]:
    return ("-m", "attncheck", "run", *names, "--suite", "smoke", "--device", device, "--quiet", "--no-output")


def truths(checkout: Checkout) -> Costs:
    """Time problems, truths and budgets of all cases of suite smoke, on one core."""
    seconds = checkout.inside("truths")
    return {name: Cost(each, "small operation") for name, each in seconds.items()}


def examination(checkout: Checkout) -> Costs:
    """Time ten fully examined cases, relative to a test in vLLM's style of the same batches."""
    seconds = checkout.inside("examination")
    checkout.yardsticks[TEST] = seconds.pop(TEST)
    return {name: Cost(each, TEST) for name, each in seconds.items()}


def prefill(checkout: Checkout) -> Costs:
    """Time the float64 reference on a prefill of 4,096 tokens, relative to one matmul of as many operations."""
    seconds = checkout.inside("prefill")
    checkout.yardsticks[MATMUL] = seconds.pop(MATMUL)
    return {name: Cost(each, MATMUL) for name, each in seconds.items()}


def default_run(checkout: Checkout) -> Costs:
    """Time `attncheck run` without arguments twice; the second run reads the truths that the first one cached."""
    words = ("run", "--quiet", "--no-output")
    return {name: Cost(checkout.attncheck(*words), "import torch") for name in ("default run", "default run, again")}


def own_tests(checkout: Checkout) -> Costs:
    """Time the tests of attncheck on two workers."""
    words = ("-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider")
    where = (f"--rootdir={checkout.source}", "-c", str(checkout.source / "pyproject.toml"), str(checkout.source))
    return {"own tests": Cost(checkout.python(*words, *where), "import torch")}


def _write_backend(checkout: Checkout) -> Path:
    file = checkout.folder / "mine.py"
    if not file.exists():
        checkout.attncheck("new", "backend", "mine")
    return file


FIGURES = {
    "first-verdict": first_verdict,
    "smoke": smoke,
    "smoke-of-five": smoke_of_five,
    "smoke-on-gpu": smoke_on_gpu,
    "truths": truths,
    "examination": examination,
    "prefill": prefill,
    "default": default_run,
    "tests": own_tests,
}
BY_NAME_ONLY = ("tests",)


def measure(
    source: Path,
    names: Sequence[str],
    *,
    folder: Path | None = None,
    limit_s: float = math.inf,
    works: Sequence[Work] = (),
) -> dict[str, Any]:
    """Measure the figures of ``names`` on the checkout at ``source``; return the object that ``--append`` writes."""
    costs: Costs = {}
    with tempfile.TemporaryDirectory() as temporary:
        checkout = Checkout(source, (folder or Path(temporary)).resolve(), limit_s, works)
        checkout.folder.mkdir(parents=True, exist_ok=True)
        checkout.yardsticks |= yardsticks(checkout, REPEATS if math.isinf(limit_s) else 1)
        for name in names:
            print(f"measuring {name}", file=sys.stderr)
            costs |= FIGURES[name](checkout)
        known = checkout.yardsticks
    commit = subprocess.run(
        ["git", "-C", str(source), "describe", "--always", "--dirty"],  # noqa: S607 (the git there is)
        capture_output=True,
        text=True,
        check=False,
    )
    ratios = {name: {**asdict(cost), "ratio": cost.seconds / known[cost.yardstick]} for name, cost in costs.items()}
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit.stdout.strip(),
        "machine": _machine(),
        "yardsticks": known,
        "costs": ratios,
    }


def _machine() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def table(measurements: Sequence[dict[str, Any]]) -> str:
    """Return measurements as a Markdown table with one column each, oldest first; a cell shows "ratio (time)"."""
    heads = [f"{each['commit']}, {each['date']}" for each in measurements]
    sticks = dict.fromkeys(name for each in measurements for name in each["yardsticks"])
    rows = [
        [f"yardstick: {name}", "", *(_time(each["yardsticks"].get(name)) for each in measurements)] for name in sticks
    ]
    for name in dict.fromkeys(name for each in measurements for name in each["costs"]):
        found = [each["costs"].get(name) for each in measurements]
        over = next(cost["yardstick"] for cost in found if cost)
        shown = (f"{cost['ratio']:,.3g} ({_time(cost['seconds'])})" if cost else "" for cost in found)
        rows.append([name, over, *shown])
    return tabulate(rows, headers=["cost", "over", *heads], tablefmt="github", disable_numparse=True)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    unit, factor = next(((unit, factor) for unit, factor in UNITS.items() if seconds * factor >= 1), ("us", 1e6))
    return f"{seconds * factor:.3g} {unit}"


UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6}


def main() -> None:
    """Measure, or read a file of measurements, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=FIGURES, help="default: all but the slow ones: tests")
    parser.add_argument("--source", type=Path, default=ROOT, help="the checkout to measure (default: this one)")
    parser.add_argument("--append", type=Path, help="a file of measurements, to add this one to")
    parser.add_argument("--show", type=Path, help="print the measurements of a file, and measure nothing")
    parser.add_argument("--folder", type=Path, help="an empty folder for files of commands (default: a temporary one)")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="seconds until smoke-on-gpu is stopped")
    parser.add_argument("--rows", nargs="+", default=[""], help="words in the names of backends of smoke-on-gpu")
    options = parser.parse_args()
    if options.show is not None:
        print(table([json.loads(line) for line in options.show.read_text(encoding="utf-8").splitlines()]))
        return
    works = works_on_gpu(has_vllm=find_spec("vllm") is not None)
    works = [work for work in works if any(word in work[1] for word in options.rows)]
    if not works:
        parser.error(f"--rows {' '.join(options.rows)}: no backend of smoke-on-gpu has such a name")
    if options.folder is not None and any(options.folder.glob("*")):
        parser.error(f"--folder {options.folder}: it is not empty, so caches would not be cold")
    names = options.only or [name for name in FIGURES if name not in BY_NAME_ONLY]
    found = measure(options.source.resolve(), names, folder=options.folder, limit_s=options.limit_s, works=works)
    print(table([found]))
    if options.append is not None:
        with options.append.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
