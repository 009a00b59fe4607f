"""docs/vllm-utilities.md: how the utilities of the installed vLLM relate to the reference, from an examination.

    python scripts/vllm_utilities.py > docs/vllm-utilities.md
    python scripts/vllm_utilities.py --check docs/vllm-utilities.md

Only the batches that are always asked are used, and no counts are written: the text depends on vLLM's version and on
the table of departures alone.
"""

import sys
from pathlib import Path

import torch

from attncheck.harness.providers.batches import ALWAYS
from attncheck.harness.providers.examination import SubjectResult, examine_subject
from attncheck.harness.providers.provider import Provider, load_provider
from attncheck.harness.providers.questions import SubjectSetting
from attncheck.harness.providers.subjects import SUBJECTS

HEAD = """\
# The metadata utilities of vLLM {version}

Made by `python scripts/vllm_utilities.py > docs/vllm-utilities.md` from an examination of vLLM {version}; do not edit.
A test of the tox environment `vllm` says whether it is up to date.

`attncheck run --provider vllm` asks the installed vLLM and the reference the same questions: over the batches of the
suites named by `--suite`, over batches drawn by hypothesis from the run's `--seed` (if it is installed, as by the extra
`fuzz`), and over a few that are always asked. Answers, refusals and what became of the arguments are compared. What
differs without a known reason fails the run; the known reasons are below, and each is verified whenever vLLM is
examined: one that no longer shows fails the run too, if it is this version that is examined.

- **equal**: every question is answered as the reference does.
- **drifted**: a signature or a meaning has changed since the behaviour that the reference describes.
- **judged**: a known defect, or an input taken without a check, where the reference deliberately answers otherwise.
- **missing**: gone from this version, which is no failure.

vLLM is asked in its own objects: lengths on the host are handed over as the upper bound of them that it knows, computed
tokens are derived, the largest count of logits indices is given. A `max_seq_len` or `max_query_len` above the truth is
an upper bound, and no wrong answer. Any exception is a refusal. What is as good (such a bound, an integer of numpy's)
is told among the known departures and counts as equal; a function that shows both kinds of them is called judged.

Another module is examined by `--provider package.module` or `--provider path/to/file.py`. It offers functions under the
reference's names and with its parameters, those of the first generation under `v0`, and is asked in the reference's
objects. It must refuse what the reference refuses, and has no known departures.

| function | verdict | found in |
|---|---|---|
"""


def main(words: list[str]) -> int:
    """Prints the document, or says whether a file holds it."""
    text = document(load_provider("vllm"))
    if not words:
        print(text, end="")
        return 0
    _, path = words
    if Path(path).read_text(encoding="utf-8") == text:
        return 0
    print(f"{path} is out of date; write it again: python scripts/vllm_utilities.py > {path}", file=sys.stderr)
    return 1


def document(provider: Provider) -> str:
    """The whole text."""
    setting = SubjectSetting(ALWAYS, torch.device("cpu"))
    results = {subject.key: examine_subject(provider, subject, setting) for subject in SUBJECTS}
    rows = [row(key, examined) for key, examined in results.items()]
    known = [line for key, examined in results.items() if examined is not None for line in detail(key, examined)]
    sections = {"Known departures": known, "Missing": missing(provider, results)}
    body = "".join(f"\n## {title}\n\n" + "\n".join(lines) + "\n" for title, lines in sections.items())
    return HEAD.format(version=provider.version) + "\n".join(rows) + "\n" + body


def row(key: str, examined: SubjectResult | None) -> str:
    """One line of the table."""
    if examined is None:
        return f"| `{key}` | missing | - |"
    return f"| `{key}` | {examined.verdict} | `{examined.place}` |"


def detail(key: str, examined: SubjectResult) -> list[str]:
    """What is known of one function, one line each."""
    lines = [f"- `{key}`, {departure.kind}: {departure.what}" for departure in examined.shown]
    lines += [f"- `{key}`: known, and no longer there: {departure.what}" for departure in examined.stale]
    if examined.first is not None:
        lines.append(f"- `{key}` differs: {examined.first.question}: {examined.first.differences[0]}")
    return lines


def missing(provider: Provider, results: dict[str, SubjectResult | None]) -> list[str]:
    """One line a reason, with the names that are gone for it."""
    names: dict[str, list[str]] = {}
    for key in (key for key, examined in results.items() if examined is None):
        names.setdefault(provider.departures.why_gone(key) or "nobody says why", []).append(f"`{key}`")
    return [f"- {', '.join(keys)}: {why}" for why, keys in names.items()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
