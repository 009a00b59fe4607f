"""How often the likely cause that attncheck prints is right, partly right, missing or false.

    python benchmarks/causes.py [--all] [--output causes.json]

The faults are the mutants of the catalogue, every fourth of them without ``--all``, and the faults of
:mod:`causes_faults`: pairs of known faults, and faults that attncheck has no hypothesis for. Each runs on two cases,
in this process. The causes are those of the findings that a user sees, with their alternatives ("also possible").

A mutant runs on the case of its entry and on the case of ``smoke`` that is most like it. If :data:`CHECKS` lack the
check of its entry, it runs with that check alone, on the case of its entry. Mutants of metadata utilities have no
cause, and those of Triton kernels and of the suite ``limits`` take too long on a CPU; they are left out.

- right: the cause states the fault; of several causes that fit, one does;
- partly: the cause states one of two faults, or a part of one;
- described: no cause; the finding states which rows, heads, channels or slots are wrong;
- false: a cause, likely or only possible, that is not the fault; or a description that does not hold.

For faults of :mod:`causes_faults`, a false cause beside a right one is false too. Regular expressions judge the texts.
They may lack words of a right cause, so read the false ones, which are listed. ``PYTHONPATH`` selects the attncheck
that is measured; the first line has its folder.
"""

import argparse
import json
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from causes_faults import FAULTS, UNWRITTEN
from tabulate import tabulate

import attncheck
from attncheck.backends.declarations import required_features
from attncheck.backends.mutants.catalogue import PROVIDER, Mutant, catalogue
from attncheck.cases.loader import load_suite
from attncheck.cases.model import Case
from attncheck.cases.outline import keys_of
from attncheck.harness.cli.run import execute_run
from attncheck.harness.run.options import RunOptions
from attncheck.reports.analysis.findings import Finding, findings
from attncheck.reports.run_file.causes import ALTERNATIVE, UNEXPLAINED, likely_causes, perhaps
from attncheck.reports.run_file.records import Failed
from attncheck.reports.run_file.store import read_run

Verdict = Literal["right", "partly", "described", "false", "not caught"]

CHECKS = ("numerics", "lse", "cache_write")
_EVERY = 4
GROUPS = ("mutants", "mutants of other checks", "pairs of faults", "other faults")
_PARTLY = {
    "builder-capture-clears-host-twins": "shared metadata are changed",
    "builder-capture-shortens-lens": "shared metadata are changed",
    "counts-its-calls": "kept from an earlier call",
    "edges-sink-far-above-cancels": "the output is all zeros",
    "graph-changes-the-common-lengths": "writes to buffers of the model runner",
    "graph-pairs-requests": "padding .* is not left alone",
    "keeps-the-most-requests": "kept from an earlier call",
    "multiplies-the-output": "the output is all zeros",
    "without-keys-no-new-tokens": "last visible keys are missing",
}
"""Words of further causes that hold for a mutant, besides those of its entry."""
_VERDICTS: tuple[Verdict, ...] = ("right", "partly", "described", "false", "not caught")
_WORST_FIRST: tuple[Verdict, ...] = ("false", "right", "partly", "described")
_FILE = Path(__file__).with_name("causes_faults.py")


@dataclass(frozen=True)
class Subject:
    """A fault to examine: ``cases`` are ``suite/id``. The expressions are those of :class:`causes_faults.Fault`."""

    ref: str
    group: str
    truth: str
    right: tuple[str, ...]
    cases: tuple[str, ...]
    checks: tuple[str, ...]
    partly: str = "$^"
    untrue: str = "$^"

    @property
    def name(self) -> str:
        """The name of the mutant or the fault."""
        return self.ref.rpartition(":")[2]


@dataclass(frozen=True)
class Judged:
    """The verdict on a subject, and the texts of its findings: causes, or descriptions."""

    subject: Subject
    verdict: Verdict
    texts: tuple[str, ...]


def subjects(every: int) -> list[Subject]:
    """Return one of ``every`` mutants and all faults of the other file, with the cases on which each runs."""
    fast = [each for each in catalogue() if each.cause and not each.base.startswith(("triton", PROVIDER))]
    mutants = [each for each in fast if not (each.case or "").startswith("limits/")]
    found = [_of_mutant(each) for each in mutants[::every]]
    for fault in FAULTS:
        group = "pairs of faults" if fault.kind == "pair" else "other faults"
        cases = tuple(f"smoke/{case}" for case in fault.cases)
        ref = f"{_FILE}:{fault.name}"
        found.append(Subject(ref, group, fault.truth, fault.right, cases, CHECKS, fault.partly, fault.untrue))
    return found


def _of_mutant(mutant: Mutant) -> Subject:
    case = mutant.case or "smoke/decode.float16"
    words, partly = (mutant.cause or "",), _PARTLY.get(mutant.name, "$^")
    if mutant.check not in CHECKS:
        return Subject(mutant.ref, GROUPS[1], mutant.fault, words, (case,), (mutant.check or "numerics",), partly)
    cases = tuple(dict.fromkeys((case, _most_like(case))))
    return Subject(mutant.ref, GROUPS[0], mutant.fault, words, cases, CHECKS, partly, f"{UNWRITTEN}(?!.*added to)")


@cache
def _most_like(key: str) -> str:
    """Return the case of ``smoke`` that needs the same features as this one and agrees with it in most keys."""
    suite = key.partition("/")[0]
    own = next(case for case in load_suite(suite) if case.key == key)
    alike = [case for case in load_suite("smoke") if case.key != key and _features(case) == _features(own)]
    pairs = set(keys_of(own).items())
    return max(alike or [own], key=lambda case: len(pairs & set(keys_of(case).items()))).key


def _features(case: Case) -> frozenset[str]:
    return required_features(case.layer, case.cache, case.batch)


def judge(subject: Subject, found: Sequence[Finding]) -> Judged:
    """Return the verdict on the findings of a subject: false if one is, else the best of them."""
    verdicts: list[Verdict] = []
    texts = []
    for finding in found:
        causes = _causes(finding)
        if subject.group == GROUPS[1]:
            verdicts.append(_of_other_check(subject, finding))
        else:
            verdicts.append(_verdict(subject, causes) if causes else _described(subject, finding))
        texts.append(ALTERNATIVE.join(causes) if causes else f"({finding.title})")
    verdict = next((each for each in _WORST_FIRST if each in verdicts), "not caught")
    return Judged(subject, verdict, tuple(texts))


def _causes(finding: Finding) -> tuple[str, ...]:
    """Return the causes that the finding names, the printed title first, or () if it only describes.

    The first likely cause has the rows that support it, as it is printed.
    """
    example = finding.example
    if not isinstance(example, Failed) or not finding.is_explained:
        return ()
    meaning = finding.meaning_of(example)
    printed = meaning.partition(ALTERNATIVE)[0]
    return (printed if finding.is_confirmed else perhaps(printed), *likely_causes(meaning)[1:])


def _verdict(subject: Subject, causes: Sequence[str]) -> Verdict:
    each = [_of_cause(subject, cause) for cause in causes]
    is_strict = subject.group in GROUPS[2:]
    if "false" in each and (is_strict or set(each) == {"false"}):
        return "false"
    return each[0] if each[0] != "false" else "partly"


def _of_cause(subject: Subject, cause: str) -> Verdict:
    matches = [_has(words, cause) for words in subject.right]
    if all(matches):
        return "right"
    return "partly" if any(matches) or _has(subject.partly, cause) else "false"


def _described(subject: Subject, finding: Finding) -> Verdict:
    # Some titles state what is wrong, such as slots of the cache, and the entry of a mutant may have that as its cause.
    is_of_rows = finding.title.startswith(UNEXPLAINED) or re.match(r"\d+ of \d+ rows are wrong", finding.title)
    if subject.group == GROUPS[0] and not is_of_rows and _has(subject.right[0], finding.title):
        return "right"
    return "false" if _has(subject.untrue, finding.title) else "described"


def _of_other_check(subject: Subject, finding: Finding) -> Verdict:
    """Return right if the cause of the entry is anywhere in the example, whose parts are one statement."""
    example = finding.example
    parts = (finding.title, example.meaning, example.summary) if isinstance(example, Failed) else (finding.title,)
    verdict = _of_cause(subject, "\n".join(filter(None, parts)))
    return verdict if verdict != "false" or _causes(finding) else "described"


def _has(words: str, text: str) -> bool:
    return re.search(words, text, re.IGNORECASE) is not None


def measure(chosen: Iterable[Subject]) -> list[Judged]:
    """Examine the subjects, those with the same cases and checks in one run, and return their verdicts."""
    together: dict[tuple[tuple[str, ...], tuple[str, ...]], list[Subject]] = defaultdict(list)
    for subject in chosen:
        together[subject.cases, subject.checks].append(subject)
    judged = []
    with tempfile.TemporaryDirectory() as folder:
        for number, ((cases, checks), members) in enumerate(together.items()):
            output = Path(folder, f"{number}.jsonl")
            options = RunOptions(
                backends=tuple(each.ref for each in members),
                suites=tuple(dict.fromkeys(case.partition("/")[0] for case in cases)),
                keys=cases,
                checks=checks,
                device="cpu",
                in_process=True,
                output=output,
            )
            execute_run(options, see=lambda _record: None)
            run = read_run(output)
            found = findings(run.records, run.header)
            names = {info.ref: info.name for info in run.header.backends}
            judged += [judge(each, [one for one in found if one.backend == names[each.ref]]) for each in members]
            for each in judged[-len(members) :]:
                print(f"{each.verdict}: {each.subject.name}: {' / '.join(each.texts)}", file=sys.stderr, flush=True)
    return judged


def table(judged: Sequence[Judged]) -> str:
    """Return the counts of verdicts by group, and the shares among those caught, as a Markdown table."""
    rows = []
    for group in GROUPS:
        counts = Counter(each.verdict for each in judged if each.subject.group == group)
        caught = counts.total() - counts["not caught"]
        shares = [f"{100 * counts[verdict] / max(caught, 1):.0f} %" for verdict in ("right", "described", "false")]
        rows.append([group, *(counts[verdict] for verdict in _VERDICTS), *shares])
    heads = ["faults", *_VERDICTS, "right of caught", "described of caught", "false of caught"]
    return str(tabulate(rows, headers=heads, tablefmt="github"))


def listing(judged: Sequence[Judged]) -> str:
    """Return the false ones in words: the fault, and the texts of its findings."""
    lines = []
    for each in judged:
        if each.verdict == "false":
            lines += [f"false: {each.subject.name} ({each.subject.truth})", *(f"    {text}" for text in each.texts)]
    return "\n".join(lines) or "no cause is false"


def main() -> None:
    """Measure, and print the table and the false causes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="examine all mutants instead of every fourth")
    parser.add_argument("--output", type=Path, help="file to write verdicts and texts to, as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.process_time()
    judged = measure(subjects(1 if options.all else _EVERY))
    if options.output:
        found = [
            {"name": each.subject.name, "group": each.subject.group, "truth": each.subject.truth}
            | {"verdict": each.verdict, "texts": each.texts}
            for each in judged
        ]
        options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{Path(attncheck.__file__).parent}\n")
    print(f"{table(judged)}\n\n{listing(judged)}\n\n{time.process_time() - began:.0f} s of CPU time")


if __name__ == "__main__":
    main()
