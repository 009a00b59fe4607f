"""Generate docs/vllm-versions.md, which compares the results for several versions of vLLM, from their run files.

    python scripts/vllm_versions.py RUN... > docs/vllm-versions.md

Each run file is of one version; a version may have several. docs/vllm-cpu.md has the commands that produce them.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tabulate import tabulate

from attncheck.reports.run_file.records import EXAMINED, UTILITIES, Record
from attncheck.reports.run_file.store import read_run

HEAD = """\
# Versions of vLLM, side by side

Made by `python scripts/vllm_versions.py` from a run of `vllm:CPU_ATTN` over `smoke` and one of `--provider vllm` for
each version, without expectations; [vllm-cpu.md](vllm-cpu.md) has the commands. Do not edit.

Good records of examined ones, and the outcome of each metadata utility:
"""


def main(words: Sequence[str]) -> int:
    """Print the page."""
    records = [record for word in words for record in read_run(Path(word)).records]
    versions = sorted({record.backend_version for record in records})
    checks = list(dict.fromkeys(record.check for record in records if record.check != UTILITIES))
    functions = list(dict.fromkeys(record.case_id for record in records if record.check == UTILITIES))

    def of_check(version: str, check: str) -> str:
        found = [each for each in records if (each.backend_version, each.check) == (version, check)]
        examined = [each for each in found if each.outcome in EXAMINED]
        return f"{sum(each.outcome == 'passed' for each in examined)} of {len(examined)}"

    def of_function(version: str, name: str) -> str:
        outcomes = [
            each.outcome
            for each in records
            if (each.backend_version, each.check, each.case_id) == (version, UTILITIES, name)
        ]
        return ", ".join(outcomes) or "not run"

    print(HEAD)
    print(_table("check", checks, versions, of_check), end="\n\n")
    print(_table("function", functions, versions, of_function), end="\n\n")
    print("## What ends differently\n")
    print("\n".join(_differences(records, versions)) or "Nothing.")
    return 0


def _table(head: str, names: Sequence[str], versions: Sequence[str], cell: Callable[[str, str], str]) -> str:
    rows = [[f"`{name}`", *(cell(version, name) for version in versions)] for name in names]
    return tabulate(rows, headers=[head, *versions], tablefmt="github", disable_numparse=True)


def _differences(records: Sequence[Record], versions: Sequence[str]) -> list[str]:
    """Return a line for each check of a case whose outcomes differ between versions, or that one version lacks."""
    outcomes: dict[tuple[str, str], dict[str, str]] = {}
    for record in records:
        outcomes.setdefault((record.case, record.check), {})[record.backend_version] = record.outcome
    return [
        f"- {case}, {check}: " + ", ".join(f"{version} {found.get(version, 'not run')}" for version in versions)
        for (case, check), found in outcomes.items()
        if len({found.get(version) for version in versions}) > 1
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
