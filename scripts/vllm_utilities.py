"""Generate docs/vllm-utilities.md, which compares the utilities of the installed vLLM with the reference.

    python scripts/vllm_utilities.py > docs/vllm-utilities.md
    python scripts/vllm_utilities.py --check docs/vllm-utilities.md

Only the fixed batches are used, and no counts are written, so that the text depends only on vLLM's version and on the
table of departures.
"""

import inspect
import sys
from pathlib import Path

import torch
import yaml

from attncheck.harness.providers.batches import ALWAYS
from attncheck.harness.providers.examination import SubjectResult, examine_subject
from attncheck.harness.providers.provider import Provider, load_provider
from attncheck.harness.providers.questions import SubjectSetting
from attncheck.harness.providers.subjects import SUBJECTS

FAULTS = Path(__file__).parents[1] / "tests" / "vllm" / "faults.yaml"

LEFT_OUT = (
    "The reference has no model of the configurations, layers and cache layouts that these functions read, or they are "
    "a single expression:"
)
METHODS = "`unpadded`, `token_to_req_indices`, `replace`, `batch_size`, `naive_query_lens`"

HEAD = """\
# The metadata utilities of vLLM {version}

Made by `python scripts/vllm_utilities.py > docs/vllm-utilities.md` from an examination of vLLM {version}; do not edit.
A test of the tox environment `vllm` checks whether it is up to date.

`attncheck run --provider vllm` puts the same questions to the installed vLLM and the reference: over the batches of the
suites named by `--suite`, over batches drawn by hypothesis from the run's `--seed` (if it is installed, as by the extra
`fuzz`), and over a few fixed ones. Answers, refusals and what became of the arguments are compared.

- **equal**: every question is answered as the reference does.
- **drifted**: a signature or a meaning has changed since the behaviour that the reference describes.
- **judged**: a known defect, or an input taken without a check, where the reference deliberately answers otherwise.
- **missing**: gone from this version, which is no failure.

A known departure predicts vLLM's answer exactly. `harness/providers/vllm_changes` states each one apart from vLLM's
code, as a change of the reference's function. The right answer passes, and so does the predicted one. Any other answer
fails the run. A departure that does not show in every answer it predicts fails the run too, if it is this version that
is examined.

vLLM gets its own objects: lengths on the host are handed over as the upper bound of them that it knows, computed
tokens are derived, the largest count of logits indices is given. A `max_seq_len` or `max_query_len` above the truth is
an upper bound, and no wrong answer, except where a departure states which bound it is. Any exception is a refusal. What
is as good (such a bound, an integer of numpy's) is listed among the known departures and counts as equal; a function
that shows both kinds of them is called judged.

`--provider vllm:path/to/file.py` examines changed functions of vLLM outside the installed package. The file offers them
under vLLM's names and takes and returns vLLM's objects, and is held against the same departures. One that no longer
shows there is reported and fails nothing: a patch may fix it.

Another module is examined by `--provider package.module` or `--provider path/to/file.py`. It offers functions under the
reference's names and with its parameters, those of the first generation under `v0`, and gets the reference's
objects. It must refuse what the reference refuses, and has no known departures. A parameter that only newer versions
have, such as `treat_short_extends_as_decodes`, is passed where the function takes it.

Micro-batches carry none of the optional fields of the batch: logits indices, encoder lengths, local lengths of decode
context parallelism. vLLM and the reference agree in this, so that no answer shows it. vLLM's drop `is_prefilling`,
`positions` and the other fields of newer versions as well. A builder that reads one of them (cross attention, decode
context parallelism, `treat_short_extends_as_decodes=False`) cannot build from a micro-batch.

`tests/vllm/faults.yaml` holds {faults} faults, of three kinds for each function. A test puts each into a copy of vLLM's
module, and the examination finds all of them.

| function | verdict | found in |
|---|---|---|
"""


def main(words: list[str]) -> int:
    """Print the document, or return 1 if a file differs from it."""
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
    """Return the whole document."""
    setting = SubjectSetting(ALWAYS, torch.device("cpu"))
    results = {subject.key: examine_subject(provider, subject, setting) for subject in SUBJECTS}
    rows = [row(key, examined) for key, examined in results.items()]
    known = [line for key, examined in results.items() if examined is not None for line in detail(key, examined)]
    sections = {"Known departures": known, "Missing": missing(provider, results), "Not examined": left_out(provider)}
    body = "".join(f"\n## {title}\n\n" + "\n".join(lines) + "\n" for title, lines in sections.items())
    faults = len(yaml.safe_load(FAULTS.read_text(encoding="utf-8")))
    return HEAD.format(version=provider.version, faults=faults) + "\n".join(rows) + "\n" + body


def row(key: str, examined: SubjectResult | None) -> str:
    """Return one line of the table."""
    if examined is None:
        return f"| `{key}` | missing | - |"
    return f"| `{key}` | {examined.verdict} | `{examined.place}` |"


def detail(key: str, examined: SubjectResult) -> list[str]:
    """Return the departures of one function, one line each."""
    lines = [f"- `{key}`, {departure.kind}: {departure.what}" for departure in examined.shown]
    lines += [f"- `{key}`: known, and no longer there: {departure.what}" for departure in examined.stale]
    if examined.first is not None:
        lines.append(f"- `{key}` differs: {examined.first.question}: {examined.first.differences[0]}")
    return lines


def missing(provider: Provider, results: dict[str, SubjectResult | None]) -> list[str]:
    """Return one line for each reason, with the names of the missing functions."""
    names: dict[str, list[str]] = {}
    for key in (key for key, examined in results.items() if examined is None):
        names.setdefault(provider.departures.why_gone(key) or "no reason is known", []).append(f"`{key}`")
    return [f"- {', '.join(keys)}: {why}" for why, keys in names.items()]


def left_out(provider: Provider) -> list[str]:
    """Return the functions of vLLM's modules that are not examined."""
    examined = {subject.name for subject in SUBJECTS}
    names = [
        f"`{name}`"
        for module in provider.modules
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and name[0] != "_" and name not in examined
    ]
    return [LEFT_OUT, "", f"- {', '.join(names)}", f"- of `CommonAttentionMetadata`: {METHODS}"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
