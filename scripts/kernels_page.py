"""The page that says what ``scripts/gpu-kernels`` found: suites, speed and memory. Starts nothing."""

import re
from collections.abc import Iterator, Mapping, Sequence

from evidence_jobs import Job, Part
from evidence_page import checks_table, circumstances, left_out, problems, what_was_run
from speed_rounds import CEILINGS, ROUNDS, Timing

from attncheck.reports.analysis import phrases
from attncheck.reports.markdown import markup
from attncheck.reports.run_file.header import Environment

HEAD = """\
The candidates that bring real kernels: the built-in suites at full size, how long a step takes, and what a memory
checker says. `log.txt` holds what every process printed, `environment.txt` the machine, `speed.jsonl` every median; the
run files can be read with `attncheck report FILE`.
"""

TRIAL = "**No GPU was used: tiny tensors on a CPU, which tries the script. No time below means anything.**"

SPEED = {
    "decode": "64 requests of 8192 keys, one row each",
    "prefill": "8 prompts of 4096 tokens, causal",
}
LAYER = "bfloat16, 32 query heads over 8 KV heads, head size 128."
LEGEND = f"""\
One step: the new rows are written and `forward` runs, as called from Python, with the metadata built before (planning
and copies to the device are not in it, waits within `forward` are). CUDA events, the L2 cache flushed before every
repeat, after a warm-up. In each of {ROUNDS} processes every candidate is timed once, in another order; the time is the
median of the processes' medians, beside the lowest and the highest of them. Where such ranges overlap, or there are
fewer processes, two candidates cannot be told apart. Share: of what was measured in the same processes, a copy (bytes
read and written) for decodes, a square product for prompts; counted are the bytes of query, output, keys and values
once, or the operations that a causal mask leaves. Error: the largest relative one of some rows against the float64
reference. `xformers` has no paged operator for prompts, and takes triton_unified's kernel for them.
"""

MEMCHECK = "memcheck"
"""The part that runs under the memory checker."""

WRONG_FROM = 0.02
"""A relative error that rounding to bfloat16 does not explain."""


def page(
    parts: Sequence[Part],
    timings: Sequence[Timing],
    no_memcheck: str,
    *,
    on_gpu: bool,
    environment: Environment,
    command: str,
    seconds: float,
    asked: Mapping[str, int],
) -> str:
    """The whole page. asked: by suite, how many cases it has. no_memcheck: why the memory checker did not run."""
    suites = [part for part in parts if part.kind.startswith("suites")]
    sections = [
        f"# Real kernels on {environment.device_name}",
        HEAD.strip(),
        *([] if on_gpu else [TRIAL]),
        circumstances([environment], command, seconds),
    ]
    sections += ["## What was run", what_was_run(parts), *problems(parts), *left_out(parts), *_coverage(suites, asked)]
    for part in suites:
        if part.run:
            sections += [f"## {part.kind.capitalize()}: the checks", *checks_table(part.run)]
    if timings:
        sections += ["## Speed", *([LAYER, LEGEND.strip()] if on_gpu else [])]
        sections += _speed(timings, on_gpu=on_gpu)
    checked = [part for part in parts if part.kind == MEMCHECK]
    sections += ["## Memory", *(line for part in checked for line in _memcheck(part)), *([no_memcheck] * (not checked))]
    return "\n\n".join(sections) + "\n"


def _coverage(parts: Sequence[Part], asked: Mapping[str, int]) -> list[str]:
    """What was asked and not answered, backend by backend: runs are stopped when the time is up."""
    lines = []
    for part in parts:
        answered: dict[str, set[str]] = {}
        for record in part.run.records if part.run else ():
            answered.setdefault(record.backend_ref, set()).add(record.case)
        for ref in dict.fromkeys(job.ref for job in part.jobs):
            suites = [suite for job in part.jobs if job.ref == ref for suite in _suites(job)]
            total, found = sum(asked[suite] for suite in suites), answered.get(ref, set())
            if len(found) < total:
                seen = {case.partition("/")[0] for case in found}
                missing = [suite for suite in suites if suite not in seen]
                unasked = f"; of these suites none: {', '.join(missing)}" if missing else ""
                told = f"{part.kind}, {ref}: {len(found)} of {total} cases have records{unasked}"
                lines.append(f"- {markup.escaped(told)}")
    return ["Cases without a record:", "\n".join(lines)] if lines else []


def _suites(job: Job) -> list[str]:
    return [value for word, value in zip(job.words, job.words[1:], strict=False) if word == "--suite"]


def _speed(timings: Sequence[Timing], *, on_gpu: bool) -> Iterator[str]:
    for question, (top, kind) in CEILINGS.items():
        own = [timing for timing in timings if timing.unit.startswith(f"{question}/")]
        ceiling = next((each for each in own if each.unit.endswith(top) and each.medians), None)
        unit, scale = ("GB/s", 1e9) if kind == "bytes" else ("TFLOP/s", 1e12)
        rows = [_row(each, ceiling, scale) for each in own if each.medians]
        title = SPEED[question] if on_gpu else "a few short requests"
        yield f"### {question.capitalize()}: {title}"
        headers = ["candidate", "page", "ms", "lowest - highest", "processes", unit, "share", "error"]
        yield markup.table(headers, rows)
        troubles = [f"- {markup.escaped(f'{each.unit}: {each.trouble}')}" for each in own if each.trouble]
        if troubles:
            yield "Not timed, or not in every process:"
            yield "\n".join(troubles)


def _row(timing: Timing, ceiling: Timing | None, scale: float) -> list[str]:
    _, name, tokens = timing.unit.split("/")
    is_ceiling = timing is ceiling
    share = "-" if ceiling is None or is_ceiling else f"{timing.rate / ceiling.rate:.0%}"
    error = "-" if is_ceiling else f"{timing.error:.1e}" if timing.error < WRONG_FROM else f"**{timing.error:.1e}**"
    low, high = min(timing.medians) * 1e3, max(timing.medians) * 1e3
    return [
        markup.escaped(name),
        "-" if is_ceiling else tokens,
        f"{timing.seconds * 1e3:.3f}",
        f"{low:.3f} - {high:.3f}",
        str(len(timing.medians)),
        f"{timing.rate / scale:.3g}",
        share,
        error,
    ]


def _memcheck(part: Part) -> list[str]:
    """What compute-sanitizer counted, backend by backend."""
    rows = []
    for job in part.jobs:
        counted = re.findall(r"ERROR SUMMARY: (\d+) error", job.output)
        records = [record for record in part.run.records if record.backend_ref == job.ref] if part.run else []
        cases = len({record.case for record in records})
        told = phrases.plural(int(counted[-1]), "error") if counted else "no summary"
        rows.append([markup.escaped(job.ref), told, str(cases), job.status, f"{job.seconds:.0f} s"])
    text = (
        "`compute-sanitizer --tool memcheck` around `attncheck run --in-process` of a few small cases, every tensor in "
        "an allocation of its own. Exit code 77: it found errors."
    )
    table = markup.table(["backend", "memcheck", "cases with records", "how it ended", "time"], rows)
    return [text, table]
