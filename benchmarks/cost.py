"""What a run of attncheck costs, beside yardsticks of the same machine.

    python benchmarks/cost.py [--only NAME ...] [--source DIR] [--append docs/cost.jsonl]
    python benchmarks/cost.py --show docs/cost.jsonl

Each cost is divided by a yardstick measured on the same machine, so that ratios can be compared between machines.
``--source`` measures another checkout of attncheck, such as the one before a change. ``--append`` adds the measurement
to a file as a line of JSON. ``--show`` prints such a file as a Markdown table. Run it on an otherwise idle machine.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[1]
WITH_GRAPHS = "torch_sdpa"
"""A candidate that runs on every machine and has a CUDA-graph level to measure."""

NEVER = "reference"
"""A candidate whose CUDA-graph level is NEVER."""

ON_CPU = (WITH_GRAPHS, NEVER, "flex_attention", "reference_mla", "torch_mla")
ON_GPU = ("triton_unified", WITH_GRAPHS, "flex_attention", "xformers")
"""Candidates whose smoke is timed as a command, on the CPU and on a GPU."""

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


class Checkout:
    """A checkout of attncheck to measure, and an empty folder for the files its commands write."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.source, self.folder = source, folder
        self.yardsticks: dict[str, float] = {}
        own = {"PYTHONPATH": str(source / "src"), "OMP_NUM_THREADS": "1"}
        caches = ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
        self.environment = os.environ | own | {name: str(folder / name) for name in caches}

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


def best(measure: Callable[[], float], repeats: int = REPEATS) -> float:
    """Return the shortest of several measurements, since other work on the machine only adds to them."""
    return min(measure() for _ in range(repeats))


def yardsticks(checkout: Checkout) -> dict[str, float]:
    """Return the seconds that common work takes on this machine, by name."""
    return {
        "start of Python": best(lambda: checkout.python("-c", "pass")),
        "import torch": best(lambda: checkout.python("-c", "import torch")),
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
    """Time suite smoke of some backends on the first GPU, each twice, and how long the GPU was busy.

    The second run is warm: it finds compiled kernels and stored truths. Returns nothing without ``nvidia-smi``.
    """
    if shutil.which("nvidia-smi") is None:
        return {}
    sample = ["nvidia-smi", "--id=0", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "200"]
    found = {}
    for name in ON_GPU:
        for when in ("cold", "warm"):
            with subprocess.Popen(sample, stdout=subprocess.PIPE, text=True) as sampling:
                # A wrong case (exit code 1) takes as long as a right one.
                took = checkout.python(*_smoke_words("cuda", name), allowed=(0, 1))
                sampling.terminate()
                percents = [int(line) for line in sampling.communicate()[0].split()]
            found[f"smoke of {name} on a GPU, {when}"] = Cost(took, "import torch")
            busy = took * sum(percents) / 100 / max(1, len(percents))
            found[f"smoke of {name} on a GPU, {when}: GPU busy"] = Cost(busy, "import torch")
    return found


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


def measure(source: Path, names: Sequence[str]) -> dict[str, Any]:
    """Measure the figures of ``names`` on the checkout at ``source``; return the object that ``--append`` writes."""
    costs: Costs = {}
    with tempfile.TemporaryDirectory() as folder:
        checkout = Checkout(source, Path(folder))
        checkout.yardsticks |= yardsticks(checkout)
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
    options = parser.parse_args()
    if options.show is not None:
        print(table([json.loads(line) for line in options.show.read_text(encoding="utf-8").splitlines()]))
        return
    found = measure(options.source.resolve(), options.only or [name for name in FIGURES if name not in BY_NAME_ONLY])
    print(table([found]))
    if options.append is not None:
        with options.append.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
