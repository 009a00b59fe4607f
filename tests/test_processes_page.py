"""docs/crashes.md and docs/processes.md are true: the file crashes as shown, alone, and in the process of the run."""

import re
from pathlib import Path

from attncheck.harness.workers.passed_environment import DEFAULT

DOCS = Path(__file__).resolve().parent.parent / "docs"
TEXT = "".join((DOCS / page).read_text(encoding="utf-8") for page in ("crashes.md", "processes.md", "environment.md"))
((NAME, FILE),) = re.findall(r"^```python\n(# (?:\S+)\n)(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
(APART, OUTPUT), (HERE, _) = re.findall(r"^```console\n\$ (.*?)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def test_a_crash_is_reported_as_the_page_shows(shell, assert_printed, tmp_path):
    (tmp_path / "crashing.py").write_text(NAME + FILE, encoding="utf-8")
    code, printed = shell(APART, tmp_path)
    assert code == 1, printed
    frame = 'File "crashing.py", line 11 in forward'
    assert_printed(OUTPUT, re.sub(r'File ".*/crashing\.py", line 11 in forward', frame, printed))


def test_in_process_it_ends_the_run_and_states_where(shell, tmp_path):
    (tmp_path / "crashing.py").write_text(NAME + FILE, encoding="utf-8")
    code, printed = shell(HERE, tmp_path)
    assert code in (-6, 128 + 6), printed  # SIGABRT, as bash reports it or as it is
    assert 'crashing.py", line 11 in forward' in printed


def test_the_variables_that_a_backend_gets_are_listed():
    (section,) = re.findall(r"^## What a backend sees of the environment\n(.*?)^## ", TEXT, re.MULTILINE | re.DOTALL)
    items = "".join(re.findall(r"^(?:- |  ).*\n", section, re.MULTILINE))
    assert set(re.findall(r"`(.+?)`", items)) == set(DEFAULT)
