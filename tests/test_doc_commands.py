"""Every command of README.md and docs/ works, and prints what the page shows. A page is a script, run in one folder.

- A ``python``, ``yaml`` or ``toml`` block that begins with ``# NAME`` is the file NAME; a ``diff`` changes such a file.
- The lines of a ``console`` block that begin with ``$`` are run. Lines below are printed, in order; ``...`` is any lines.
- A command fails only if the page shows a failure. What it shows as ``repeat:`` fails as well.
- Commands of ``sh`` blocks, and those in ``ONLY_PARSED``, are parsed: they need a GPU, vLLM, a terminal or an hour.
"""

import random
import re
import shlex
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer.main

from attncheck.harness.cli.app import app
from attncheck.reports.run_file.store import RunWriter, read_run

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SLOW = ("adding-a-backend.md", "candidates.md", "ci-gpus.md", "crashes.md", "fuzzing.md")
ONLY_PARSED = ("--device cuda", "--executor ray", "--expect known.yaml", "scripts/gpu-evidence")
FAILS = re.compile(r"FAILED|^(?:finding|failed|regression|incomplete)\b", re.MULTILINE)

ON_FEW = " --case 'long-*,head-size.*' --check numerics"
BRIEFLY = " --rounds 1 --time-limit 0.01"
MORE = {
    ("ci.md", "attncheck run"): ON_FEW,
    ("ci-gpus.md", "attncheck run"): ON_FEW,
    ("ci.md", "pytest"): " --attncheck-case 'long-*' -p no:cacheprovider",
    ("comparing.md", "attncheck time"): BRIEFLY,
    ("timing.md", "attncheck time"): BRIEFLY,
    ("comparing.md", "pytest "): " -p no:cacheprovider --benchmark-max-time=0.01 --benchmark-min-rounds=1",
}
"""Options that make the commands of a page short."""

SHARD = f"attncheck run --backend ./my_backend.py:MyBackend --suite smoke{ON_FEW} --shard"
TIMED = f"attncheck time torch_sdpa --suite decode --case single{BRIEFLY} --output"
BEFORE = {
    "running.md": ["attncheck new backend mine"],
    "ci-gpus.md": [
        "attncheck new backend my_backend",
        f"{SHARD} 1/3 --output 1.jsonl",
        f"{SHARD} 3/3 --output 3.jsonl",
    ],
    "ci.md": [
        "attncheck new backend my_backend && rm test_my_backend.py",  # which pytest would collect
        "attncheck run --backend torch_sdpa --case decode --check numerics --output results/correctness.jsonl",
        f"{TIMED} results/timing.jsonl && cp -r results base",
    ],
    "comparing.md": [
        "attncheck new backend old && attncheck new backend new && rm test_*.py",
        f"{TIMED} one-round.jsonl",
        f"ln -s '{ROOT / 'docs'}' docs",
    ],
}
"""Commands that make the files which a page assumes."""


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    yield from re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def commands(text: str) -> Iterator[tuple[str, str]]:
    """The commands of a block, each with the lines shown below it."""
    yield from re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE)


def parse(command: str) -> None:
    program, *words = shlex.split(command, comments=True)
    if program.endswith("attncheck"):
        name, *options = words
        typer.main.get_command(app).commands[name].make_context(name, options, resilient_parsing=False)
    elif program == "scripts/gpu-evidence":
        import_module("gpu_evidence").options().parse_args(words)


@pytest.mark.parametrize(
    "page",
    [pytest.param(each, marks=[pytest.mark.slow] if each.name in SLOW else []) for each in PAGES],
    ids=lambda page: page.name,
)
def test_a_page_is_true(
    page: Path,
    shell: Callable[..., tuple[int, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))

    def run(command: str) -> tuple[int, str]:
        for (name, beginning), options in MORE.items():
            if page.name == name and command.startswith(beginning):
                command += options
        for beginning in re.findall(r"([\w/]+-)\.\.\.", command):  # the hash of a case
            (found,) = {path.stem for path in tmp_path.rglob(f"{Path(beginning).name}*.yaml")}
            command = command.replace(f"{beginning}...", str(Path(beginning).with_name(found)))
        code, printed = shell(command, tmp_path)
        return code, printed.replace(f"{tmp_path}/", "")

    for command in BEFORE.get(page.name, []):
        code, printed = shell(command, tmp_path)
        assert code == 0, printed
    if page.name == "comparing.md":
        write_ten_rounds(tmp_path)
    for kind, text in blocks(page):
        if match := re.match(r"# ([\w.]+)\n", text):
            (tmp_path / match[1]).write_text(text, encoding="utf-8")
        if kind == "diff":
            change(tmp_path, text)
        for command, shown in commands(text) if kind == "console" else ():
            if any(words in command for words in ONLY_PARSED):
                parse(command)
                continue
            fails = FAILS.search(shown) is not None
            code, printed = run(command)
            assert (code != 0) == fails, printed
            assert_printed(shown, printed)
            for repeat in re.findall(r"repeat: (attncheck .*)", shown):
                code, printed = run(repeat)
                assert code != 0, printed


def assert_printed(expected: str, printed: str) -> None:
    """Check that all expected lines are printed, in order; ``...`` is any lines, or any text within a line.

    Figures with a decimal point and machine-specific words are not compared; counts are.
    """
    rest = iter([_plain(line) for line in printed.splitlines()])
    for line in expected.splitlines():
        if line.strip() not in ("", "..."):
            pattern = re.escape(_plain(line)).replace(re.escape("..."), ".*")
            found = any(re.fullmatch(pattern, each) for each in rest)
            assert found, f"shown was {line!r}; printed was:\n{printed}"


def _plain(line: str) -> str:
    """Return a line without what depends on the machine: torch's version, cores, figures, padding of tables."""
    line = re.sub(r"torch \S+,|\d+ cores?", "#", line)
    return " ".join(re.sub(r"\d+(\.\d+)+(e[+-]?\d+)?", "#", line).split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_command_that_is_not_run_is_one(page: Path) -> None:
    for kind, text in blocks(page):
        for line in text.splitlines() if kind == "sh" else ():
            if re.match(r"(?:\S*/)?attncheck ", line):
                parse(line)


def change(folder: Path, diff: str) -> None:
    """Apply a diff to the file that has the removed line once."""
    removed, added = (re.findall(rf"^{re.escape(sign)}(.*)$", diff, re.MULTILINE) for sign in "-+")
    (path,) = (path for path in folder.glob("*.py") if path.read_text(encoding="utf-8").count(removed[0]) == 1)
    path.write_text(path.read_text(encoding="utf-8").replace(removed[0], added[0]), encoding="utf-8")


def write_ten_rounds(folder: Path) -> None:
    """Two runs with the times that docs/comparing.md shows: a slower case, a faster one, one of much noise."""
    cases = {"long": (9e5, 1.1, 0.01), "ragged": (2.5e5, 1, 0.01), "many": (8e4, 1, 0.12), "single": (6e4, 0.9, 0.01)}
    run = read_run(folder / "one-round.jsonl")
    for name in ("base", "new"):
        luck = random.Random(name)
        with RunWriter(folder / f"{name}.jsonl", run.header.model_copy(update={"rounds": 10})) as writer:
            for number in range(10):
                for case, (time, factor, spread) in cases.items():
                    forward = time * (factor if name == "new" else 1) * luck.lognormvariate(0, spread)
                    writer.add(timed(run.records[0], case, number, forward, 2e4 * luck.lognormvariate(0, 0.01)))


def timed(record: Any, case: str, number: int, *medians: float) -> Any:
    latencies = tuple(
        latency.model_copy(
            update={"median_ns": time, "low_ns": time, "high_ns": time, "samples_ns": (round(time), round(time) + 1)}
        )
        for latency, time in zip(record.timing.latencies, medians, strict=True)
    )
    timing = record.timing.model_copy(update={"latencies": latencies})
    return record.model_copy(update={"case_id": case, "case_hash": case, "round": number, "timing": timing})
